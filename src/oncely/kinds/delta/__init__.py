"""Delta tables: the log, the ledger beside it."""
