"""Positions and epochs in a compacted topic, with a copy in the consumer group."""
