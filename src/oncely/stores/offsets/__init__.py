"""Offset stores: positions outside of the sink's own ledger."""
