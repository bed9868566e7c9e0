"""SQL databases: one transaction contains rows, rejects, history and position."""
