"""The protocols as TLA+ modules, and their checker."""
