"""The file-table format: manifest, schemas, partitions, Avro and Parquet files."""
