"""A storm of rebalances: workers join, leave, are killed and are paused every second or two.

Into PostgreSQL and into Kafka, with each protocol of consumer groups in turn. Plain readers count
afterwards, and ``oncely verify`` checks the ledger and the event log of every worker.
"""
