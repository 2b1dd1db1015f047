"""Export checkpoint: the exported offsets, stored in the target in the same commit as the rows.

Invariants:
- All functions are pure.
- `next_offsets` never decrease. A record below them is in the target, or was skipped and counted.
- A checkpoint belongs to one topic id. A topic that is created again has another id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from tailrace.core.errors import InvalidRequestError


class SkippedRange(NamedTuple):
    """Offsets `start` to `end - 1` of a partition that are not in the target."""

    partition: int
    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExportCheckpoint:
    """The state that a restart continues from."""

    topic: str
    topic_id: str
    next_offsets: Mapping[int, int]
    """Partition -> the first offset that is not exported."""
    partition_by: str = ""
    number: int = 0
    """The number of the commit that wrote it."""

    def encode(self) -> dict[str, Any]:
        """Encode as a JSON value."""
        return {
            "topic": self.topic, "topic_id": self.topic_id, "partition_by": self.partition_by,
            "number": self.number,
            "next_offsets": [
                [partition, offset] for partition, offset in sorted(self.next_offsets.items())
            ],
        }  # fmt: skip

    @classmethod
    def decode(cls, content: Any) -> ExportCheckpoint | None:
        """Decode a JSON value. None if it is not a checkpoint."""
        try:
            offsets = {int(partition): int(offset) for partition, offset in content["next_offsets"]}
            return cls(
                str(content["topic"]),
                str(content["topic_id"]),
                offsets,
                str(content["partition_by"]),
                int(content["number"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def check(self, where: str, topic: str, topic_id: str, partition_by: str) -> None:
        """Check that an export of this topic can continue from this
        state. Raises InvalidRequestError.
        """
        if self.topic != topic:
            raise InvalidRequestError(
                f"{where} has an export of topic {self.topic!r}; export {topic!r} to another "
                "directory"
            )
        if self.topic_id != topic_id:
            raise InvalidRequestError(
                f"{where} has an export of an earlier topic {topic!r}, which was deleted and "
                "created again, with new offsets; export the new topic to another directory"
            )
        if self.partition_by != partition_by:
            scheme = f"by {self.partition_by!r}" if self.partition_by else "by nothing"
            raise InvalidRequestError(
                f"{where} is partitioned {scheme}; give the same partition_by, or export to "
                "another directory"
            )


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one commit."""

    table: pa.Table
    ranges: tuple[tuple[int, int, int], ...]
    """(partition, first offset, next offset)."""
    left_out: tuple[SkippedRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of one commit."""

    number: int
    rows: int
    ranges: tuple[tuple[int, int, int], ...]
    left_out: tuple[SkippedRange, ...] = ()
    files: tuple[str, ...] = field(default=())
    bytes: int = 0


class Sink(Protocol):
    """The target of an export. One process at a time has it open."""

    def open(self) -> ExportCheckpoint | None:
        """Open the target, clean up after a killed run, and return its state; None if it is empty.

        Raises InvalidRequestError, StorageError, OSError.
        """
        ...

    def begin(self, state: ExportCheckpoint) -> None:
        """Begin a new export with this state."""
        ...

    def commit(self, step: Step, after: ExportCheckpoint) -> Commit:
        """Commit rows and state together. Both are durable on return."""
        ...

    def close(self) -> None:
        """Release the target. Does nothing a second time."""
        ...
