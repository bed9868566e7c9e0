"""Positions, epochs and history in tables of the database that holds the rows."""
