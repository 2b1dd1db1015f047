"""Assignors of installed packages: used, and costing only their group when they are wrong."""

from __future__ import annotations

import itertools
import logging
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.assignor_plugins import ENTRY_POINTS, Assignors
from appliance.groups.base.assignors import Members, Topics
from tailrace.core.errors import UnsupportedAssignorError
from tests.appliance.groups.kit import Bench, Client, FakeTopics, settle

THIS = "tests.appliance.groups.base.test_assignor_plugins"
NOT_A_FUNCTION = 17


def all_to_the_last(members: Members, topics: Topics) -> Any:
    return {
        max(members): [
            (topic, partition) for topic, count in topics.items() for partition in range(count)
        ]
    }


def raises(members: Members, topics: Topics) -> Any:
    raise ZeroDivisionError("no member left")


def exits(members: Members, topics: Topics) -> Any:
    raise SystemExit(3)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def cannot_be_said(members: Members, topics: Topics) -> Any:
    raise UnspeakableError


def returns_a_list(members: Members, topics: Topics) -> Any:
    return [1, 2, 3]


def returns_numbers(members: Members, topics: Topics) -> Any:
    return dict.fromkeys(members, 5)


def returns_wrong_pairs(members: Members, topics: Topics) -> Any:
    return {member: [(topic, "0") for topic in topics] for member in members}


def gives_to_a_stranger(members: Members, topics: Topics) -> Any:
    return {**all_to_the_last(members, topics), "stranger": []}


def gives_twice(members: Members, topics: Topics) -> Any:
    return {member: [("orders", 0), ("orders", 1), ("orders", 2)] for member in members}


def never_ends(members: Members, topics: Topics) -> Any:
    return {member: itertools.repeat(("orders", 0)) for member in members}


def forgets_one(members: Members, topics: Topics) -> Any:
    return {
        member: partitions[1:] for member, partitions in all_to_the_last(members, topics).items()
    }


def makes_one_up(members: Members, topics: Topics) -> Any:
    return {
        member: [*partitions, ("orders", 99)]
        for member, partitions in all_to_the_last(members, topics).items()
    }


def ignores_subscriptions(members: Members, topics: Topics) -> Any:
    return {
        min(members): [
            (topic, partition) for topic, count in topics.items() for partition in range(count)
        ]
    }


def assignors(*names: str) -> Assignors:
    return Assignors(names, [EntryPoint(name, f"{THIS}:{name}", ENTRY_POINTS) for name in names])


def test_a_plugin_decides(tmp_path: Path) -> None:
    bench = Bench(tmp_path, assignors=assignors("all_to_the_last"))
    one = Client(bench, member_id="m1", assignor="all_to_the_last")
    two = Client(bench, member_id="m2", assignor="all_to_the_last")
    settle(one, two)
    assert (len(one.partitions), len(two.partitions)) == (0, 4)
    assert bench.summary("billing")["assignor"] == "all_to_the_last"
    assert bench.summary("billing")["trouble"] == ""
    bench.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ZeroDivisionError: no member left"),
        ("exits", "it raised SystemExit: 3"),
        ("cannot_be_said", "it raised UnspeakableError"),
        ("returns_a_list", "returned a list"),
        ("returns_numbers", "pairs"),
        ("returns_wrong_pairs", "pairs"),
        ("gives_to_a_stranger", "stranger"),
        ("gives_twice", "two members"),
        ("never_ends", "two members"),
        ("forgets_one", "1 partitions without a member"),
        ("makes_one_up", "orders-99"),
        ("ignores_subscriptions", "does not subscribe"),
        ("NOT_A_FUNCTION", "not callable"),
        ("there_is_no_such_thing", "AttributeError"),
    ],
)
def test_a_plugin_that_is_wrong_costs_only_its_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    bench = Bench(tmp_path, FakeTopics(orders=3, clicks=3), assignors=assignors(name))
    one = Client(bench, member_id="m1", topics=["orders"], assignor=name)
    two = Client(bench, member_id="m2", topics=["orders", "clicks"], assignor=name)
    other = Client(bench, group="other", member_id="m3")
    with caplog.at_level(logging.WARNING):
        settle(one, two, other)
    assert sorted(one.partitions + two.partitions) == [
        (topic, number) for topic in ("clicks", "orders") for number in range(3)
    ]
    trouble = bench.summary("billing")["trouble"]
    assert reason in trouble
    assert "sticky decides instead" in trouble
    assert any(
        "group=billing" in record.message and "fallback=sticky" in record.message
        for record in caplog.records
    )
    assert bench.summary("other")["trouble"] == ""
    assert len(other.partitions) == 3
    bench.restart()
    assert reason in bench.summary("billing")["trouble"], "it is known after a restart, too"
    bench.close()


def test_a_plugin_that_is_not_installed_any_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, assignors=assignors("all_to_the_last"))
    one = Client(bench, assignor="all_to_the_last")
    settle(one)
    bench._assignors = Assignors(["all_to_the_last"], ())
    bench.restart()
    bench.topics.grow("orders", 6)
    bench.service.topics_changed(bench.now_ns)
    settle(one)
    assert len(one.partitions) == 6
    assert "no longer installed" in bench.summary("billing")["trouble"]
    bench.close()


def test_members_of_a_group_name_one_assignor(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(UnsupportedAssignorError, match="range, roundrobin, sticky"):
        Client(bench, assignor="best").heartbeat()
    assert bench.service.summary("billing") is None, "a refused join makes no group"
    one = Client(bench, member_id="m1", assignor="range")
    one.heartbeat()
    with pytest.raises(UnsupportedAssignorError, match="use the assignor range"):
        Client(bench, member_id="m2", assignor="sticky").heartbeat()
    Client(bench, member_id="m3").heartbeat()
    bench.close()


def test_a_plugin_cannot_take_the_name_of_one_that_is_built_in() -> None:
    found = Assignors(["sticky"], [EntryPoint("sticky", f"{THIS}:raises", ENTRY_POINTS)])
    assert found.assign("sticky", {}, {}, "billing") == ({}, "")
