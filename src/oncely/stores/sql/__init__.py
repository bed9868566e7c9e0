"""PostgreSQL and SQLite, and positions, epochs and history in tables beside the rows."""
