"""Files that take effect by a manifest in Kafka: staged by tasks, published by one transaction."""
