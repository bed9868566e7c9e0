"""Kafka to Kafka: Oncely against Spark's own sink, quixstreams and Kafka Streams."""
