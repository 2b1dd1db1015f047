"""Topic copy: the lines of an audit log as records of a topic, each once, in order.

Owner: the command that runs it, one for each topic.

Invariants:
- The topic has one partition, and its last record says which line was copied last. So a copy that
  was killed goes on where its acknowledged records end.
- Each record requires its offset. So of two copies into a topic one fails, and no line is there
  twice.
- A line is copied as it stands, so the chain of hashes can be verified from the records.
- Only whole lines are copied: one without its end is being written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice

import orjson

from appliance.audit.audit_log import PREFIX, SUFFIX, audit_files
from tailrace import Admin, Consumer, TopicPartition
from tailrace.core.errors import InvalidRequestError, OffsetConflictError
from tailrace.producer.positioned import PositionedProducer

LINES_AT_ONCE = 10_000
"""Lines whose acknowledgements are awaited together."""
LAST_READ_S = 30.0
"""Longest wait for the last record of the topic."""


class TopicCopy:
    """A copy of one log into one topic."""

    def __init__(self, directory: str, topic: str, bootstrap: str) -> None:
        """Find where an earlier copy has ended. Raises TailraceError."""
        self._directory = directory
        self._topic = topic
        with Admin(bootstrap) as admin:
            if topic not in admin.list_topics():
                raise InvalidRequestError(
                    f"there is no topic {topic!r}: create it with one partition, and a retention "
                    "as long as the lines are to be kept"
                )
            if (count := admin.partition_counts()[topic]) != 1:
                raise InvalidRequestError(
                    f"topic {topic!r} has {count} partitions; lines in order need a topic with one"
                )
        self.copied, end = last_line(topic, bootstrap)
        """Number of the last line that is in the topic."""
        self.missing = 0
        """Lines that were removed before they were copied."""
        self._producer = PositionedProducer(bootstrap, client_id="audit-copy")
        self._producer.set_position(TopicPartition(topic, 0), end)
        self._name, self._position = "", 0
        """The file that is read, and the position behind its last line that was looked at."""

    def step(self) -> int:
        """Copy what is new. Returns the number of lines. Raises OSError, TailraceError."""
        count = 0
        lines = self._new_lines()
        while piece := list(islice(lines, LINES_AT_ONCE)):
            count += self._copy(piece)
        return count

    def _copy(self, lines: list[tuple[int, bytes]]) -> int:
        handles = []
        for seq, line in lines:
            if seq <= self.copied:
                continue
            self.missing += seq - self.copied - 1
            handles.append(self._producer.send(self._topic, line, partition=0))
            self.copied = seq
        self._producer.flush()
        try:
            for handle in handles:
                handle.result(0)
        except OffsetConflictError:
            raise InvalidRequestError(
                f"topic {self._topic!r} has another writer: let one copy run, or, where one has "
                "only just ended, run this again"
            ) from None
        return len(handles)

    def close(self) -> None:
        self._producer.close()

    def _new_lines(self) -> Iterator[tuple[int, bytes]]:
        names = audit_files(self._directory)
        for place, name in enumerate(names):
            following = names[place + 1] if place + 1 < len(names) else ""
            if following and _first_of(following) <= self.copied + 1:
                continue  # all of it is copied
            if name != self._name:
                self._name, self._position = name, 0
            with open(os.path.join(self._directory, name), "rb") as file:
                file.seek(self._position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._position += len(line)
                    seq = seq_of(line)
                    if seq is not None:
                        yield seq, line.rstrip(b"\n")


def _first_of(name: str) -> int:
    return int(name.removeprefix(PREFIX).removesuffix(SUFFIX))


def seq_of(line: bytes) -> int | None:
    """The number of a line; None: it is none of an audit log."""
    try:
        seq = orjson.loads(line)["seq"]
    except (ValueError, KeyError, TypeError):
        return None
    return seq if type(seq) is int else None


def last_line(topic: str, bootstrap: str) -> tuple[int, int]:
    """The number of the last line that a topic has, 0 if it has none, and the topic's end. Raises
    TailraceError.
    """
    partition = TopicPartition(topic, 0)
    with Admin(bootstrap) as admin:
        found = admin.offsets({partition: "latest"})[partition]
    if found.get("code"):
        raise InvalidRequestError(f"the end of topic {topic!r} cannot be read: {found['code']}")
    begin, end = found["beginning"], found["end"]
    if end <= begin:
        return 0, end
    with Consumer(bootstrap=bootstrap) as consumer:
        consumer.assign([partition])
        consumer.seek(partition, end - 1)
        records = consumer.consume(1, LAST_READ_S)
    seq = seq_of(bytes(records[0].value or b"")) if records else None
    if seq is None:
        raise InvalidRequestError(
            f"the last record of topic {topic!r} is no line of an audit log: give a topic of its "
            "own"
        )
    return seq, end
