"""Whatever expires in the process of groups, with the wall clock moved by years, both ways, and the
process restarted between: nothing goes early or late.
"""

from __future__ import annotations

import pathlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.limits import GroupLimits
from appliance.groups.consumer.offset_expiry import EMPTY_KEPT_MS
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import SCHEMA_VERSION
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import SECOND_NS, Bench, FakeTopics

GOLDEN = pathlib.Path(__file__).parents[2] / "golden/groups_v1.sql"
DAY_S = 86_400
YEAR_US = 365 * DAY_S * 1_000_000
RETENTION_S = 3_600
JUMPS = [8 * DAY_S * 1_000_000, 10 * YEAR_US, -8 * DAY_S * 1_000_000, -10 * YEAR_US]
LOCK_S, SESSION_S = 600, 1_200
SLACK_S = 130
"""Two sweeps."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    topics = FakeTopics()
    topics.create("jobs", 1, group_share_record_lock_duration_ms=LOCK_S * 1_000)
    topics.create("orders", 1)
    found = Bench(
        tmp_path, topics, GroupLimits(offsets_retention_minutes=RETENTION_S // 60), with_share=True
    )
    found.topics.set("jobs", group_share_record_lock_duration_ms=LOCK_S * 1_000)
    yield found
    found.close()


class Everything:
    """One of each thing that expires, made at one moment."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        bench.ask(Api.COMMIT_OFFSETS, group="committed", offsets=[["orders", 0, 5, -1, ""]])
        self.join("console", "consumer", "orders")
        self.leave("console", "consumer")
        self.join("queue", "share", "jobs", member="gone")
        bench.ask(Api.SHARE_ACQUIRE, group="queue", member_id="gone", member_epoch=1, max_records=5)
        self.leave("queue", "share", "gone")
        self.join("silent", "consumer", "orders")
        self.join("locks", "share", "jobs", member="silent")
        acquired = bench.ask(
            Api.SHARE_ACQUIRE, group="locks", member_id="silent", member_epoch=1, max_records=5
        )
        assert acquired["acquired"]

    def join(self, group: str, kind: str, topic: str, member: str = "m") -> None:
        more: dict[str, Any] = {"offset_reset": "earliest"} if kind == "share" else {}
        self.bench.ask(
            Api.GROUP_HEARTBEAT, group=group, kind=kind, member_id=member, member_epoch=0,
            topics=[topic], session_timeout_ms=SESSION_S * 1_000,
            **more,
        )  # fmt: skip

    def leave(self, group: str, kind: str, member: str = "m") -> None:
        self.bench.ask(
            Api.GROUP_HEARTBEAT, group=group, kind=kind, member_id=member, member_epoch=-1
        )

    def left(self) -> set[str]:
        """Offsets that have not expired."""
        found = set()
        for group in ("committed", "console", "queue"):
            if self.bench.service.summary(group) is not None:
                found.add(group)
        for group in ("silent", "locks"):
            summary = self.bench.service.summary(group)
            if summary is not None and summary["members"]:
                found.add(f"member of {group}")
        try:
            described = self.bench.ask(Api.DESCRIBE_GROUP, group="locks", part="partitions")
        except TailraceError:
            return found
        if any(row["acquired"] for row in described["partitions"]):
            found.add("lock")
        return found


ALL = {"committed", "console", "queue", "member of silent", "member of locks", "lock"}
EXPIRES_S = {
    "committed": RETENTION_S, "console": EMPTY_KEPT_MS // 1_000, "queue": RETENTION_S,
    "member of silent": SESSION_S, "member of locks": SESSION_S,
    "lock": LOCK_S,
}  # fmt: skip


@pytest.mark.parametrize("jump_us", JUMPS)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_nothing_expires_early_or_late_when_the_wall_clock_jumps(
    bench: Bench, jump_us: int, is_restarted: bool
) -> None:
    everything = Everything(bench)
    assert everything.left() == ALL
    started_ns = bench.now_ns
    bench.clock_ahead_us = jump_us
    if is_restarted:  # members' sessions and locks begin anew then, at once
        bench.restart()
    for passed_s in sorted({*EXPIRES_S.values()}):
        bench.wait((started_ns + (passed_s - 1) * SECOND_NS - bench.now_ns) / SECOND_NS)
        early = {name for name, at_s in EXPIRES_S.items() if at_s >= passed_s} - everything.left()
        assert not early, "too early"
        bench.wait(SLACK_S)
        late = {name for name, at_s in EXPIRES_S.items() if at_s <= passed_s} & everything.left()
        assert not late, "too late"


@pytest.mark.parametrize("jump_us", JUMPS)
def test_what_is_made_after_a_jump_expires_as_soon_as_any_other(bench: Bench, jump_us: int) -> None:
    bench.clock_ahead_us = jump_us
    everything = Everything(bench)
    bench.clock_ahead_us = 0
    bench.restart()
    bench.wait(RETENTION_S - 1)
    assert everything.left() >= {"committed", "queue"}
    bench.wait(SLACK_S)
    assert not everything.left()


def test_time_that_passes_while_the_process_is_away_counts(bench: Bench) -> None:
    everything = Everything(bench)
    bench.now_ns += (RETENTION_S + 1) * SECOND_NS
    bench.restart()
    bench.wait(SLACK_S)
    assert not {"committed", "console", "queue"} & everything.left()


def test_a_database_of_the_version_before_is_read_and_its_groups_expire_from_now_on(
    tmp_path: Path,
) -> None:
    with sqlite3.connect(tmp_path / "groups.db") as database:
        database.executescript(GOLDEN.read_text())
    database.close()
    topics = FakeTopics(orders=4)
    bench = Bench(
        tmp_path, topics, GroupLimits(offsets_retention_minutes=RETENTION_S // 60), with_share=True
    )
    assert bench.store.read("SELECT value FROM meta WHERE name = 'schema_version'") == [
        (SCHEMA_VERSION,)
    ]
    assert bench.offset("nightly", "orders", 0) == 5
    [row] = bench.ask(Api.DESCRIBE_GROUP, group="workers", part="partitions")["partitions"]
    assert (row["start_offset"], row["next_offset"], row["in_flight"]) == (3, 7, 2)
    bench.wait(RETENTION_S - 61)
    bench.restart()
    assert bench.service.summary("nightly") is not None
    assert bench.service.summary("workers") is not None
    bench.wait(SLACK_S + 61)
    assert bench.service.summary("nightly") is None
    assert bench.service.summary("workers") is None
    bench.close()
    GroupStore(str(bench.path)).close()


def test_groups_of_a_database_of_the_version_before_begin_a_topic_that_is_made_again_at_its_first_record(  # noqa: E501
    tmp_path: Path,
) -> None:
    with sqlite3.connect(tmp_path / "groups.db") as database:
        database.executescript(GOLDEN.read_text())
    database.close()
    bench = Bench(tmp_path, FakeTopics(orders=1), with_share=True)
    bench.topics.delete("orders")
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()
    bench.restart()
    topic_id = bench.topics.create("orders", 1)
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()
    assert bench.offset("nightly", "orders", 0) == 0
    answer = bench.ask(
        Api.GROUP_HEARTBEAT,
        group="workers",
        kind="share",
        member_id="m",
        member_epoch=0,
        topics=["orders"],
    )
    found = bench.ask(
        Api.SHARE_ACQUIRE,
        group="workers",
        member_id="m",
        member_epoch=answer["member_epoch"],
        max_records=2,
    )
    assert found["acquired"] == [[topic_id, 0, 0, 1, 1]]
    bench.close()
