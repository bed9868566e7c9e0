"""Delivery semantics shown: a pipeline is killed at each step of its commit, restarted, counted.

``oncely semantics`` runs real pipelines on real servers. What a crash does under each of the four
semantics is not told but counted, by a reader that shares no code with the pipeline.
"""
