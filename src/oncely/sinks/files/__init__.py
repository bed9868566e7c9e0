"""Files that take effect by a manifest in Kafka: staged by tasks, named by one transaction."""
