"""`tailrace export`: copies a topic into a data lake exactly once, with --follow continuously.

Ctrl-C and SIGTERM end it between two commits. A second signal ends it at once; the next run
continues after the last commit.
"""

from __future__ import annotations

import datetime as dt
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import orjson

from appliance.cli.commands.records.consume import EXIT_SKIPPED
from appliance.cli.main import CONNECT_TIMEOUT_MS, EXIT_INTERRUPTED
from appliance.cli.options.shared import (
    SINCE_HELP,
    Duration,
    PastMoment,
    bootstrap_option,
    complete_topics,
    json_option,
)
from appliance.cli.output import (
    Progress,
    complain,
    counted,
    echo,
    human_bytes,
    print_json,
    print_table,
    progress,
)
from tailrace.core.units import whole_number
from tailrace.export.checkpoint import Commit, SkippedRange
from tailrace.export.export import Export
from tailrace.export.settings import COMPRESSIONS, FORMATS, ON_DATA_LOSS, ExportSettings

DEFAULTS = {name: item.default for name, item in ExportSettings.__dataclass_fields__.items()}


class Size(click.ParamType[int]):
    """Bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        size = whole_number("commit_bytes", value)
        if size is None:
            self.fail(f"{str(value)!r} is not a size; write 64MiB or 1GB", param, ctx)
        return size


@click.command()
@click.argument("topic", shell_complete=complete_topics)
@click.option(
    "--to",
    "directory",
    required=True,
    metavar="DIR",
    help="Target: an empty directory, or that of an earlier run, which is continued.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="parquet",
    show_default=True,
    help="delta and iceberg need an extra each.",
)
@click.option(
    "--since",
    type=PastMoment(),
    help=f"Begin with the first record of this time or later: {SINCE_HELP} Counts when DIR is "
    "empty.",
)
@click.option("--columns", metavar="A,B", help="Only these columns.")
@click.option(
    "--partition-by",
    metavar="WHAT",
    help="date or hour of the record's time (UTC), or the name of a column: key, for example.",
)
@click.option(
    "--compression",
    type=click.Choice(COMPRESSIONS),
    default="zstd",
    show_default=True,
    help="Of parquet and arrow files.",
)
@click.option(
    "--rows",
    "rows_max",
    type=click.IntRange(1),
    default=DEFAULTS["rows_max"],
    show_default=True,
    help="Most rows of a commit.",
)
@click.option(
    "--size",
    "commit_bytes",
    type=Size(),
    default="128MiB",
    show_default=True,
    help="Most bytes of a commit, as they lie in memory.",
)
@click.option("--follow", is_flag=True, help="Go on with what is sent later, until Ctrl-C.")
@click.option(
    "--max-delay",
    type=Duration(),
    default="60s",
    show_default=True,
    help="With --follow: how long records wait that fill no segment and no commit.",
)
@click.option(
    "--on-data-loss",
    type=click.Choice(ON_DATA_LOSS),
    default="fail",
    show_default=True,
    help="What to do about records that retention removed first, or that are damaged; after skip "
    "the exit status is 4 if there were any.",
)
@json_option
@bootstrap_option
def command(
    topic: str,
    directory: str,
    form: str,
    columns: str | None,
    follow: bool,
    max_delay: dt.timedelta,
    as_json: bool,
    bootstrap: str,
    **more: Any,
) -> int:
    """Copy a topic into a lake, each record exactly once: into files of Parquet or Arrow, a Delta
    table or an Iceberg table. How far it came is kept in DIR with the rows: the same command, run
    again after any end, goes on behind them. It ends where the topic ends now; with --follow it
    goes on.

    \b
    Example:
      tailrace export flights --to /lake/flights --partition-by date
      tailrace export orders --to /lake/orders --since 1d --follow --max-delay 30s
      tailrace export orders --to /lake/orders-delta --format delta --partition-by key
    """
    export = Export(
        topic, directory, bootstrap, connect_timeout_ms=CONNECT_TIMEOUT_MS, format=form,
        follow=follow,
        max_delay_ms=round(max_delay.total_seconds() * 1000),
        columns=None if columns is None else [c.strip() for c in columns.split(",") if c.strip()],
        **more,
    )  # fmt: skip
    shown = Report(topic, directory, form, as_json=as_json, follow=follow)
    with _stop_signals() as (stop, number):
        try:
            _run(export, stop, shown)
        except BaseException:
            if shown.commits:
                shown.end(resumed=export.resumed)
            raise
        shown.end(resumed=export.resumed)
    if stop.is_set():
        return EXIT_INTERRUPTED if number[0] == signal.SIGINT else 128 + number[0]
    return EXIT_SKIPPED if shown.left_out else 0


def _run(export: Export, stop: threading.Event, shown: Report) -> None:
    commits = export.run(stop)
    first = next(commits, None)
    if first is None:
        return
    total = None if export.settings.follow else export.lag
    with progress("exporting", total) as bar:
        shown.add(first, bar)
        for commit in commits:
            shown.add(commit, bar)


@contextmanager
def _stop_signals() -> Iterator[tuple[threading.Event, list[int]]]:
    """An event that Ctrl-C and SIGTERM set, and which of them; a second one raises
    KeyboardInterrupt.
    """
    stop, number = threading.Event(), [0]

    def on_signal(given: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        number[0] = given
        stop.set()

    before = [(each, signal.signal(each, on_signal)) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stop, number
    finally:
        for each, handler in before:
            signal.signal(each, handler)


class Report:
    """Counters of what this run exported."""

    def __init__(
        self, topic: str, directory: str, form: str, *, as_json: bool, follow: bool
    ) -> None:
        self._about = {"topic": topic, "to": directory, "format": form}
        self._as_json, self._follow = as_json, follow
        self.commits = self._rows = self._files = self._bytes = 0
        self._ranges: dict[int, tuple[int, int]] = {}
        self._left_out_of: dict[int, int] = defaultdict(int)
        self.left_out: list[SkippedRange] = []

    def add(self, commit: Commit, bar: Progress) -> None:
        """Count a commit and advance the bar."""
        self.commits += 1
        self._rows += commit.rows
        self._files += len(commit.files)
        self._bytes += commit.bytes
        for partition, start, end in commit.ranges:
            self._ranges[partition] = self._ranges.get(partition, (start, end))[0], end
        for item in commit.left_out:
            self.left_out.append(item)
            self._left_out_of[item.partition] += item.end - item.start
            complain(
                f"left out: offsets {item.start} to {item.end - 1} of "
                f"{self._about['topic']}-{item.partition}, {item.reason}"
            )
        bar.advance(sum(end - start for _, start, end in commit.ranges))
        if self._follow and self._as_json:
            line = {"commit": commit.number, "records": commit.rows,
            "ranges": [list(item) for item in commit.ranges], "files": list(commit.files),
                    "bytes": commit.bytes,
                    "left_out": [list(item) for item in commit.left_out]}  # fmt: skip
            sys.stdout.buffer.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            sys.stdout.flush()
        elif self._follow:
            files_text = (
                f" in {counted(len(commit.files), 'file')}, {human_bytes(commit.bytes)}"
                if commit.files
                else ""
            )
            echo(f"commit {commit.number}: {counted(commit.rows, 'record')}{files_text}")

    def end(self, *, resumed: bool) -> None:
        """The summary; as JSON, which a program reads while the topic is followed, each commit was
        a line of its own.
        """
        partitions = sorted({*self._ranges, *self._left_out_of})
        rows = [
            [p, *self._ranges.get(p, (None, None)), self._left_out_of.get(p, 0)] for p in partitions
        ]
        if self._as_json:
            if not self._follow:
                names = ("partition", "from", "to", "left_out")
                print_json(
                    {**self._about, "resumed": resumed, "records": self._rows, "files": self._files,
                    "bytes": self._bytes, "commits": self.commits,
                     "partitions": [dict(zip(names, row, strict=True)) for row in rows]}
                )  # fmt: skip
            return
        if rows:
            print_table(["PARTITION", "FROM", "TO", "LEFT OUT"], rows)
        files = (
            f" in {counted(self._files, 'file')}, {human_bytes(self._bytes)}" if self._files else ""
        )
        echo(
            f"exported {counted(self._rows, 'record')}{files} to "
            f"{self._about['to']}{' (went on with an earlier export)' if resumed else ''}"
        )
