"""Stores of positions: SQL tables, a compacted topic, offset stores."""
