"""`tailrace topic`: create, list, describe, alter, delete. What is deleted, and comes back, is in
`deleted_topics`, compaction in `compaction`.
"""

from __future__ import annotations

import datetime as dt
import shlex
import sys
import time
from typing import Any

import click

from appliance.cli.commands.topics.compaction import compact
from appliance.cli.commands.topics.deleted_topics import (
    deletions_kept_ms,
    list_deleted,
    purge,
    shown_duration,
    undelete,
)
from appliance.cli.commands.topics.schema import altered, schema
from appliance.cli.options.shared import (
    bootstrap_option,
    complete_topics,
    connect,
    json_option,
    parse_pairs,
)
from appliance.cli.output import (
    complain,
    counted,
    echo,
    human_bytes,
    print_json,
    print_table,
    progress,
)
from tailrace.admin.admin import NewTopic
from tailrace.core.errors import CorruptBatchError, TopicExistsError, UnknownTopicError
from tailrace.core.topic_partition import TopicPartition

OLDEST_MAX = 32
"""Most partitions of a topic whose oldest record is shown: each costs a fetch."""
OLDEST_TIMEOUT_S = 2.0


@click.group()
def command() -> None:
    """Create, list, describe, alter and delete topics.

    \b
    Example:
      tailrace topic create orders --partitions 3 --config compression.type=zstd
      tailrace topic describe orders
    """


@command.command()
@click.argument("name")
@click.option("--partitions", default=1, show_default=True, help="How many partitions.")
@click.option(
    "--config", "configs", multiple=True, metavar="NAME=VALUE", help="A topic setting, repeatable."
)
@click.option(
    "--schema",
    "schema_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Make a typed topic with the columns of this .csv, .jsonl, .parquet or .arrow file.",
)
@click.option(
    "--if-not-exists",
    is_flag=True,
    help="Do nothing if a topic of this name exists.",
)
@bootstrap_option
@json_option
def create(
    name: str,
    partitions: int,
    configs: tuple[str, ...],
    schema_file: str | None,
    if_not_exists: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Create a topic.

    \b
    Example:
      tailrace topic create flights --partitions 3 --schema flights.parquet
      tailrace topic create orders --if-not-exists --config retention.ms=86400000
    """
    schema: Any = None
    if schema_file is not None:
        from appliance.cli.records.frames import read_schema_of

        schema = read_schema_of(schema_file)
    is_new = True
    with connect(bootstrap) as admin:
        try:
            admin.create_topics(
                [NewTopic(name, partitions, parse_pairs(configs, "--config"), schema)]
            )
        except TopicExistsError:
            if not if_not_exists:
                raise
            is_new = False
    if as_json:
        print_json({"created": name if is_new else None, "partitions": partitions})
    elif not is_new:
        echo(f"{name} exists and is left as it is")
    else:
        echo(f"created {name} with {partitions} partition{'s' * (partitions != 1)}")


@command.command(name="list")
@bootstrap_option
@click.option(
    "--internal",
    is_flag=True,
    help="Also internal topics, such as those that Spark's sink stages rows in.",
)
@click.option(
    "--deleted", is_flag=True, help="The deleted topics that `topic undelete` brings back."
)
@json_option
def list_(bootstrap: str, internal: bool, deleted: bool, as_json: bool) -> None:
    """List topics.

    \b
    Example:
      tailrace topic list --json
      tailrace topic list --deleted
    """
    if deleted:
        list_deleted(bootstrap, as_json)
        return
    with connect(bootstrap) as admin:
        described = admin.describe_topics(admin.list_topics(internal=internal))
    rows = [
        {
            "name": t["name"],
            "partitions": len(t["partitions"]),
            "typed": t["typed"],
            "records": sum(_count(p) for p in t["partitions"]),
            "bytes": sum(p["bytes"] or 0 for p in t["partitions"]),
        }
        for t in described.values()
    ]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["TOPIC", "PARTITIONS", "TYPED", "RECORDS", "SIZE"],
            [
                [
                    r["name"],
                    r["partitions"],
                    "yes" if r["typed"] else "no",
                    r["records"],
                    human_bytes(r["bytes"]),
                ]
                for r in rows
            ],
        )
    else:
        echo("no topics yet; make one with `tailrace topic create NAME`")


def _count(partition: dict[str, Any]) -> int:
    return (partition["end_offset"] or 0) - (partition["beginning_offset"] or 0)


@command.command()
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
    oldest = oldest_timestamps(
        bootstrap, [TopicPartition(name, p["partition"]) for p in partitions if _count(p)]
    )
    for p in partitions:
        p["oldest_timestamp"] = oldest.get(p["partition"])
    if as_json:
        print_json(topic)
        return
    click.echo(
        f"topic    {name}\nid       {topic['topic_id']}\ncreated  {_shown_time(topic['created'])}"
    )
    records, size = sum(_count(p) for p in partitions), sum(p["bytes"] or 0 for p in partitions)
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
    click.echo()
    print_table(
        ["COLUMN", "TYPE"],
        [
            line.split(": ", 1)
            for line in topic["schema"].splitlines()
            if ": " in line and not line.startswith(" ")
        ],
    )
    click.echo()
    print_table(
        ["SETTING", "VALUE"],
        [
            [k, str(v).lower() if isinstance(v, bool) else str(v)]
            for k, v in topic["configs"].items()
        ],
    )
    click.echo()
    stable = ["STABLE"] if any("last_stable_offset" in p for p in partitions) else []
    print_table(
        ["PARTITION", "RECORDS", "SIZE", "SEGMENTS", "BEGINNING", "END", *stable, "EPOCH", "STATE"],
        [
            [p["partition"], _count(p), human_bytes(p["bytes"] or 0), p["segments"],
            p["beginning_offset"], p["end_offset"],
            *([p.get("last_stable_offset", p["end_offset"])] if stable else []),
            p["leader_epoch"], p["state"]]
            for p in partitions
        ],
    )  # fmt: skip
    if any("compaction" in p for p in partitions):
        click.echo()
        print_table(
            ["PARTITION", "COMPACTION", "CLEAN BELOW", "CLEAN", "TO CLEAN"],
            [
                [p["partition"], found["state"], found["cleaned_below"],
                human_bytes(found["clean_bytes"]), human_bytes(found["dirty_bytes"])]
                for p in partitions if (found := p.get("compaction")) is not None
            ],
        )  # fmt: skip
    if "slot_map_version" in topic:
        click.echo()
        print_table(
            [
                f"PARTITION (MAP {topic['slot_map_version']})",
                "HASH SLOTS",
                "AFTER PARTITION:OFFSET",
            ],
            [
                [
                    p["partition"],
                    p["slots"],
                    " ".join(f"{source}:{offset}" for source, offset in p["hand_over"].items()),
                ]
                for p in partitions
            ],
        )
    if records:
        click.echo()
        print_table(
            ["PARTITION", "OLDEST RECORD", "NEWEST RECORD", "LAST APPEND"],
            [
                [
                    p["partition"],
                    *(
                        _shown_time(p[key])
                        for key in ("oldest_timestamp", "newest_timestamp", "last_append")
                    ),
                ]
                for p in partitions
            ],
        )


def oldest_timestamps(bootstrap: str, keys: list[TopicPartition]) -> dict[int, int]:
    """Timestamp (milliseconds since 1970) of the first record of each of at most OLDEST_MAX
    partitions; unreadable partitions are left out.
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


def _shown_time(value: str | int | None) -> str:
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


@command.command()
@click.argument("name", shell_complete=complete_topics)
@click.option("--partitions", type=int, help="New number of partitions; it can only grow.")
@click.option(
    "--config", "configs", multiple=True, metavar="NAME=VALUE", help="A topic setting, repeatable."
)
@click.option(
    "--schema",
    "schema_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Give a typed topic the columns of this .csv, .jsonl, .parquet or .arrow file.",
)
@click.option(
    "--rename",
    "renamed",
    multiple=True,
    metavar="OLD=NEW",
    help="With --schema: the file's column NEW has the values of the topic's column OLD; "
    "repeatable.",
)
@click.option(
    "--default",
    "defaults",
    multiple=True,
    metavar="COLUMN=JSON",
    help="With --schema: the value of an added column in older rows; repeatable.",
)
@bootstrap_option
@json_option
def alter(
    name: str,
    partitions: int | None,
    configs: tuple[str, ...],
    schema_file: str | None,
    renamed: tuple[str, ...],
    defaults: tuple[str, ...],
    bootstrap: str,
    as_json: bool,
) -> None:
    """Change a topic's settings, its number of partitions, or the schema of a typed one.

    \b
    Example:
      tailrace topic alter orders --partitions 6 --config segment.ms=3600000
      tailrace topic alter flights --schema flights-2.parquet --rename carrier=airline
    """
    if schema_file is None and (renamed or defaults):
        raise click.UsageError("--rename and --default need --schema")
    if partitions is None and not configs and schema_file is None:
        raise click.UsageError("nothing to change: give --partitions, --config or --schema")
    schemas: dict[str, Any] = {}
    if schema_file is not None:
        from appliance.cli.records.frames import read_schema_of

        schemas[name] = altered(read_schema_of(schema_file), renamed, defaults)
    with connect(bootstrap) as admin:
        if configs or schemas:
            admin.alter_topics(
                {name: parse_pairs(configs, "--config")} if configs else None, schema=schemas
            )
        if partitions is not None:
            admin.create_partitions({name: partitions})
        topic = admin.describe_topics([name])[name] if as_json or partitions is not None else {}
        version = admin.topic_info([name])[name].schema_id if as_json and schemas else None
    if as_json:
        print_json(
            {
                "altered": name,
                "partitions": len(topic["partitions"]),
                "configs": topic["configs"],
                **({} if version is None else {"schema_version": version}),
            }
        )
    else:
        echo(f"altered {name}")
    if partitions is not None and topic["configs"].get("partitioner") != "hash_slots":
        complain(
            f"keys may go to other partitions of {name} from now on, so records of one key are "
            "in order within each partition only. A topic made with --config "
            "partitioner=hash_slots keeps the order"
        )


@command.command()
@click.argument("name", shell_complete=complete_topics)
@bootstrap_option
@json_option
def online(name: str, bootstrap: str, as_json: bool) -> None:
    """Bring a topic's partitions online after their failed disk was repaired. Their logs are
    recovered first.

    \b
    Example:
      tailrace topic online orders
    """
    with connect(bootstrap) as admin:
        admin.bring_online(name)
    if as_json:
        print_json({"online": name})
    else:
        echo(f"{name} takes writes")


@command.command(name="delete-records")
@click.argument("name", shell_complete=complete_topics)
@click.option("--partition", type=int, required=True, help="Of this partition.")
@click.option(
    "--before",
    type=int,
    required=True,
    metavar="OFFSET",
    help="Everything below this offset; -1: everything.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask; needed without a terminal.")
@bootstrap_option
@json_option
def delete_records(
    name: str, partition: int, before: int, yes: bool, bootstrap: str, as_json: bool
) -> None:
    """Delete the oldest records of a partition. It asks first; without a terminal it takes --yes.

    \b
    Example:
      tailrace topic delete-records orders --partition 0 --before 1000 --yes
    """
    key = TopicPartition(name, partition)
    with connect(bootstrap) as admin:
        if not yes:
            found = admin.describe_topics([name])[name]["partitions"]
            if partition in range(len(found)):  # otherwise the request is refused
                begin, end = (
                    found[partition]["beginning_offset"] or 0,
                    found[partition]["end_offset"] or 0,
                )
                records = max(0, (end if before < 0 else min(before, end)) - begin)
                _confirm(f"the oldest {counted(records, 'record')} of {name}-{partition}")
        start = admin.delete_records({key: before})[key]
    if as_json:
        print_json({"topic": name, "partition": partition, "log_start_offset": start})
    else:
        echo(f"{name}-{partition} begins at offset {start}")


@command.command()
@click.argument("name", shell_complete=complete_topics)
@click.option(
    "--to", metavar="TOPIC", help="Send all to this topic, instead of where each is from."
)
@bootstrap_option
@json_option
def redrive(name: str, to: str | None, bootstrap: str, as_json: bool) -> None:
    """Send the dead letters of a topic again, each once, to the topic that it comes from.

    The letters stay in the dead-letter topic, and a second run continues behind them.

    \b
    Example:
      tailrace topic redrive orders.dlq
    """
    from appliance.observe.console.redrive import redrive as send_again

    with connect(bootstrap) as admin:
        count = sum(
            partition["records"] or 0
            for partition in admin.describe_topics([name])[name]["partitions"]
        )
    with progress("redrive", count) as shown:
        done = send_again(bootstrap, name, to, shown.advance)
    if as_json:
        print_json({"topic": name, "sent": done.sent, "skipped": done.skipped})
        return
    echo(f"{counted(done.sent, 'record')} sent again")
    if done.skipped:
        echo(f"{counted(done.skipped, 'record')} left: without a value or an origin")


@command.command()
@click.argument("name", shell_complete=complete_topics)
@click.option("--if-exists", is_flag=True, help="Do not fail if the topic does not exist.")
@click.option(
    "--with-derived",
    is_flag=True,
    help="Delete the topic's retry topics and its dead-letter topic, too.",
)
@click.option("--now", is_flag=True, help="Free the space at once: it cannot come back.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; needed without a terminal.")
@bootstrap_option
@json_option
def delete(
    name: str,
    if_exists: bool,
    with_derived: bool,
    now: bool,
    yes: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Delete a topic with everything in it. It asks first; without a terminal it takes --yes.

    With topic.delete.retention.ms in the appliance's settings it can be undone for that time:
    `tailrace topic undelete`.

    \b
    Example:
      tailrace topic delete orders --yes
      tailrace topic delete orders --with-derived --yes
      tailrace topic delete orders --now --yes
    """
    kept_ms = 0
    derived: list[str] = []
    with connect(bootstrap) as admin:
        try:
            if with_derived:
                derived = admin.derived_topics(name)
            names = [name, *derived]
            kept_ms = 0 if now else deletions_kept_ms(admin)
            if not yes:
                described = admin.describe_topics(names)
                records = sum(
                    _count(p) for topic in described.values() for p in topic["partitions"]
                )
                shown = f"{', '.join(names)} with their" if derived else f"{name} with its"
                _confirm(f"{shown} {counted(records, 'record')}", kept_ms)
            admin.delete_topics(names, now=now)
        except UnknownTopicError:
            if not if_exists:
                raise
            if as_json:
                print_json({"deleted": None})
            else:
                echo(f"there is no topic {name}")
            return
    if as_json:
        found = {"deleted": name, **({"derived": derived} if with_derived else {})}
        print_json({**found, **({"kept_ms": kept_ms} if kept_ms else {})})
        return
    echo(f"deleted {', '.join(names)}")
    if kept_ms:
        echo(
            f"to bring it back within {shown_duration(kept_ms)}: tailrace topic undelete "
            f"{shlex.quote(name)}"
        )


def _confirm(deleted: str, kept_ms: int = 0) -> None:
    """Ask on a terminal. `kept_ms`: time in which it can be undone. Raises Abort for no, UsageError
    without a terminal.
    """
    until = f" (it can be undone for {shown_duration(kept_ms)})" if kept_ms else " for good"
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"nothing is deleted: this would delete {deleted}{until}, and there is no terminal "
            "to ask on; confirm with --yes"
        )
    click.confirm(f"Delete {deleted}{until if kept_ms else ''}?", abort=True, err=True)


command.add_command(undelete)
command.add_command(purge)
command.add_command(compact)
command.add_command(schema)
