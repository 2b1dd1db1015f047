"""`tailrace topic compact`: cleans a compacted topic now, and shows how far that is."""

from __future__ import annotations

from typing import Any

import click

from appliance.cli.options.shared import bootstrap_option, complete_topics, connect, json_option
from appliance.cli.output import (
    BYTES,
    Progress,
    complain,
    counted,
    echo,
    human_bytes,
    print_json,
    print_table,
    progress,
)
from tailrace.admin.admin import Admin
from tailrace.core.errors import CorruptBatchError, PartitionOfflineError, RequestTimeoutError

EXIT_FAILED = 1


class Shown:
    """The progress of a cleaning: the bar's length is what is dirty at first."""

    def __init__(self) -> None:
        self.partitions: list[dict[str, Any]] = []
        self._bar = Progress()
        self._left = 0

    def begin(self, bar: Progress, left: int) -> None:
        """Move this bar, of `left` bytes."""
        self._bar, self._left = bar, left

    def note(self, partitions: list[dict[str, Any]]) -> None:
        """Take over the state of the partitions."""
        self.partitions = partitions
        left = dirty_bytes(partitions)
        if left < self._left:
            self._bar.advance(self._left - left)
            self._left = left


def dirty_bytes(partitions: list[dict[str, Any]]) -> int:
    """Bytes that are sealed, can be cleaned and are not."""
    return sum(each["dirty_bytes"] for each in partitions)


@click.command()
@click.argument("name", shell_complete=complete_topics)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Wait no longer; the cleaning goes on.",
)
@bootstrap_option
@json_option
def compact(name: str, timeout_s: float | None, bootstrap: str, as_json: bool) -> None:
    """Clean a compacted topic now, and wait until it is clean: of the records up to now, those
    whose key has a later one are gone. What is younger than min.compaction.lag.ms, or behind an
    open transaction, stays.

    \b
    Example:
      tailrace topic compact users
    """
    shown = Shown()
    failure = ""
    timeout_ms = None if timeout_s is None else int(timeout_s * 1000)
    with connect(bootstrap) as admin:
        size = _bytes_of(admin, name)
        with progress(f"compacting {name}", size, BYTES) as bar:
            shown.begin(bar, size)
            try:
                admin.compact_topic(name, timeout_ms=timeout_ms, on_progress=shown.note)
            except (CorruptBatchError, PartitionOfflineError, RequestTimeoutError) as error:
                failure = error.detail
        after = _bytes_of(admin, name)
    if as_json:
        print_json(
            {
                "topic": name,
                "bytes_before": size,
                "bytes_after": after,
                "partitions": shown.partitions,
            }
        )
    else:
        print_table(
            ["PARTITION", "STATE", "CLEAN BELOW", "END", "CLEAN", "TO CLEAN"],
            [
                [
                    each["partition"],
                    each["state"],
                    each["cleaned_below"],
                    each["log_end_offset"],
                    human_bytes(each["clean_bytes"]),
                    human_bytes(each["dirty_bytes"]),
                ]
                for each in shown.partitions
            ],
        )
        left = sum(each["log_end_offset"] > each["cleaned_below"] for each in shown.partitions)
        echo(
            f"{name}: {human_bytes(size)} before, {human_bytes(after)} now"
            + (
                f"; the newest records of {counted(left, 'partition')} wait "
                "(min.compaction.lag.ms, an open transaction, or written meanwhile)"
                if left
                else ""
            )
        )
    if failure:
        complain(failure)
        raise SystemExit(EXIT_FAILED)


def _bytes_of(admin: Admin, topic: str) -> int:
    """The bytes of a topic on the disk."""
    return sum(each["bytes"] or 0 for each in admin.describe_topics([topic])[topic]["partitions"])
