"""The command ``oncely``."""

from oncely.cli.app import main

__all__ = ["main"]
