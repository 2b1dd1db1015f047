"""`tailrace partition`: where partitions are, and moves to other data directories."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import click

from appliance.backup.errors import BackupError
from appliance.backup.source.point import Source, SourcePartition
from appliance.cli.options.appliance_control import control_directory, data_dir_option
from appliance.cli.options.shared import bootstrap_option, connect, json_option
from appliance.cli.output import BYTES, echo, human_bytes, print_json, print_table, progress
from appliance.data.partition_copy import (
    CopyInUseError,
    Pace,
    PartitionCopy,
    opened,
    remove_left,
)
from tailrace.admin.admin import Admin
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, UnknownTopicError
from tailrace.core.schedule.delays import delay_log_name
from tailrace.core.units import bytes_of, digits_in
from tailrace.format.directory.data_dir import MOVING_DIRECTORY, bin_name
from tailrace.format.directory.files import NO_SPACE

CLOSE_BYTES = 8 << 20
"""A partition is closed when its copy lacks less than this."""
PASSES_MAX = 20
POLL_S = 0.05
CLOSE_TIMEOUT_S = 60.0
ARRIVAL_TIMEOUT_S = 120.0
STAYS = "it stays where it was"


class Place(NamedTuple):
    """A partition and its directory."""

    found: SourcePartition
    data_dir: str
    delay_log: SourcePartition | None = None
    """The partition of the topic's delay log, which moves with it."""

    @property
    def logs(self) -> list[SourcePartition]:
        """Its own log, then that of the delay log."""
        return [self.found] if self.delay_log is None else [self.found, self.delay_log]

    @property
    def topic_id(self) -> bytes:
        return self.found.topic_id

    @property
    def name(self) -> str:
        return f"{self.found.topic}:{self.found.partition}"


class PartitionGoneError(click.ClickException):
    """The topic was deleted while its partition was to move."""


@click.group()
def command() -> None:
    """Show which data directory each partition is in, and move partitions between directories.

    \b
    Example:
      tailrace partition list
      tailrace partition move orders:3 --to /disk2/tailrace
    """


def rate_option(function: Any) -> Any:
    """Add the option --rate."""
    return click.option(
        "--rate",
        default="0",
        help='Copy at most so many bytes a second, as "50MB"; default: no limit.',
    )(function)


def rate_of(text: str) -> int:
    """Bytes a second. Raises UsageError."""
    found = bytes_of(text)
    if found is None:
        raise click.UsageError(f'--rate is {text!r}; it takes bytes a second, such as "50MB"')
    return found


def places(directory: str) -> list[Place]:
    """The partitions of the appliance with this first data directory, each with that of its delay
    log. Raises ClickException.
    """
    try:
        source = Source(directory)
        try:
            if not source.is_running:
                raise click.ClickException(
                    f"no appliance runs on {source.data_dir}: start it first"
                )
            found = source.partitions()
        finally:
            source.close()
    except BackupError as error:
        raise click.ClickException(str(error)) from None
    logs = {(each.topic, each.partition): each for each in found if each.is_delay_log}
    return [
        Place(
            each,
            os.path.dirname(each.directory),
            logs.get((delay_log_name(each.topic), each.partition)),
        )
        for each in found
        if not each.is_delay_log
    ]


@command.command(name="list")
@data_dir_option
@bootstrap_option
@json_option
def list_(data_dir: str | None, bootstrap: str, as_json: bool) -> None:
    """List the partitions with their data directories, and those that are moving.

    \b
    Example:
      tailrace partition list --json
    """
    directory = control_directory(data_dir, bootstrap)
    with connect(bootstrap) as admin:
        moves = admin.describe_cluster().get("moves", [])
    states = {(each["topic"], each["partition"]): each for each in moves}
    rows = [
        {
            "topic": place.found.topic, "partition": place.found.partition,
            "data_dir": place.data_dir,
            **{
                key: states.get((place.found.topic, place.found.partition), {}).get(key, "")
                for key in ("state", "reason")
            },
        }
        for place in places(directory)
    ]  # fmt: skip
    if as_json:
        print_json(rows)
    else:
        print_table(
            ["TOPIC", "PARTITION", "DATA DIRECTORY", "MOVE", "REASON"],
            [list(row.values()) for row in rows],
        )


@command.command()
@click.argument("partition", metavar="TOPIC:PARTITION")
@click.option("--to", "target", required=True, help="Another data directory of the appliance.")
@rate_option
@data_dir_option
@bootstrap_option
@json_option
def move(
    partition: str, target: str, rate: str, data_dir: str | None, bootstrap: str, as_json: bool
) -> None:
    """Move a partition to another data directory while it is written and read. Run it on the
    appliance's host, as its user.

    \b
    Example:
      tailrace partition move orders:3 --to /disk2/tailrace --rate 50MB
    """
    topic, separator, text = partition.rpartition(":")
    number = digits_in(text)
    if not separator or number is None:
        raise click.UsageError(f"{partition!r} is no TOPIC:PARTITION, such as orders:3")
    pace = Pace(rate_of(rate))
    known = places(control_directory(data_dir, bootstrap))
    place = next(
        (each for each in known if (each.found.topic, each.found.partition) == (topic, number)),
        None,
    )
    if place is None:
        raise click.ClickException(
            f"there is no partition {partition}; `tailrace partition list` shows them"
        )
    with connect(bootstrap) as admin:
        remove_left_copies(admin, known)
        copied, closed_s = move_partition(admin, place, target, pace)
    if as_json:
        print_json(
            {
                "topic": topic, "partition": number, "from": place.data_dir, "to": target,
                "copied_bytes": copied, "closed_ms": round(closed_s * 1000),
            }
        )  # fmt: skip
    else:
        echo(
            f"{partition} is in {target}: {human_bytes(copied)} copied, closed for "
            f"{closed_s * 1000:.0f} ms; its former files are removed when no reader needs them"
        )


def move_partition(admin: Admin, place: Place, target: str, pace: Pace) -> tuple[int, float]:
    """Copy a partition, then have the appliance move it. Returns the bytes copied before it was
    closed and the seconds that it took no writes. Raises ClickException, TailraceError.
    """
    path = known_directory(admin, target)
    _check_movable(admin, place, path)
    total = sum(_size_of(each.directory) for each in place.logs)
    _check_room(admin, place, path, total)
    try:
        with ExitStack() as stack:
            copies = [
                stack.enter_context(
                    opened(each.directory, path, each.topic_id, each.partition, pace)
                )
                for each in place.logs
            ]
            bar = stack.enter_context(progress(f"copying {place.name}", total, BYTES))
            copied = _catch_up(copies, bar.advance)
    except CopyInUseError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        _raise_if_gone(admin, place)
        raise click.ClickException(
            f"{place.name} cannot be copied to {path}: {error}; {STAYS}"
        ) from None
    began_s = _close(admin, place, path)
    _await_arrival(admin, place)
    return copied, time.monotonic() - began_s


def _catch_up(copies: list[PartitionCopy], advance: Callable[[int], None]) -> int:
    """Copy until the copies lack little. Returns the bytes copied. Raises OSError."""
    copied = 0
    try:
        for _ in range(PASSES_MAX):
            count = sum(copy.catch_up(advance) for copy in copies)
            copied += count
            if count < CLOSE_BYTES:
                break
    except OSError as error:
        if error.errno in NO_SPACE:  # the directory has partitions of its own
            for copy in copies:
                copy.discard()
        raise
    return copied


def _close(admin: Admin, place: Place, path: str) -> float:
    """Have the partition closed for its move, when nothing is in the way: another partition of the
    topic that moves, or files of an earlier move. Returns the time when it was asked for. Raises
    TailraceError.
    """
    deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
    while True:
        began_s = time.monotonic()
        try:
            admin.move_partition(place.found.topic, place.found.partition, path)
        except UnknownTopicError:
            _raise_if_gone(admin, place)
            raise
        except TailraceError as error:
            if error.code is not ErrorCode.NOT_READY or began_s > deadline_s:
                raise
            time.sleep(POLL_S)
        else:
            return began_s


def known_directory(admin: Admin, target: str) -> str:
    """The data directory as the appliance names it. Raises ClickException."""
    paths = [str(row["path"]) for row in admin.describe_cluster()["data_dirs"]]
    for path in paths:
        if os.path.realpath(path) == os.path.realpath(target):
            return path
    raise click.ClickException(
        f"{target} is no data directory of this appliance; it has {', '.join(paths)}. To add one, "
        "list it in data_dirs and restart the appliance"
    )


def _check_movable(admin: Admin, place: Place, path: str) -> None:
    """Raise InvalidRequestError if the appliance would refuse the move behind the copy."""
    try:
        admin.move_partition(place.found.topic, place.found.partition, path, validate_only=True)
    except UnknownTopicError:
        _raise_if_gone(admin, place)
        raise
    except TailraceError as error:
        if error.code is not ErrorCode.NOT_READY:  # what is in the way now may be over then
            raise


def remove_left_copies(admin: Admin, known: list[Place]) -> None:
    """Remove the copies in each data directory that no move can use any more."""
    for row in admin.describe_cluster()["data_dirs"]:
        path = str(row["path"])
        usable = {
            bin_name(each.topic_id, each.partition)
            for place in known
            for each in place.logs
            if os.path.realpath(place.data_dir) != os.path.realpath(path)
        }
        remove_left(path, usable)


def _check_room(admin: Admin, place: Place, path: str, total: int) -> None:
    """Raises ClickException unless the data directory takes writes and has room for a partition of
    `total` bytes beside its reserve.
    """
    row = next(row for row in admin.describe_cluster()["data_dirs"] if row["path"] == path)
    if row["state"] != "OK":
        raise click.ClickException(
            f"{place.name} cannot move to {path}, which takes no writes ({row['state']}): "
            "`tailrace status` says why"
        )
    copied = sum(
        _size_of(f"{path}/{MOVING_DIRECTORY}/{bin_name(each.topic_id, each.partition)}")
        for each in place.logs
    )
    free = int(row["free_bytes"])
    reserve = min(int(row["reserve_bytes"]), int(row["total_bytes"]) // 8)
    if free - reserve < total - copied:
        raise click.ClickException(
            f"{place.name} has {human_bytes(total)}, and {path} has {human_bytes(free)} free, of "
            f"which {human_bytes(reserve)} are reserved (disk_reserve_bytes): free some space "
            "there, or choose another directory"
        )


def _size_of(directory: str) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:
        return 0


def _raise_if_gone(admin: Admin, place: Place) -> None:
    """Raises PartitionGoneError."""
    try:
        if admin.topic_info([place.found.topic])[place.found.topic].topic_id == place.topic_id:
            return
    except UnknownTopicError:
        pass
    raise PartitionGoneError(f"{place.name} was not moved: its topic was deleted meanwhile")


def _await_arrival(admin: Admin, place: Place) -> None:
    """Wait until the partition is open in its new directory. Raises ClickException."""
    deadline_s = time.monotonic() + ARRIVAL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        found = next(
            (
                each
                for each in admin.describe_cluster()["moves"]
                if (each["topic"], each["partition"]) == (place.found.topic, place.found.partition)
            ),
            None,
        )
        if found is None or found["state"] == "left":
            _raise_if_gone(admin, place)
            return
        if found["state"] == "failed":
            raise click.ClickException(f"{place.name} was not moved: {found['reason']}; {STAYS}")
        time.sleep(POLL_S)
    raise click.ClickException(
        f"{place.name} is closed for its move for {ARRIVAL_TIMEOUT_S:.0f} s: `tailrace status` and "
        "the log say why"
    )
