"""Kafka to Avro files by carrier, date and hour: Oncely against Spark's own partitioned writer."""
