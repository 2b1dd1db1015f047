"""The switch: it is refused while something is left behind, and a stop before its end undoes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from appliance.migrate import migration as module
from appliance.migrate.clusters.kafka_client import TopicDescription
from appliance.migrate.errors import MigrationError
from appliance.migrate.migration import Migration, Options
from appliance.migrate.session import Session
from appliance.migrate.topic_settings import Mapped
from tailrace.core.topic_partition import TopicPartition
from tests.appliance.migrate.kit import Source, Target

QUIET_STEPS = 3


class SourceHouse:
    """A cluster with one topic and one group."""

    def topic_names(self) -> dict[str, int]:
        return {"orders": 1}

    def describe(self, names: Any) -> dict[str, TopicDescription]:
        return {name: TopicDescription(name, "id", 1, {}) for name in names}

    def groups(self) -> list[str]:
        return ["billing"]

    def offsets(self, group: str) -> dict[TopicPartition, tuple[int, str]]:
        del group
        return {TopicPartition("orders", 0): (10, "")}

    def member_count(self, group: str) -> int:
        del group
        return 0


class TargetHouse(Target):
    """A target with topics and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.group_offsets: list[int] = []

    def topics(self) -> dict[str, int]:
        return {"orders": 1} if self.journal else {}

    def refusal_of(self, *_: Any) -> str:
        return ""

    def create(self, *_: Any) -> None:
        pass

    def peek(self) -> list[bytes | None]:
        return self.journal

    def set_group_offsets(self, group: str, offsets: Any) -> None:
        assert group == "billing"
        self.group_offsets += [offset for offset, _ in offsets.values()]

    @property
    def is_switched(self) -> bool:
        return any(orjson.loads(each or b"")["kind"] == "switched" for each in self.journal)


class Heard:
    """Sentences of a migration."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def note(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def progress(self, session: Session, lag: int) -> None:
        pass

    def caught_up(self, session: Session) -> None:
        pass


class Switched:
    """A migration of 50 records, whose quiet seconds are a number of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.target, self.heard = Source(), TargetHouse(), Heard()
        self.source.end = 50
        self.migration = Migration(
            SourceHouse(),
            lambda _: self.source,
            cast(Any, self.target),
            lambda *_: Mapped({}, {}, []),
            Options("m", ["orders"], ["*"]),
            self.heard,
        )
        self.in_quiet: list[Any] = []
        """Called in the quiet seconds."""
        now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: now_s, time_ns=lambda: 0)
        monkeypatch.setattr(module, "time", clock)
        original = self.migration._switch

        def switch(session: Session, *rest: Any) -> None:
            step = session.step

            def counted(*given: Any) -> int:
                nonlocal now_s
                now_s += module.QUIET_S / QUIET_STEPS
                for function in self.in_quiet:
                    function()
                return step(*given)

            monkeypatch.setattr(session, "step", counted)
            original(session, *rest)

        monkeypatch.setattr(self.migration, "_switch", switch)

    def run(self, *, is_forced: bool = False) -> bool:
        return self.migration.run(switches=True, is_forced=is_forced)


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Switched:
    return Switched(monkeypatch)


def test_a_source_at_rest_is_switched(switched: Switched) -> None:
    assert switched.run()
    assert switched.target.is_switched
    assert switched.target.group_offsets == [10]
    assert "switched: the lag is zero, 1 group has its offsets" in switched.heard.sentences[-1]


def test_a_stop_in_the_quiet_seconds_switches_nothing(switched: Switched) -> None:
    switched.in_quiet.append(lambda: setattr(switched.migration, "is_stopped", True))
    assert not switched.run()
    assert not switched.target.is_switched
    assert switched.target.group_offsets == []


def test_a_partition_that_is_refused_in_the_quiet_seconds_switches_nothing(
    switched: Switched,
) -> None:
    def write_a_large_one() -> None:
        switched.target.size_max = 0
        switched.source.end = 51

    switched.in_quiet.append(write_a_large_one)
    with pytest.raises(MigrationError, match=r"the record at offset 50 of orders-0 has 3 bytes"):
        switched.run(is_forced=True)
    assert not switched.target.is_switched


def test_records_behind_an_open_transaction_refuse_the_switch(switched: Switched) -> None:
    switched.source.high_watermark = 120
    with pytest.raises(MigrationError, match=r"orders-0 \(offsets 50 to 119\).*commit or abort"):
        switched.run()
    assert not switched.target.is_switched
    switched.source.high_watermark = None
    assert switched.run()
    assert switched.target.is_switched


def test_a_forced_switch_names_the_records_that_it_leaves_behind(switched: Switched) -> None:
    switched.source.high_watermark = 120
    assert switched.run(is_forced=True)
    assert switched.target.is_switched
    assert any("orders-0 (offsets 50 to 119)" in each for each in switched.heard.sentences)
    assert "the lag is zero" not in switched.heard.sentences[-1]
