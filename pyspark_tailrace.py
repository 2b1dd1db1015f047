"""Makes Spark discover the `tailrace` data source: it imports top-level modules named pyspark_* and
looks for DefaultSource.
"""

from spark_bridge.datasource import TailraceDataSource as DefaultSource

__all__ = ["DefaultSource"]
