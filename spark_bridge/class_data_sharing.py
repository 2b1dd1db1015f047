"""`python -m spark_bridge.class_data_sharing`: a short Spark session that loads the classes of
common queries, so that its JVM archives them when it ends.

See `spark_bridge.session_cache`. It needs no appliance: a source of its own gives some rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from spark_bridge.session import local_session
from spark_bridge.session_cache import ARCHIVE, PREPARE_TIMEOUT_S, cache_directory, make_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class _Numbers(DataSource):
    @classmethod
    def name(cls) -> str:
        return "tailrace_prepare"

    def schema(self) -> str:
        return "key binary, value binary, offset bigint, timestamp timestamp"

    def reader(self, schema: object) -> DataSourceReader:
        return _Reader()


class _Reader(DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(2)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        key = pa.array([b"k"], pa.binary())
        times = pa.array([0], pa.timestamp("us", "UTC"))
        yield pa.RecordBatch.from_arrays(
            [key, key, pa.array([1]), times], ["key", "value", "offset", "timestamp"]
        )


def _queries(spark: SparkSession) -> None:
    spark.dataSource.register(_Numbers)
    frame = spark.read.format("tailrace_prepare").load()
    frame.count()
    frame.write.format("noop").mode("overwrite").save()
    frame.groupBy("key").agg({"offset": "sum", "*": "count"}).orderBy("key").collect()
    frame.filter("offset < 10").select("key", "timestamp").toPandas()
    frame.mapInArrow(lambda batches: batches, frame.schema).count()


def main() -> int:
    """Write the archive; its directory may be given."""
    directory = sys.argv[1] if len(sys.argv) > 1 else cache_directory()
    home = make_home(f"{directory}/home")
    unfinished = f"{directory}/{ARCHIVE}.{os.getpid()}"
    with local_session(
        java_options=(f"-XX:ArchiveClassesAtExit={unfinished}",),
        home=home,
        end_timeout_s=PREPARE_TIMEOUT_S,
    ) as spark:
        _queries(spark)
    os.replace(unfinished, f"{directory}/{ARCHIVE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
