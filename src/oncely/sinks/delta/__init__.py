"""A Delta table as a sink: tasks write Parquet, and the driver commits it in one table commit."""
