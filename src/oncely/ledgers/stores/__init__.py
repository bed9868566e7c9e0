"""Offset stores: where positions live that do not live in the sink's own ledger."""
