"""Values and decisions: no I/O, no clock, no threads, no Spark."""
