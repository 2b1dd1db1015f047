"""Spark's reads, writes and streams, beside Parquet files and Kafka."""
