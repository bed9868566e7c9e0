"""The worker: a member of a consumer group that commits through the ledger. Never imports Spark."""
