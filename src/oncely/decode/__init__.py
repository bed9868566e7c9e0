"""Conversion of Kafka's bytes to Arrow columns and rejects; each record has exactly one outcome."""
