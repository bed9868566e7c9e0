"""The runtime on Spark Structured Streaming."""
