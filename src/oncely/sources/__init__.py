"""Kafka as a source: identity, watermarks, records."""
