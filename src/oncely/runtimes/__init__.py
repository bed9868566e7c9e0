"""Runtimes decide when records are read and committed; the commit path is ``commit/path.py``."""
