"""Topics: records, rejects, offsets and ledger in one transaction of the cluster."""
