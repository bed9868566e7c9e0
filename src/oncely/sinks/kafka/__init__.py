"""Kafka as the sink: records, rejects, offsets and ledger in one transaction of the cluster."""
