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
from appliance.cli.records.readers import Ending, GroupReader, Reader
from appliance.cli.records.writers import (
    BINARY_FORMATS,
    FORMATS,
    TEMPLATE_HELP,
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
from tailrace.protocol.messages import ISOLATION_LEVELS, READ_COMMITTED

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
    if group is not None and (
        partition is not None
        or offset is not None
        or since is not None
        or tail is not None
        or until is not None
    ):
        raise click.UsageError(
            "--group reads the partitions that the group assigns, from its committed offsets: "
            "leave out --partition, --offset, --since, --tail and --until. To move a group use "
            "`tailrace group reset-offsets`"
        )
    if follow and until is not None:
        raise click.UsageError("--follow and --until exclude each other: leave one of them out")
    start = Start(from_beginning, offset, since, tail, is_past=until is not None)
    if text is not None and form != "value":
        raise click.UsageError("--template and --format exclude each other: leave one of them out")
    line = template(text) if text is not None else json_line if form == "json" else value_line
    if form in BINARY_FORMATS and sys.stdout.isatty():
        raise click.UsageError(
            f"--format {form} writes binary data, not for a terminal: redirect it to a file, > "
            f"records.{form}"
        )
    with connect(bootstrap) as admin:
        infos = admin.topic_info(_matching(topics, admin))
    schemas = {name: info.schema for name, info in infos.items()}
    schema = next(iter(schemas.values()))
    is_typed = next(iter(infos.values())).typed
    if form not in ("value", "json") and any(other != schema for other in schemas.values()):
        raise click.UsageError(
            f"the topics have different schemas, and a {form} file has one: consume them one at "
            "a time"
        )
    reset = "earliest" if start.is_given else "latest"
    with (
        nullcontext() if group is None else Ending() as ending,
        Consumer(
            bootstrap=bootstrap,
            auto_offset_reset=reset,
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
            reader = Reader(
                consumer, _ends(consumer, keys, start, until, follow), maximum, skip_damaged
            )
        with reader:
            if form in BINARY_FORMATS:
                BINARY_FORMATS[form](reader, schema)
            elif form == "csv":
                write_csv(reader, schema.names if is_typed else None)
            else:
                write_lines(reader, line)
    if reader.skipped_offsets:
        complain(
            f"skipped {reader.skipped_offsets} damaged offsets in {reader.skipped_ranges} places; "
            "`tailrace log verify` tells more"
        )
        return EXIT_SKIPPED
    return 0


def _partitions(infos: dict[str, TopicInfo], only: int | None) -> list[TopicPartition]:
    return [
        TopicPartition(name, p)
        for name, info in infos.items()
        for p in ([only] if only is not None else range(len(info.partitions)))
    ]


def _ends(
    consumer: Consumer,
    keys: list[TopicPartition],
    start: Start,
    until: dt.datetime | None,
    follow: bool,
) -> dict[TopicPartition, int] | None:
    """The offsets at which reading ends; None if it does not end."""
    if follow or not start.is_given:
        return None
    ends = consumer.end_offsets(keys)
    if until is None:
        return ends
    behind = consumer.offsets_for_times(dict.fromkeys(keys, until))
    return {
        key: end if (found := behind[key]) is None else found.offset for key, end in ends.items()
    }


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


class Start:
    """The start of reading: one of the ways that the options name, else the current end."""

    def __init__(
        self,
        from_beginning: bool,
        offset: int | None,
        since: dt.datetime | None,
        tail: int | None,
        *,
        is_past: bool,
    ) -> None:
        """`is_past`: an end is given, so that reading starts at the beginning by default. Raises
        UsageError.
        """
        self._offset, self._since, self._tail = offset, since, tail
        given = [from_beginning, offset is not None, since is not None, tail is not None]
        if sum(given) > 1:
            raise click.UsageError(
                "--from-beginning, --offset, --since and --tail exclude each other: give one "
                "of them"
            )
        self._from_beginning = from_beginning or (is_past and not any(given))
        self.is_given = any(given) or is_past

    def seek(self, consumer: Consumer, keys: list[TopicPartition]) -> None:
        """Raises ClickException when the offset is behind the end of every partition."""
        ends = consumer.end_offsets(keys)
        if self._from_beginning:
            consumer.seek_to_beginning(*keys)
        elif self._offset is not None:
            beyond = [key for key in keys if ends[key] < self._offset]
            for key in beyond:
                sentence = (
                    f"{key.topic}-{key.partition} ends at offset {ends[key]} and has no offset "
                    f"{self._offset}: give an offset below its end"
                )
                if len(beyond) == len(keys):
                    raise click.ClickException(
                        f"{sentence}. Begin between {consumer.beginning_offsets([key])[key]} and "
                        f"{ends[key]}, or with --tail N"
                    )
                complain(sentence)
            for key in keys:
                consumer.seek(key, min(self._offset, ends[key]))
        elif self._since is not None:
            for key, found in consumer.offsets_for_times(dict.fromkeys(keys, self._since)).items():
                consumer.seek(key, ends[key] if found is None else found.offset)
        elif self._tail is not None:
            begins = consumer.beginning_offsets(keys)
            for key in keys:
                consumer.seek(key, max(begins[key], ends[key] - self._tail))
        else:
            for key in keys:
                consumer.seek(key, ends[key])
