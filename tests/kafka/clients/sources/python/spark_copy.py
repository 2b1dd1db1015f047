"""A Spark program with Kafka's connector, against a gateway.

Arguments: BOOTSTRAP JARS CHECKPOINT STAGE, run as `write` (a batch of rows into a topic), `stream`
(a stream from one topic to another, until it is killed), `drain` (the same, until all is copied),
or `read` (all rows, by a batch read with and without bounds). Prints OK.
"""

from __future__ import annotations

import sys
from typing import Any

import spark_bridge

ROWS = 2000
FROM, TO = "spark-from", "spark-to"


def main(bootstrap: str, jars: str, checkpoint: str, stage: str) -> None:
    config = {"spark.jars": jars, "spark.sql.shuffle.partitions": "2"}
    with spark_bridge.session(master="local[2]", config=config) as spark:
        from pyspark.sql import functions as f

        def source(topic: str, stream: bool = False, **options: Any) -> Any:
            reader = spark.readStream if stream else spark.read
            return (
                reader.format("kafka")
                .option("kafka.bootstrap.servers", bootstrap)
                .option("subscribe", topic)
                .option("startingOffsets", "earliest")
                .option("kafka.isolation.level", "read_committed")
                .option("includeHeaders", "true")
                .options(**options)
                .load()
            )

        if stage == "write":
            rows = spark.range(ROWS).select(
                f.col("id").cast("string").alias("key"),
                f.concat(f.lit("row "), f.col("id")).alias("value"),
                f.array(f.struct(f.lit("kind").alias("key"), f.lit(b"test").alias("value"))).alias(
                    "headers"
                ),
            )
            writer = rows.write.format("kafka").option("kafka.bootstrap.servers", bootstrap)
            writer.option("topic", FROM).option("includeHeaders", "true").save()
        elif stage == "read":
            found = source(FROM).collect()
            assert len(found) == ROWS, len(found)
            assert {bytes(row.value).decode() for row in found} == {f"row {n}" for n in range(ROWS)}
            assert {row.headers[0].key for row in found} == {"kind"}
            bounds = '{"%s": {"0": 3, "1": 0, "2": 0}}'
            part = source(FROM, endingOffsets=bounds % FROM).count()
            assert part == 3, part
            copied = [bytes(row.value).decode() for row in source(TO).collect()]
            assert set(copied) == {f"ROW {n}" for n in range(ROWS)}, len(copied)
            print("COPIED", len(copied), flush=True)
        else:
            trigger = (
                {"availableNow": True} if stage == "drain" else {"processingTime": "0 seconds"}
            )
            query = (
                source(FROM, stream=True, maxOffsetsPerTrigger=200)
                .selectExpr("key", "upper(cast(value as string)) as value")
                .writeStream.format("kafka")
                .option("kafka.bootstrap.servers", bootstrap)
                .option("topic", TO)
                .option("checkpointLocation", checkpoint)
                .trigger(**trigger)
                .start()
            )
            query.awaitTermination()
    print("OK", flush=True)


main(*sys.argv[1:])
