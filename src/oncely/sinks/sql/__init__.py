"""SQL databases: one transaction holds rows, rejects, history and position."""
