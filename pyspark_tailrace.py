"""Where Spark discovers the `tailrace` data source: any importable top-level module named pyspark_* with a DefaultSource."""

from spark_bridge.datasource import TailraceDataSource as DefaultSource

__all__ = ["DefaultSource"]
