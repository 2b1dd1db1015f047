"""Delayed records of a typed topic whose schema is altered: `DelayWorld`, and what the columns of
each delivered row must be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from shm.messages.lane_messages import Assignment
from tailrace.format.schema import delay_schema, to_message
from tests.kit.stepped.delays import SECOND, DelayWorld

VALUE = ("value", pa.binary())
OF_TOPIC = {
    11: pa.schema([("n", pa.int16()), VALUE, ("old", pa.utf8())]),
    21: pa.schema(
        [
            VALUE,
            pa.field("m", pa.int32(), metadata={"tailrace.alias": "n"}),
            pa.field("price", pa.float64(), metadata={"tailrace.default": "1.5"}),
        ]
    ),
    31: pa.schema([("price", pa.float64()), ("m", pa.int64()), VALUE, ("old", pa.utf8())]),
}
"""Versions of the topic's schema. The delay log has each under the next id."""
IDS = tuple(OF_TOPIC)


def versions_until(number: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The first versions of topic and delay log."""
    ids = IDS[:number]
    topic = {each: to_message(OF_TOPIC[each]) for each in ids}
    return topic, {each + 1: to_message(delay_schema(OF_TOPIC[each])) for each in ids}


def assigned(known: Assignment, versions: dict[int, bytes]) -> Assignment:
    """A later assignment, with these versions."""
    *older, newest = versions
    return replace(
        known, version=known.version + 1, typed=True, schema_id=newest, schema=versions[newest],
        older_schemas={each: versions[each] for each in older},
    )  # fmt: skip


class AlteredDelayWorld(DelayWorld):
    """See the module's docstring."""

    def __init__(self, seed: int) -> None:
        self.altered = 1
        """The number of versions."""
        self._news: list[Assignment] = []
        """Assignments that the scheduler has not read yet."""
        self.written: dict[str, int] = {}
        """The version that each row was written in."""
        super().__init__(seed)

    def _assignments(self) -> tuple[Assignment, Assignment]:
        topic, log = super()._assignments()
        of_topic, of_log = versions_until(1)
        return assigned(topic, of_topic), assigned(log, of_log)

    def alter(self) -> None:
        """The controller decides the next version. The worker hears of it, then the flusher, and
        the scheduler at some later time, first of the topic.
        """
        if self.altered == len(IDS):
            return
        self.altered += 1
        of_topic, of_log = versions_until(self.altered)
        self.topic, self.log = assigned(self.topic, of_topic), assigned(self.log, of_log)
        for item in (self.topic, self.log):
            self.bench.assign(item)
            self._news.append(item)

    def tell(self) -> None:
        """The scheduler reads what the controller has sent."""
        news, self._news = self._news, []
        for item in news:
            self.partition.assign(item)

    def restart_scheduler(self) -> None:
        self._news = []  # it is fed the whole catalog
        super().restart_scheduler()

    def step(self) -> int:
        if self._news and self.rng.random() < 0.5:
            self.partition.assign(self._news.pop(0))
        return super().step()

    def pass_time(self, microseconds: int, jump_us: int = 0) -> None:
        if microseconds > 5 * SECOND:  # the controller takes no seconds to send what it has decided
            self.tell()
        super().pass_time(microseconds, jump_us)

    def change(self, row: Any, due_us: int | None) -> None:
        self.tell()
        super().change(row, due_us)

    def finish(self) -> None:
        self.tell()
        super().finish()

    def _rows(
        self, names: list[str], dues: list[int], repeats: list[str | None] | None
    ) -> pa.RecordBatch:
        version = self.topic.schema_id
        self.written.update(dict.fromkeys(names, version))
        rows = [
            {**columns_of(name, version, version), "@due_us": due}
            for name, due in zip(names, dues, strict=True)
        ]
        for row, repeat in zip(rows, repeats or (), strict=False):
            row["@repeat"] = repeat
        return pa.RecordBatch.from_pylist(rows, schema=delay_schema(OF_TOPIC[version]))

    def _schema_of(self, header: Any) -> pa.Schema:
        return OF_TOPIC[header.schema_id]

    def stamps(self) -> list[tuple[str, int]]:
        return [(name, header.first_timestamp_us) for name, header in self.delivered()]

    def check(self) -> None:
        super().check()
        version = 0
        for batch, header in self._batches():
            assert header.schema_id >= version, "the versions of a log ascend"
            version = header.schema_id
            for row in batch.to_pylist():
                name = row["value"].decode()
                assert row == columns_of(name, self.written[name], version)


def columns_of(name: str, written: int, shown: int) -> dict[str, Any]:
    """A row that was written in one version, as one of the same or a later version."""
    number = int("".join(filter(str.isdigit, name)))
    price = {11: 1.5, 21: 2.5, 31: 3.5}[written]
    found = {
        "n": number, "m": number, "value": name.encode(), "price": price,
        "old": name if written == shown else None,
    }  # fmt: skip
    return {column: found[column] for column in OF_TOPIC[shown].names}
