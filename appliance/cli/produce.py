"""`tailrace produce`: lines from standard input, or the rows of a file."""

from __future__ import annotations

import datetime as dt
import sys
import time

import click

from appliance.cli.main import CONNECT_TIMEOUT_MS
from appliance.cli.options import TIME_HELP, Moment, bootstrap_option, json_option
from appliance.cli.output import print_json, progress, say
from tailrace.admin import Admin, NewTopic
from tailrace.errors import InvalidRecordError, TailraceError, UnknownTopicError
from tailrace.producer import Producer
from tailrace.topics import TopicInfo

SLICE_ROWS = 50_000


@click.command()
@click.argument("topic")
@click.option("--key-separator", metavar="TEXT", help="What comes before this on a line is the key.")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False),
    help="Send the rows of this .csv, .jsonl, .parquet or .arrow file; makes a typed topic if there is none.",
)
@click.option("--key-column", help="With --from: rows with the same value here go to the same partition.")
@click.option("--partitions", default=1, show_default=True, help="With --from: how many partitions a topic that is made has.")
@click.option("--due", type=Moment(), help=f"Have them delivered then: {TIME_HELP}")
@click.option(
    "--due-column", help="With --from: a column of times or durations that says for each row when it is delivered; it is not sent."
)
@click.option("--acks", type=click.Choice(["0", "1", "all"]), default="all", show_default=True, help="What to wait for.")
@click.option("--compression", type=click.Choice(["none", "lz4", "zstd"]), help="Compression of batches; default: as the topic says.")
@bootstrap_option
@json_option
def command(
    topic: str,
    key_separator: str | None,
    source: str | None,
    key_column: str | None,
    partitions: int,
    due: dt.datetime | None,
    due_column: str | None,
    acks: str,
    compression: str | None,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Send lines from standard input to a topic, or the rows of a file. On a typed topic each line is a JSON object.

    \b
    Example:
      echo 'u1:hello' | tailrace produce orders --key-separator :
      tailrace produce flights --from flights.csv --key-column origin
      echo 'u1:call back' | tailrace produce reminders --key-separator : --due 2h
    """
    if due_column is not None and (source is None or due is not None):
        raise click.UsageError("--due-column goes with --from, and without --due")
    started = time.monotonic()
    acks_value: int | str = acks if acks == "all" else int(acks)
    with Admin(bootstrap, connect_timeout_ms=CONNECT_TIMEOUT_MS) as admin:
        try:
            info: TopicInfo | None = admin.topic_info([topic])[topic]
        except UnknownTopicError:
            if source is None:
                raise
            info = None
        with Producer(bootstrap, acks=acks_value, compression_type=compression) as producer:
            if source is not None:
                count = _send_file(admin, producer, topic, info is None, source, key_column, partitions, due, due_column)
            else:
                assert info is not None
                count = _send_lines(producer, info, key_separator, due)
            sent = producer.metrics()["bytes_sent"]
    seconds = time.monotonic() - started
    if as_json:
        print_json({"topic": topic, "records": count, "bytes": sent, "seconds": round(seconds, 3)})
    else:
        say(f"sent {count:,} records, {sent / 1e6:.1f} MB in {seconds:.2f} s to {topic}")


def _send_file(
    admin: Admin, producer: Producer, topic: str, missing: bool, source: str, key_column: str | None, partitions: int, due: dt.datetime | None,
    due_column: str | None,
) -> int:  # fmt: skip
    from appliance.cli.frames import read_table

    table = read_table(source)
    if missing:
        schema = table.schema
        if due_column in schema.names:
            schema = schema.remove(schema.get_field_index(due_column))
        admin.create_topics([NewTopic(topic, partitions, {"delay.enabled": True} if due or due_column else {}, schema=schema)])
    handles = []
    with progress(f"sending {source}", table.num_rows) as bar:
        for start in range(0, table.num_rows, SLICE_ROWS):
            piece = table.slice(start, SLICE_ROWS)
            handles.append(producer.send_arrow(topic, piece, key_column=key_column, deliver_at=due, delay_column=due_column))
            bar.advance(piece.num_rows)
        for handle in handles:
            handle.result()
    return int(table.num_rows)


def _send_lines(producer: Producer, info: TopicInfo, key_separator: str | None, due: dt.datetime | None) -> int:
    """Every line; the first failure is raised when all is sent."""
    import orjson

    failures: list[TailraceError] = []

    def on_delivery(_metadata: object, error: TailraceError | None) -> None:
        if error is not None:
            failures.append(error)

    separator = key_separator.encode() if key_separator else None
    count = 0
    for line in sys.stdin.buffer:
        text = line.rstrip(b"\r\n")
        key: bytes | None = None
        if separator is not None:
            key, found, text = text.partition(separator)
            if not found:
                raise InvalidRecordError(f"line {count + 1} has no {key_separator!r} between key and value")
        if info.typed:
            try:
                producer.send(info.name, orjson.loads(text), key, deliver_at=due, on_delivery=on_delivery)
            except orjson.JSONDecodeError as error:
                raise InvalidRecordError(f"line {count + 1} is no JSON object, which a typed topic needs: {error}") from None
        else:
            producer.send(info.name, text, key, deliver_at=due, on_delivery=on_delivery)
        count += 1
    producer.flush()
    if failures:
        raise failures[0]
    return count
