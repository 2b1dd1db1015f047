"""`tailrace produce`: sends lines of standard input, or the rows of a file."""

from __future__ import annotations

import contextlib
import datetime as dt
import sys
import time
from typing import Any, BinaryIO

import click

from appliance.cli.options.shared import (
    TIME_HELP,
    Duration,
    Moment,
    bootstrap_option,
    complete_topics,
    connect,
    json_option,
    parse_pairs,
)
from appliance.cli.output import counted, echo, human_bytes, print_json, progress
from appliance.cli.records.transactions import InputTransactions
from tailrace.admin.admin import Admin, NewTopic
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import UnknownTopicError
from tailrace.core.schedule.recurrence import MISSED, Recurrence, RecurrenceError
from tailrace.producer.producer import Producer

SLICE_ROWS = 50_000
_OF_LINES = ("key_separator", "key", "headers", "skip_bad", "bad_to", "every", "cron")
_OF_ROWS = ("format_name", "key_column", "due_column", "evolve")


@click.command()
@click.argument("topic", shell_complete=complete_topics)
@click.option(
    "--key-separator", metavar="TEXT", help="What comes before this on a line is the key."
)
@click.option("--key", help="The key of every line.")
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="A header of every line, repeatable.",
)
@click.option("--partition", type=int, help="Send to this partition.")
@click.option("--timestamp", type=Moment(), help=f"The records' timestamp: {TIME_HELP}")
@click.option(
    "--skip-bad",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Leave out up to N lines that cannot be records, instead of none.",
)
@click.option(
    "--bad-to",
    type=click.File("wb"),
    metavar="FILE",
    help="Write lines that cannot be records there.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Send the rows of this csv, tsv, jsonl, parquet or arrow file (.gz, .zst, .lz4, .bz2 "
    "too; -: standard input); makes a typed topic "
    "if there is none.",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["csv", "tsv", "jsonl", "parquet", "arrow"]),
    help="With --from: its format, where its name does not tell.",
)
@click.option(
    "--key-column", help="With --from: rows with the same value here go to the same partition."
)
@click.option(
    "--evolve",
    is_flag=True,
    help="With --from: add the columns that the file has and the topic has not; those that the "
    "file has not get their default, or null.",
)
@click.option(
    "--partitions",
    default=1,
    show_default=True,
    help="With --from: how many partitions a topic that is made has.",
)
@click.option("--due", type=Moment(), help=f"Have them delivered then: {TIME_HELP}")
@click.option(
    "--due-column",
    help="With --from: a column of times or durations that says for each row when it is "
    "delivered; it is not sent.",
)
@click.option(
    "--every",
    type=Duration(),
    metavar="DURATION",
    help="Have each line delivered again and again, this far apart: 10s, 15m, 1h30m.",
)
@click.option(
    "--cron",
    metavar="EXPRESSION",
    help="Have each line delivered by a cron expression of five fields (six: with seconds).",
)
@click.option(
    "--zone",
    metavar="NAME",
    help="With --cron: its time zone, such as Europe/Berlin; default: UTC.",
)
@click.option(
    "--missed",
    type=click.Choice(MISSED),
    help="With --every, --cron: which deliveries that an appliance missed are made up for; "
    "default: all.",
)
@click.option(
    "--acks",
    type=click.Choice(["0", "1", "all"]),
    default="all",
    show_default=True,
    help="Acknowledgement to wait for.",
)
@click.option(
    "--compression",
    type=click.Choice(["none", "lz4", "zstd"]),
    help="Compression of batches; default: as the topic says.",
)
@click.option(
    "--transactional",
    "transactional_id",
    metavar="ID",
    help="Send in a transaction of this id: all of the input is read, or nothing.",
)
@click.option(
    "--transaction-records",
    type=click.IntRange(1),
    metavar="N",
    help="With --transactional: commit after each N records.",
)
@bootstrap_option
@json_option
def command(topic: str, bootstrap: str, as_json: bool, **given: Any) -> None:
    """Send lines of standard input to a topic, or the rows of a file. On a typed topic each line is
    a JSON object.

    --due, --every and --cron need a topic with delay.enabled. The id of each recurring line is
    printed, for `tailrace delay cancel`.

    A line that cannot be a record ends the command with exit status 1, and the error counts the
    lines acknowledged before it. With --skip-bad N up to N such lines are left out and reported,
    and the exit status is 0.

    A missing topic is created for lines if the appliance's auto_create_topics is true, as that of
    an embedded one is.

    \b
    Example:
      echo 'u1:hello' | tailrace produce orders --key-separator :
      echo 'hello' | tailrace produce orders --key u1 --header source=shell --partition 0
      tailrace produce flights --from flights.csv.gz --key-column origin
      tailrace produce flights --skip-bad 10 --bad-to rejected.jsonl < rows.jsonl
      echo 'u1:call back' | tailrace produce reminders --key-separator : --due 2h
      echo 'report' | tailrace produce jobs --cron '0 8 * * 1-5' --zone Europe/Berlin
      tailrace produce flights --from flights.csv.gz --transactional nightly-import
      tailrace produce flights --from flights-with-gates.parquet --evolve
    """
    _check(given)
    repeat = _repeat(given)
    started = time.monotonic()
    acks: int | str = given["acks"] if given["acks"] == "all" else int(given["acks"])
    skipped = 0
    delay_ids: list[str] = []
    with connect(bootstrap) as admin:
        try:
            info: TopicInfo | None = admin.topic_info([topic])[topic]
        except UnknownTopicError:
            # One that is created by its use takes no delayed records.
            if given["source"] is None and (given["due"] is not None or repeat is not None):
                raise
            info = None
        with (
            Producer(
                bootstrap,
                acks=acks,
                compression_type=given["compression"],
                transactional_id=given["transactional_id"],
            ) as producer,
            InputTransactions(
                producer,
                given["transaction_records"],
                is_used=given["transactional_id"] is not None,
            ) as transactions,
        ):
            if given["source"] is not None:
                count = _send_file(admin, producer, topic, info is None, given, transactions)
            else:
                if info is None:
                    producer.partitions_for(topic)  # creates it, or raises
                    info = admin.topic_info([topic])[topic]
                count, skipped, delay_ids = _send_lines(producer, info, given, repeat, transactions)
            sent = producer.metrics()["bytes_sent"]
    _report(
        topic, count, skipped, sent, time.monotonic() - started, repeat, delay_ids, as_json=as_json
    )


def _report(
    topic: str,
    count: int,
    skipped: int,
    sent_bytes: int,
    seconds: float,
    repeat: Recurrence | None,
    delay_ids: list[str],
    *,
    as_json: bool,
) -> None:
    if as_json:
        recurring = {"delay_ids": delay_ids} if repeat is not None else {}
        print_json(
            {
                "topic": topic,
                "records": count,
                "skipped": skipped,
                "bytes": sent_bytes,
                "seconds": round(seconds, 3),
                **recurring,
            }
        )
        return
    for delay_id in delay_ids:
        click.echo(delay_id)
    left_out = f", {counted(skipped, 'bad line')} left out" if skipped else ""
    recurs = (
        f"; delivered {repeat.describe()}, until `tailrace delay cancel {topic} ID`"
        if repeat is not None
        else ""
    )
    echo(
        f"sent {counted(count, 'record')}, {human_bytes(sent_bytes)} in {seconds:.2f} s to "
        f"{topic}{left_out}{recurs}"
    )


def _check(given: dict[str, Any]) -> None:
    """Usage errors for options that do not go together."""
    if given["due_column"] is not None and (given["source"] is None or given["due"] is not None):
        raise click.UsageError("--due-column needs --from, and excludes --due")
    if given["key"] is not None and given["key_separator"] is not None:
        raise click.UsageError(
            "--key and --key-separator exclude each other: leave one of them out"
        )
    if given["every"] is not None and given["cron"] is not None:
        raise click.UsageError("--every and --cron exclude each other: leave one of them out")
    if given["zone"] is not None and given["cron"] is None:
        raise click.UsageError("--zone needs --cron: it is the time zone of the expression")
    if given["transaction_records"] is not None and given["transactional_id"] is None:
        raise click.UsageError("--transaction-records needs --transactional")
    if given["missed"] is not None and given["every"] is None and given["cron"] is None:
        raise click.UsageError("--missed needs --every or --cron")
    other = _OF_LINES if given["source"] is not None else _OF_ROWS
    for name in other:
        if given[name]:
            option = {"headers": "--header", "format_name": "--format"}.get(
                name, f"--{name.replace('_', '-')}"
            )
            wrong = (
                "lines, and --from sends rows"
                if given["source"] is not None
                else "rows: add --from"
            )
            raise click.UsageError(f"{option} is for {wrong}")


def _repeat(given: dict[str, Any]) -> Recurrence | None:
    """The recurrence of each line; None: once.

    Raises: UsageError for a wrong expression.
    """
    missed = given["missed"] or "all"
    try:
        if given["every"] is not None:
            return Recurrence.every(given["every"], missed=missed)
        if given["cron"] is not None:
            return Recurrence.cron(given["cron"], zone=given["zone"] or "UTC", missed=missed)
    except RecurrenceError as error:
        raise click.UsageError(str(error)) from None
    return None


def _send_file(
    admin: Admin,
    producer: Producer,
    topic: str,
    missing: bool,
    given: dict[str, Any],
    transactions: InputTransactions,
) -> int:
    from appliance.cli.records.frames import read_table

    source, due, due_column = given["source"], given["due"], given["due_column"]
    table = read_table(source, given["format_name"])
    if missing:
        schema = table.schema
        if due_column in schema.names:
            schema = schema.remove(schema.get_field_index(due_column))
        configs = {"delay.enabled": True} if due or due_column else {}
        admin.create_topics([NewTopic(topic, given["partitions"], configs, schema=schema)])
    elif given["evolve"]:
        from appliance.cli.records.evolution import with_columns_of

        table = with_columns_of(admin, topic, table, due_column)
    handles = []
    with progress(f"sending {source}", table.num_rows) as bar:
        start = 0
        while start < table.num_rows:
            piece = table.slice(start, transactions.room(SLICE_ROWS))
            handles.append(
                producer.send_arrow(
                    topic, piece, key_column=given["key_column"], partition=given["partition"],
                    timestamp=given["timestamp"], deliver_at=due,
                    delay_column=due_column,
                )
            )  # fmt: skip
            start += piece.num_rows
            transactions.add(piece.num_rows)
            bar.advance(piece.num_rows)
        for handle in handles:
            handle.result()
    return int(table.num_rows)


def _send_lines(
    producer: Producer,
    info: TopicInfo,
    given: dict[str, Any],
    repeat: Recurrence | None,
    transactions: InputTransactions,
) -> tuple[int, int, list[str]]:
    """(lines acknowledged, or sent with acks=0; lines left out; ids of recurring lines, in their
    order)
    """
    from appliance.cli.records.lines import LineOptions, send_lines

    headers = tuple(
        (name, value.encode()) for name, value in parse_pairs(given["headers"], "--header").items()
    )
    timestamp: dt.datetime | None = given["timestamp"]
    bad_to: BinaryIO | None = given["bad_to"]
    options = LineOptions(
        given["key_separator"],
        given["key"],
        headers,
        given["partition"],
        timestamp,
        given["due"],
        repeat,
        given["skip_bad"],
        bad_to,
    )
    with bad_to if bad_to is not None else contextlib.nullcontext():
        sent = send_lines(producer, info, sys.stdin.buffer, options, transactions.add)
    return sent.acknowledged, sent.skipped, [delay_id for _, delay_id in sorted(sent.delay_ids)]
