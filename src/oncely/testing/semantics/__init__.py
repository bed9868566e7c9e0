"""Demonstration of delivery semantics: pipelines are killed at each step of a commit, and counted.

``oncely semantics`` runs real pipelines on real servers. The effect of a crash under each of the
four semantics is counted by a reader that shares no code with the pipeline.
"""
