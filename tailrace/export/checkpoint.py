"""How far an export is: kept by the target together with the rows, so that both change at once or not at all.

Invariants: pure. `next_offsets` never go back; a record below them is in the target, or was left out and counted. A state is of one topic, by its id: a topic
    that was made again under the same name has another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from tailrace.errors import InvalidRequestError


class LeftOut(NamedTuple):
    """Offsets `start` to `end - 1` of a partition, which are not in the target."""

    partition: int
    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExportState:
    """What a restart needs to know."""

    topic: str
    topic_id: str
    next_offsets: Mapping[int, int]
    """Partition -> the first offset that is not exported."""
    partition_by: str = ""
    number: int = 0
    """Of the commit that wrote it."""

    def encode(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "topic": self.topic, "topic_id": self.topic_id, "partition_by": self.partition_by, "number": self.number,
            "next_offsets": [[partition, offset] for partition, offset in sorted(self.next_offsets.items())],
        }  # fmt: skip

    @classmethod
    def decode(cls, content: Any) -> ExportState | None:
        """None: this is none."""
        try:
            offsets = {int(partition): int(offset) for partition, offset in content["next_offsets"]}
            return cls(str(content["topic"]), str(content["topic_id"]), offsets, str(content["partition_by"]), int(content["number"]))
        except (KeyError, TypeError, ValueError):
            return None

    def check(self, where: str, topic: str, topic_id: str, partition_by: str) -> None:
        """That an export of this topic can go on in a target which holds this state. Raises InvalidRequestError."""
        if self.topic != topic:
            raise InvalidRequestError(f"{where} holds an export of topic {self.topic!r}: export {topic!r} to another directory")
        if self.topic_id != topic_id:
            raise InvalidRequestError(
                f"{where} holds an export of an earlier topic {topic!r}, which was deleted and made again since: its offsets begin anew. "
                "Export the new one to another directory"
            )
        if self.partition_by != partition_by:
            said = f"by {self.partition_by!r}" if self.partition_by else "by nothing"
            raise InvalidRequestError(f"{where} is partitioned {said}: give the same partition_by, or export to another directory")


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one commit."""

    table: pa.Table
    ranges: tuple[tuple[int, int, int], ...]
    """(partition, first offset, behind the last)."""
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """What one commit brought."""

    number: int
    rows: int
    ranges: tuple[tuple[int, int, int], ...]
    left_out: tuple[LeftOut, ...] = ()
    files: tuple[str, ...] = field(default=())
    bytes: int = 0


class Target(Protocol):
    """Where an export goes. One process at a time has it open."""

    def open(self) -> ExportState | None:
        """What is committed there, after what a killed run left was ended or removed; None: nothing yet. Raises InvalidRequestError, StorageError, OSError."""
        ...

    def begin(self, state: ExportState) -> None:
        """Whose export this becomes, and from where on."""
        ...

    def commit(self, step: Step, after: ExportState) -> Commit:
        """Rows and state, both or neither, durable when it returns."""
        ...

    def close(self) -> None:
        """Let others have it; a second time nothing is done."""
        ...
