"""Real servers as child processes, for the demo, the bench, the tests and a first try.

Kafka (one KRaft node), PostgreSQL and a standalone Spark cluster. They listen on 127.0.0.1 only,
keep their files in one directory each, and end with the process that started them, however it
ends.
"""
