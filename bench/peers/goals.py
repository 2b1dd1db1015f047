"""The goals of `make bench-peers`: what is computed of which rows, what it has to reach, and
whether it did. Pure.

A goal's value is that of the medians; beside it stand least and most over the rounds, as the
contenders of one round met the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

Values = Mapping[tuple[str, str, str], list[float]]
"""(row, contender, label) -> a value for each round."""
RATES = ("2,000/s", "10,000/s", "50,000/s")


class Of(Protocol):
    """A contender's figure. Raises KeyError when it was not measured."""

    def __call__(self, row: str, contender: str, label: str = "") -> float: ...


class Goal(NamedTuple):
    """`formula` over figures has to be at least, or at most, `bound`."""

    name: str
    unit: str
    bound: float
    is_least: bool
    """True if more is better."""
    formula: Callable[[Of], float]
    row: str
    """After which row it is shown; the others that it needs come before."""


class Outcome(NamedTuple):
    """Outcome of a goal. `value` is None if something that it needs was not measured."""

    goal: Goal
    value: float | None
    least: float
    most: float

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        return (
            self.value >= self.goal.bound if self.goal.is_least else self.value <= self.goal.bound
        )

    def line(self) -> str:
        """For the output."""
        relation = ">=" if self.goal.is_least else "<="
        wanted = f"goal {relation} {self.goal.bound:g}{self.goal.unit}"
        if self.value is None:
            return f"  {self.goal.name:<66} {'not measured':>28}  {wanted}"
        spread = f"{self.value:,.2f}{self.goal.unit} ({self.least:,.2f} .. {self.most:,.2f})"
        return (
            f"  {self.goal.name:<66} {spread:>28}  {wanted}: {'met' if self.is_met else 'MISSED'}"
        )

    def for_file(self) -> dict[str, Any]:
        return {
            "goal": self.goal.name, "unit": self.goal.unit.strip(), "bound": self.goal.bound,
            "more_is_better": self.goal.is_least, "value": self.value,
            "least": self.least, "most": self.most, "met": self.is_met,
        }  # fmt: skip


def ratio(name: str, bound: float, row: str, ours: str, theirs: str) -> Goal:
    """Goal: the ratio of two contenders in one row is at least `bound`."""
    return Goal(name, "x", bound, True, lambda of: of(row, ours) / of(row, theirs), row)


def _most(name: str, unit: str, bound: float, row: str, formula: Callable[[Of], float]) -> Goal:
    return Goal(name, unit, bound, False, formula, row)


def goals() -> Iterator[Goal]:
    """In the order of the rows."""
    yield from _sent()
    yield from _consumed()
    yield from _acknowledged()
    yield from _transactions()
    yield from _end_to_end()
    yield from _cpu_and_memory()


def _sent() -> Iterator[Goal]:
    yield ratio("send() 100 B with key, acks=1 / Kafka's tool", 3, "send-100", "ours", "kafka")
    yield ratio(
        "send() 100 B with key, acks=1 / confluent-kafka-python", 2, "send-100", "ours", "confluent"
    )
    yield ratio(
        "the same, partition= given / Kafka's tool", 3, "send-100", "ours-partition", "kafka"
    )
    yield ratio(
        "the same, partition= given / confluent-kafka-python",
        2,
        "send-100",
        "ours-partition",
        "confluent-partition",
    )
    yield ratio("synced 100 B / Kafka's tool", 4, "synced-100", "ours", "kafka")
    yield ratio("1,000 B, acks=1 / Kafka's tool", 3, "send-1000", "ours", "kafka")
    yield ratio("prebuilt Arrow 64 KiB / raw pyzmq pipe", 0.4, "arrow-64k", "ours-tmpfs", "pipe")
    yield ratio("prebuilt Arrow 1 MiB / raw pyzmq pipe", 0.6, "arrow-1m", "ours-tmpfs", "pipe")
    yield ratio("batches of 1,000 x 100 B / Apache Iggy", 2, "batches-100", "ours", "iggy")


def _consumed() -> Iterator[Goal]:
    yield ratio("objects consumed, 100 B / Kafka's tool", 2.5, "consume-100", "objects", "kafka")
    yield ratio(
        "objects consumed, 100 B / confluent-kafka-python",
        20,
        "consume-100",
        "objects",
        "confluent",
    )
    yield ratio("Arrow consumed, 100 B / Kafka's tool", 8, "consume-100", "arrow", "kafka")
    yield Goal(
        "Arrow consumed, 1,000 B",
        " GB/s",
        2,
        True,
        lambda of: of("consume-1000", "arrow") * 1_000 / 1e9,
        "consume-1000",
    )


def _acknowledged() -> Iterator[Goal]:
    for share, beyond in (("p50", 150), ("p99", 300)):
        yield _most(
            f"ack acks=1 over tcp, {share}, beyond the raw round trip",
            " us",
            beyond,
            "ack-1",
            _beyond("pipe", share),
        )
    yield _most(
        "ack synced, p50, beyond acks=1 and fdatasync alone", " us", 100, "ack-all", _synced
    )
    for acks, bounds in (("1", (1, 5)), ("all", (2, 10))):
        row = f"singles-{acks}-linger-0"
        for rate in RATES:
            for share, bound in zip(("p50", "p99"), bounds, strict=True):
                yield _most(
                    f"single sends at {rate}, linger 0, acks={acks}, {share}",
                    " ms",
                    bound,
                    row,
                    _figure(row, "ours", f"{rate} {share}"),
                )


def _end_to_end() -> Iterator[Goal]:
    yield _most(
        "end to end at 20 MB/s, p99", " ms", 4, "end-to-end", _figure("end-to-end", "ours", "p99")
    )
    yield _most(
        "end to end at 20 MB/s, p99.9",
        " ms",
        10,
        "end-to-end",
        _figure("end-to-end", "ours", "p99.9"),
    )


def _cpu_and_memory() -> Iterator[Goal]:
    yield _most(
        "CPU of a 65 KB batch, acks=1, all processes",
        " us",
        300,
        "cpu-65k",
        _figure("cpu-65k", "ours", "acks=1"),
    )
    yield _most("start to first ack", " ms", 341, "start", _figure("start", "ours", "ms"))
    yield _most("PSS of all processes", " MB", 72, "start", _figure("start", "ours", "MB"))
    yield _most("idle CPU", " %", 0.16, "start", _figure("start", "ours", "% idle"))


def _transactions() -> Iterator[Goal]:
    """Against Kafka as it is, whose coordinator's log is not synced."""
    name = "in transactions of 100 ms / Kafka's"
    yield ratio(f"send() 100 B {name}", 4, "transactions-send", "ours", "kafka")
    row = "transactions-latency"
    for label, bounds in (("commit", (2.5, 6)), ("begin to committed", (4, 10))):
        for share, bound in zip(("p50", "p99"), bounds, strict=True):
            figure = _figure(row, "ours", f"{label} {share}")
            yield _most(f"one record, synced: {label}, {share}", " ms", bound, row, figure)
    row = "transactions-commits"
    yield Goal(
        "commits of 50 producers of one process, a second", "", 5_000, True,
        _figure(row, "ours", ""), row,
    )  # fmt: skip
    yield ratio(f"transform 1,000 B {name}", 4, "transactions-transform", "ours", "kafka")


def _figure(row: str, contender: str, label: str) -> Callable[[Of], float]:
    return lambda of: of(row, contender, label)


def _beyond(raw: str, label: str) -> Callable[[Of], float]:
    return lambda of: of("ack-1", "ours", label) - of("ack-1", raw, label)


def _synced(of: Of) -> float:
    return of("ack-all", "ours", "p50") - of("ack-1", "ours", "p50") - of("ack-all", "sync", "p50")


def outcome(goal: Goal, values: Values) -> Outcome:
    """Outcome of what was measured so far."""
    needed: list[list[float]] = []

    def median(row: str, contender: str, label: str = "") -> float:
        needed.append(values[row, contender, label])
        return statistics.median(needed[-1])

    def of_round(number: int) -> Of:
        return lambda row, contender, label="": values[row, contender, label][number]

    try:
        value = goal.formula(median)
    except KeyError:
        return Outcome(goal, None, 0.0, 0.0)
    each = [goal.formula(of_round(number)) for number in range(min(map(len, needed)))]
    return Outcome(goal, value, min(each), max(each))
