"""PostgreSQL and SQLite: sessions, errors by consequence, types."""
