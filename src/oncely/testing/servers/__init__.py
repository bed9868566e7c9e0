"""Real servers as child processes, for the demo, the bench, tests and first experiments.

Kafka (one KRaft node), PostgreSQL and a standalone Spark cluster. They listen on 127.0.0.1 only,
keep their files in one directory each, and end with the process that started them, even if it is
killed.
"""
