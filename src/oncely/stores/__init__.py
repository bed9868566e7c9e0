"""Ledgers with their clients: SQL tables, a compacted topic, offset stores, objects."""
