"""`tailrace topic describe`: a topic's settings and columns, and the log of each partition."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import click

from appliance.cli.options.shared import (
    bootstrap_option,
    complete_topics,
    connect,
    json_option,
    unless_refused,
)
from appliance.cli.output import counted, human_bytes, print_json, print_table
from tailrace.core.errors import CorruptBatchError
from tailrace.core.topic_partition import TopicPartition

OLDEST_MAX = 32
"""Most partitions of a topic whose oldest record is shown: each costs a fetch."""
OLDEST_TIMEOUT_S = 2.0


@click.command()
@click.argument("name", shell_complete=complete_topics)
@bootstrap_option
@json_option
def describe(name: str, bootstrap: str, as_json: bool) -> None:
    """Show a topic: its settings and columns, and the offsets, size and age of each partition.

    \b
    Example:
      tailrace topic describe orders
    """
    with connect(bootstrap) as admin:
        topic = admin.describe_topics([name])[name]
    partitions = topic["partitions"]
    filled = [TopicPartition(name, p["partition"]) for p in partitions if record_count(p)]
    oldest = unless_refused(
        lambda: oldest_timestamps(bootstrap, filled), "times of the oldest records"
    )
    for p in partitions:
        p["oldest_timestamp"] = (oldest or {}).get(p["partition"])
    if as_json:
        print_json(topic)
        return
    _print_summary(topic)
    click.echo()
    _print_columns(topic["schema"])
    click.echo()
    _print_settings(topic["configs"])
    click.echo()
    _print_logs(partitions)
    if any("compaction" in p for p in partitions):
        click.echo()
        _print_compaction(partitions)
    if "slot_map_version" in topic:
        click.echo()
        _print_hash_slots(topic["slot_map_version"], partitions)
    if any(record_count(p) for p in partitions):
        click.echo()
        _print_ages(partitions)


def _print_summary(topic: dict[str, Any]) -> None:
    name, partitions = topic["name"], topic["partitions"]
    records = sum(record_count(p) for p in partitions)
    size = sum(p["bytes"] or 0 for p in partitions)
    click.echo(
        f"topic    {name}\nid       {topic['topic_id']}\ncreated  {shown_time(topic['created'])}"
    )
    click.echo(
        f"holds    {counted(records, 'record')} in {counted(len(partitions), 'partition')}, "
        f"{human_bytes(size)} on the disk"
    )
    click.echo(f"schema   {'typed' if topic['typed'] else 'default'}")
    if topic["configs"].get("delivery.paused"):
        click.echo(
            f"groups   get no records: paused. To resume: tailrace topic alter {name} --config "
            "delivery.paused=false"
        )


def _print_columns(schema: str) -> None:
    print_table(
        ["COLUMN", "TYPE"],
        [
            line.split(": ", 1)
            for line in schema.splitlines()
            if ": " in line and not line.startswith(" ")
        ],
    )


def _print_settings(configs: dict[str, Any]) -> None:
    print_table(
        ["SETTING", "VALUE"],
        [
            [name, str(value).lower() if isinstance(value, bool) else str(value)]
            for name, value in configs.items()
        ],
    )


def _print_logs(partitions: list[dict[str, Any]]) -> None:
    stable = ["STABLE"] if any("last_stable_offset" in p for p in partitions) else []
    print_table(
        ["PARTITION", "RECORDS", "SIZE", "SEGMENTS", "BEGINNING", "END", *stable, "EPOCH", "STATE"],
        [
            [p["partition"], record_count(p), human_bytes(p["bytes"] or 0), p["segments"],
            p["beginning_offset"], p["end_offset"],
            *([p.get("last_stable_offset", p["end_offset"])] if stable else []),
            p["leader_epoch"], p["state"]]
            for p in partitions
        ],
    )  # fmt: skip


def _print_compaction(partitions: list[dict[str, Any]]) -> None:
    print_table(
        ["PARTITION", "COMPACTION", "CLEAN BELOW", "CLEAN", "TO CLEAN"],
        [
            [p["partition"], found["state"], found["cleaned_below"],
            human_bytes(found["clean_bytes"]), human_bytes(found["dirty_bytes"])]
            for p in partitions if (found := p.get("compaction")) is not None
        ],
    )  # fmt: skip


def _print_hash_slots(map_version: int, partitions: list[dict[str, Any]]) -> None:
    print_table(
        [f"PARTITION (MAP {map_version})", "HASH SLOTS", "AFTER PARTITION:OFFSET"],
        [
            [
                p["partition"],
                p["slots"],
                " ".join(f"{source}:{offset}" for source, offset in p["hand_over"].items()),
            ]
            for p in partitions
        ],
    )


def _print_ages(partitions: list[dict[str, Any]]) -> None:
    print_table(
        ["PARTITION", "OLDEST RECORD", "NEWEST RECORD", "LAST APPEND"],
        [
            [
                p["partition"],
                *(
                    shown_time(p[key])
                    for key in ("oldest_timestamp", "newest_timestamp", "last_append")
                ),
            ]
            for p in partitions
        ],
    )


def record_count(partition: dict[str, Any]) -> int:
    """Records between a described partition's beginning and its end."""
    return (partition["end_offset"] or 0) - (partition["beginning_offset"] or 0)


def oldest_timestamps(bootstrap: str, keys: list[TopicPartition]) -> dict[int, int]:
    """Timestamp (milliseconds since 1970) of the first record of each of at most OLDEST_MAX
    partitions; unreadable partitions are left out. Raises NotAuthorizedError without `read` of the
    topic.
    """
    from tailrace.consumer.consumer import Consumer

    waiting = set(keys[:OLDEST_MAX])
    found: dict[int, int] = {}
    with Consumer(
        bootstrap=bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=1024
    ) as consumer:
        consumer.assign(sorted(waiting))
        consumer.seek_to_beginning(*sorted(waiting))
        deadline = time.monotonic() + OLDEST_TIMEOUT_S
        while waiting and time.monotonic() < deadline:
            try:
                records = consumer.poll(100, 1)
            except CorruptBatchError as error:
                if error.key is None:
                    break
                waiting.discard(error.key)
                consumer.pause(error.key)
                continue
            for record in records:
                key = TopicPartition(record.topic, record.partition)
                found.setdefault(record.partition, record.timestamp)
                waiting.discard(key)
                consumer.pause(key)
    return found


def shown_time(value: str | int | None) -> str:
    """ISO 8601 text to the second, or milliseconds since 1970 if the calendar ends before it."""
    if value is None:
        return ""
    try:
        moment = (
            dt.datetime.fromisoformat(value)
            if isinstance(value, str)
            else dt.datetime.fromtimestamp(value / 1000, dt.UTC)
        )
    except (ValueError, OverflowError):
        return str(value)  # a producer's timestamp, outside Python's calendar
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
