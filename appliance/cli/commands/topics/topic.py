"""`tailrace topic`: create, list, alter, online. Its other commands have a module each."""

from __future__ import annotations

from typing import Any

import click

from appliance.cli.commands.topics.compaction import compact
from appliance.cli.commands.topics.delete import delete, delete_records
from appliance.cli.commands.topics.deleted_topics import list_deleted, purge, undelete
from appliance.cli.commands.topics.describe import describe, record_count
from appliance.cli.commands.topics.redrive import redrive
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
    echo,
    human_bytes,
    print_json,
    print_table,
)
from tailrace.admin.admin import NewTopic
from tailrace.core.errors import TopicExistsError


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
            "records": sum(record_count(p) for p in t["partitions"]),
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


for subcommand in (
    describe, delete, delete_records, redrive, undelete, purge, compact, schema,
):  # fmt: skip
    command.add_command(subcommand)
