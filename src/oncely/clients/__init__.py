"""All code that opens sockets and files: Kafka, databases, file systems."""
