"""Decide when records are read and committed; the commit path itself is ``commit.py``."""
