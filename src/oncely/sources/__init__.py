"""Kafka as a source: identity, watermarks, records, and what Spark's reader is told."""
