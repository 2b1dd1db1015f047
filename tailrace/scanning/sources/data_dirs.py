"""Partitions in a local data directory: where they are, whether it is in use, whose it is, and the
log's end.

The log of a stopped appliance ends where the next start would end it in these files: at the end of
its intact batches. Damage below an offset that was durable is damage, the rest is a torn tail.
Batches that a kill left in shared memory, or a loss of power in the journal, are written to the
files by the next start and are invisible here until then.

Owner: read only. The directory's lock is held only while it is tested, because a start waits for
it.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRequestError,
    NotAuthorizedError,
    StorageError,
    UnknownTopicError,
)
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import LOCK_FILE, read_identity
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import BatchHeader
from tailrace.format.segments.segment import (
    Ending,
    Walk,
    find_behind,
    first_batch_position,
    schema_message_length,
    walk_batches,
)
from tailrace.format.segments.transaction_index import AbortedTransaction
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file
from tailrace.scanning.sources.transactions import decided, has_transactions

if TYPE_CHECKING:
    from tailrace.admin.admin import Admin

CHECKPOINTS = ("checkpoint.0", "checkpoint.1")
_PARTITION_NAME = re.compile(r"(.+)-(0|[1-9][0-9]*)")


def is_directory(source: Any) -> bool:
    """True if `source` is a directory, not a topic: a path object, or text with a slash."""
    return isinstance(source, os.PathLike) or (isinstance(source, str) and os.sep in source)


def find_partitions(
    path: str, requested: tuple[int, ...] | None
) -> dict[int, tuple[str, PartitionMetadata]]:
    """The partitions in `DATA_DIR/topic` or one partition's directory, with their metadata.

    Returns number -> (directory, its `partition.json`). Raises UnknownTopicError,
    InvalidRequestError, StorageError.
    """
    path = os.path.abspath(path)
    parent, name = os.path.split(path)
    match = _PARTITION_NAME.fullmatch(name)
    if match is not None and os.path.exists(f"{path}/{PARTITION_FILE}"):
        here = {int(match[2]): path}
        needed: Iterable[int] = requested or ()
    else:
        here = _partitions_in(parent).get(name, {})
        if not here:
            raise _not_found(path)
        needed = requested or range(_partition_count(here))
    missing = sorted(set(needed) - set(here))
    if missing:
        raise InvalidRequestError(
            f"{path} has no directory of partition {', '.join(map(str, missing))}, which may be in "
            "another data directory; "
            f"use partitions={sorted(here)} to read the others"
        )
    return {number: (here[number], _known(here[number])) for number in sorted(requested or here)}


def _known(directory: str) -> PartitionMetadata:
    known = read_partition_file(directory)
    if known is None:
        raise StorageError(
            f"{directory}/{PARTITION_FILE} cannot be read or is damaged, and segments cannot be "
            "verified without it; restore it from a backup"
        )
    return known


def _partition_count(here: dict[int, str]) -> int:
    """The topic's partition count, from the decisions in its directories."""
    decisions = (_known(directory).decision for directory in here.values())
    return max(
        (decision.partition_count for decision in decisions if decision is not None),
        default=len(here),
    )


def _partitions_in(data_dir: str) -> dict[str, dict[int, str]]:
    """Topic -> partition -> directory."""
    result: dict[str, dict[int, str]] = {}
    try:
        names = os.listdir(data_dir)
    except OSError:
        return result
    for name in names:
        match = _PARTITION_NAME.fullmatch(name)
        if match is not None and os.path.exists(f"{data_dir}/{name}/{PARTITION_FILE}"):
            result.setdefault(match[1], {})[int(match[2])] = f"{data_dir}/{name}"
    return result


def _not_found(path: str) -> UnknownTopicError:
    parent, name = os.path.split(path)
    here, inside = _partitions_in(parent), _partitions_in(path)
    if inside:
        return UnknownTopicError(
            f"{path} is a data directory; name a topic in it, such as {path}/{sorted(inside)[0]}"
        )
    near = difflib.get_close_matches(name, here, 1, 0.5)
    hint = (
        f"; did you mean {parent}/{near[0]}?"
        if near
        else f"; {parent} has no topics"
        if not here
        else ""
    )
    return UnknownTopicError(f"there is no topic {name!r} in {parent}{hint}")


def is_in_use(data_dir: str) -> bool:
    """True if an appliance runs on this data directory. Raises StorageError if that is unknown."""
    try:
        fd = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{data_dir} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return True
        return _has_holder(data_dir)  # a network file system without locks on directories
    finally:
        os.close(fd)
    return False


def _holder(data_dir: str) -> dict[str, Any]:
    """The holder in the lock file."""
    try:
        holder = checked_json.decode(checked_json.read(f"{data_dir}/{LOCK_FILE}"))
    except OSError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _has_holder(data_dir: str) -> bool:
    pid = _holder(data_dir).get("pid")
    return isinstance(pid, int) and os.path.exists(f"/proc/{pid}")


def address_of(data_dir: str) -> str | None:
    """The address of the appliance that runs on this directory, None if its lock file has none."""
    addresses = _holder(data_dir).get("addresses")
    if not isinstance(addresses, list) or not addresses or not isinstance(addresses[0], str):
        return None
    return addresses[0].replace("://*:", "://127.0.0.1:")


def same_directory(path: str, instance: str | None) -> bool:
    """True if `path` is the appliance's original data directory, not a copy or another host's.

    `instance` is the appliance's id, if the directory must have it.
    """
    found = read_identity(path)
    if found is None or (instance is not None and found.instance.hex() != instance):
        return False
    try:
        here = os.stat(path)
    except OSError:
        return False
    return (found.device, found.inode) == (here.st_dev, here.st_ino)


# ---- a stopped appliance's log -------------------------------------------------------------------


def own_directories(admin: Admin) -> list[str]:
    """The appliance's own data directories that are on this host. None for a user who may not
    describe the appliance: the front serves what its rights allow.
    """
    try:
        described = admin.describe_cluster()
    except NotAuthorizedError:
        return []
    paths = [row["path"] for row in described["data_dirs"]]
    return [
        path
        for n, path in enumerate(paths)
        if same_directory(path, described["cluster_id"] if n == 0 else None)
    ]


def directory_of(topic: str, partition: int, topic_id: bytes, data_dirs: list[str]) -> str:
    """The directory of a partition that opens here; empty: there is none."""
    paths = [f"{data_dir}/{topic}-{partition}" for data_dir in data_dirs]
    found = [path for path in paths if opens_here(path, topic_id)]
    if len(found) < 2:
        return found[0] if found else ""
    return max(found, key=_version_in)  # it has moved, and its former files are still there


def _version_in(directory: str) -> int:
    """The version of the topic that a partition's directory was opened with."""
    known = read_partition_file(directory)
    return known.decision.version if known is not None and known.decision is not None else 0


def opens_here(directory: str, topic_id: bytes) -> bool:
    """True if a partition's directory is the topic's, and this process can open its segments."""
    known = read_partition_file(directory)
    if known is None or known.topic_id != topic_id:
        return False
    try:
        bases = LocalSource(directory, known, headers_only=True, schema=pa.schema([])).bases()
        return all(os.access(path, os.R_OK) for path in bases.values())
    except OSError:
        return False


def is_own(directory: str, topic_id: bytes) -> bool:
    """True if a directory from a plan is the appliance's own here, not a copy under the same
    path.
    """
    return same_directory(os.path.dirname(directory), None) and opens_here(directory, topic_id)


def decided_end(files: LocalSource) -> tuple[int, tuple[AbortedTransaction, ...]]:
    """The end of the committed records that the next start would find in these files, and the
    aborted transactions before it. Raises StorageError.
    """
    end = settled_end(files)
    try:
        if not has_transactions(files.directory):
            return end, ()
    except OSError as error:
        raise StorageError(f"{files.directory} cannot be read: {error}") from error
    heads = LocalSource(
        files.directory, files.known, headers_only=True, schema=files.schema, is_uncommitted=True
    )

    def headers(start: int, behind: int) -> Iterator[BatchHeader]:
        return (frame.header for frame in heads.frames(start, behind))

    return decided(headers, files.known.log_start_offset, end)


def settled_end(files: LocalSource) -> int:
    """The end of the log that the next start would find in these files. Raises StorageError."""
    try:
        bases = files.bases()
        durable = max(_durable_end(files), files.known.log_start_offset)
        if not bases:
            return durable
        base = max(bases)
        with open(bases[base], "rb", buffering=0) as file:
            fd = file.fileno()
            return max(
                _end_of(
                    files,
                    base,
                    os.fstat(fd).st_size,
                    lambda length, at: os.pread(fd, length, at),
                    durable,
                ),
                durable,
            )
    except OSError as error:
        raise StorageError(f"{files.directory} cannot be read: {error}") from error


def _end_of(
    files: LocalSource, base: int, size: int, read_at: Callable[[int, int], bytes], durable: int
) -> int:
    """The end offset of the newest segment, by the table in `workers.log.recovery`."""
    position = schema_message_length(read_at)
    if not position or read_at(position, 0) not in files.known.schemas.values():
        position = first_batch_position(read_at, size, files.known.seed, base) or len(
            next(iter(files.known.schemas.values()), b"")
        )
    walk = Walk(position, base)
    while True:
        for _ in walk_batches(read_at, size, walk, files.known.seed):
            pass
        if walk.ending is not Ending.TORN:
            return walk.next_offset
        known = next(
            (
                d
                for d in files.known.damage
                if d.start == walk.next_offset and d.end_position > walk.position
            ),
            None,
        )
        if known is not None:
            walk.position, walk.next_offset, walk.ending = (
                known.end_position,
                known.end,
                Ending.CLEAN,
            )
            continue
        behind = find_behind(read_at, size, walk.position, files.known.seed, walk.next_offset)
        if behind is None or not (behind.proves_durable or walk.next_offset < durable):
            return walk.next_offset
        walk.position, walk.next_offset, walk.ending = behind.position, behind.offset, Ending.CLEAN


def _durable_end(files: LocalSource) -> int:
    """The offset below which everything was durable, by the newest intact checkpoint."""
    found = [0]
    for name in CHECKPOINTS:
        try:
            content = checked_json.decode(checked_json.read(f"{files.directory}/{name}"))
        except OSError:
            continue
        if (
            isinstance(content, dict)
            and content.get("topic_id") == files.known.topic_id.hex()
            and isinstance(content.get("next_offset"), int)
        ):
            found.append(content["next_offset"])
    return max(found)


def offset_for_time(
    files: LocalSource,
    when_us: int,
    end: int,
    time_in: Callable[[BatchHeader, Any, Any], int | None],
) -> int | None:
    """The offset of the first record at or after `when_us` and below `end`, None if there is none.

    `time_in` returns the first offset in a batch (header, data, schema), or None. Damaged batches
    count as empty.
    """
    heads = files.with_headers_only()
    offset = files.known.log_start_offset
    while offset < end:
        try:
            for frame in heads.frames(offset, end):
                offset = frame.header.next_offset
                if frame.header.is_control or frame.header.max_timestamp_us < when_us:
                    continue
                whole = next(iter(files.frames(frame.header.base_offset, frame.header.next_offset)))
                found = time_in(whole.header, whole.data, whole.schema)
                if found is not None:
                    return found
        except CorruptBatchError as error:
            offset = max(error.next_offset or end, offset)
    return None
