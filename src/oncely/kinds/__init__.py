"""The kinds of destinations."""
