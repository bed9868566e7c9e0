"""Readers of everything that Oncely stores, for audit and verify: their own, not the pipeline's.

They parse the stored formats a second time (docs/MANIFEST.md, docs/decisions/0039, the table in
:mod:`oncely.stores.topic.records`): an audit that read by the pipeline's code would share its
mistakes. Invalid content is returned as a problem, and nothing is written.
"""
