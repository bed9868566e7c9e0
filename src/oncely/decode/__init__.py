"""Kafka bytes to Arrow columns and rejects; exactly one outcome for each record."""
