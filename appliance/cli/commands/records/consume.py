"""`tailrace consume`: prints a topic's records to standard output.

Exit status 4 (EXIT_SKIPPED): every readable record was printed, and damaged records were skipped as
--skip-damaged asks.

The records are read by `appliance.cli.records.readers`.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import sys
from contextlib import nullcontext

import click

from appliance.cli.options.shared import (
    SINCE_HELP,
    PastMoment,
    bootstrap_option,
    complete_groups,
    complete_topics,
    connect,
)
from appliance.cli.output import complain
from appliance.cli.records.offset_range import Start, ends_of
from appliance.cli.records.readers import Ending, GroupReader, Reader
from appliance.cli.records.writers import (
    BINARY_FORMATS,
    FORMATS,
    TEMPLATE_HELP,
    LineFormat,
    json_line,
    template,
    value_line,
    write_csv,
    write_lines,
)
from tailrace.admin.admin import Admin
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import UnknownTopicError
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.fetch_messages import ISOLATION_LEVELS, READ_COMMITTED

EXIT_SKIPPED = 4


@click.command()
@click.argument(
    "topics", nargs=-1, required=True, metavar="TOPIC...", shell_complete=complete_topics
)
@click.option("--partition", type=int, help="Only this partition.")
@click.option(
    "--group",
    shell_complete=complete_groups,
    help="As a member of this group: begin where it is, commit what was printed.",
)
@click.option("--from-beginning", is_flag=True, help="Begin with the first record.")
@click.option("--offset", type=click.IntRange(0), help="Begin at this offset.")
@click.option(
    "--since",
    type=PastMoment(),
    help=f"Begin with the first record of this time or later: {SINCE_HELP}",
)
@click.option(
    "--tail",
    type=click.IntRange(1),
    metavar="N",
    help="Begin with the last N records of each partition.",
)
@click.option(
    "--until",
    type=PastMoment(),
    help=f"End before the first record of this time or later: {SINCE_HELP}",
)
@click.option("--max", "maximum", type=click.IntRange(1), help="End after this many records.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="value",
    show_default=True,
    help="arrow and parquet write one file to standard output.",
)
@click.option("--json", "is_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--template",
    "-f",
    "text",
    metavar="TEXT",
    help=f"Each record as TEXT says, as kcat's -f: {TEMPLATE_HELP}.",
)
@click.option("--follow", is_flag=True, help="Wait for new records at the end.")
@click.option(
    "--skip-damaged",
    is_flag=True,
    help="Skip damaged records and name their offsets, instead of ending at the first one; the "
    "exit status is 4 if any were skipped.",
)
@click.option(
    "--isolation",
    "isolation_level",
    type=click.Choice(ISOLATION_LEVELS),
    default=READ_COMMITTED,
    show_default=True,
    help="read_uncommitted prints the records of open and aborted transactions too.",
)
@bootstrap_option
def command(
    topics: tuple[str, ...],
    partition: int | None,
    group: str | None,
    from_beginning: bool,
    offset: int | None,
    since: dt.datetime | None,
    tail: int | None,
    until: dt.datetime | None,
    maximum: int | None,
    form: str,
    is_json: bool,
    text: str | None,
    follow: bool,
    skip_damaged: bool,
    isolation_level: str,
    bootstrap: str,
) -> int:
    """Print the records of one or more topics. A pattern such as 'orders-*' stands for all topics
    that match.

    With --from-beginning, --offset, --since, --tail or --until the command ends at the current end
    of the topic, unless --follow is given. Without these it waits for new records, like `tail -f`.

    With --group the partitions are shared with the group's other members. Reading starts at the
    committed offsets; where nothing is committed, at the end, or at the beginning with
    --from-beginning. Printed records are committed, on Ctrl-C and SIGTERM too.

    \b
    Example:
      tailrace consume orders --from-beginning --format json
      tailrace consume orders --group billing
      tailrace consume orders --since 2h --template '%t %p %o %k %v\\n'
      tailrace consume flights --from-beginning --format parquet > flights.parquet
    """
    if group is not None:
        _check_alone(partition, offset, since, tail, until)
    if follow and until is not None:
        raise click.UsageError("--follow and --until exclude each other: leave one of them out")
    start = Start(from_beginning, offset, since, tail, is_past=until is not None)
    if is_json and form not in ("value", "json"):
        raise click.UsageError(f"--json and --format {form} exclude each other: leave one out")
    form = "json" if is_json else form
    line = _line_format(form, text)
    with connect(bootstrap) as admin:
        infos = admin.topic_info(_matching(topics, admin))
    _check_schemas(infos, form)
    with (
        nullcontext() if group is None else Ending() as ending,
        Consumer(
            bootstrap=bootstrap,
            auto_offset_reset="earliest" if start.is_given else "latest",
            group_id=group,
            enable_auto_commit=False,
            isolation_level=isolation_level,
        ) as consumer,
    ):
        keys = _partitions(infos, partition)
        reader: Reader
        if ending is not None:
            ends = None if follow or not start.is_given else consumer.end_offsets(keys)
            reader = GroupReader(consumer, ends, maximum, skip_damaged, ending)
            consumer.subscribe(list(infos), listener=reader.listener)
        else:
            consumer.assign(keys)
            start.seek(consumer, keys)
            ends = ends_of(consumer, keys, start, until, follow)
            reader = Reader(consumer, ends, maximum, skip_damaged)
        with reader:
            _write(reader, next(iter(infos.values())), form, line)
    return _exit_status(reader)


def _exit_status(reader: Reader) -> int:
    """0, or EXIT_SKIPPED with a sentence about what was skipped."""
    if not reader.skipped_offsets:
        return 0
    complain(
        f"skipped {reader.skipped_offsets} damaged offsets in {reader.skipped_ranges} places; "
        "`tailrace log verify` tells more"
    )
    return EXIT_SKIPPED


def _check_alone(*others: object) -> None:
    """Raises UsageError for options that exclude --group."""
    if any(given is not None for given in others):
        raise click.UsageError(
            "--group reads the partitions that the group assigns, from its committed offsets: "
            "leave out --partition, --offset, --since, --tail and --until. To move a group use "
            "`tailrace group reset-offsets`"
        )


def _line_format(form: str, text: str | None) -> LineFormat:
    """The function that prints a record in a line. Raises UsageError for formats that exclude each
    other, or a terminal.
    """
    if text is not None and form != "value":
        raise click.UsageError("--template and --format exclude each other: leave one of them out")
    if form in BINARY_FORMATS and sys.stdout.isatty():
        raise click.UsageError(
            f"--format {form} writes binary data, not for a terminal: redirect it to a file, > "
            f"records.{form}"
        )
    if text is not None:
        return template(text)
    return json_line if form == "json" else value_line


def _check_schemas(infos: dict[str, TopicInfo], form: str) -> None:
    """Raises UsageError for topics that do not fit one file."""
    schemas = [info.schema for info in infos.values()]
    if form not in ("value", "json") and any(other != schemas[0] for other in schemas):
        raise click.UsageError(
            f"the topics have different schemas, and a {form} file has one: consume them one at "
            "a time"
        )


def _write(reader: Reader, info: TopicInfo, form: str, line: LineFormat) -> None:
    if form in BINARY_FORMATS:
        BINARY_FORMATS[form](reader, info.schema)
    elif form == "csv":
        write_csv(reader, info.schema.names if info.typed else None)
    else:
        write_lines(reader, line)


def _partitions(infos: dict[str, TopicInfo], only: int | None) -> list[TopicPartition]:
    return [
        TopicPartition(name, p)
        for name, info in infos.items()
        for p in ([only] if only is not None else range(len(info.partitions)))
    ]


def _matching(topics: tuple[str, ...], admin: Admin) -> list[str]:
    """Names, and what patterns stand for. Raises UnknownTopicError when one stands for nothing."""
    names: dict[str, None] = {}
    for given in topics:
        found = [given]
        if any(character in given for character in "*?["):
            found = fnmatch.filter(admin.list_topics(), given)
            if not found:
                raise UnknownTopicError(
                    f"no topic matches {given!r}: `tailrace topic list` shows the topics"
                )
        names.update(dict.fromkeys(found))
    return list(names)
