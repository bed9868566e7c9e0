"""Kafka as a source: identity, watermarks, records, and options of Spark's reader."""
