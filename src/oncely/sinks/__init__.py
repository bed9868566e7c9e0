"""Destinations of records, each with a ledger."""
