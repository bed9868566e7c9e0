"""A Delta table: tasks write Parquet, and the driver commits it in one commit to the table."""
