"""Kafka: clients, topics, the source, consumer groups, producers, transactions."""
