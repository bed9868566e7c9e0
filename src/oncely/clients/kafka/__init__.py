"""Kafka by librdkafka: clients, topics, producers, transactions."""
