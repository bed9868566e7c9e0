"""Where records take effect, and where the ledger lives."""
