"""Topics that are deleted and made again: what lasts names the topic, not its name. Nothing of the
old one counts for the new one, which is read from its first record by groups of both kinds, present
or away; and what is known of deleted topics is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from appliance.groups.base.deleted_topics import DELETED_MAX, KEPT_MS, DeletedTopics
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client, FakeTopics, settle


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path, with_share=True)
    yield found
    found.close()


def delete(bench: Bench, name: str = "orders") -> None:
    bench.topics.delete(name)
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()


def make(bench: Bench, name: str = "orders", count: int = 4) -> str:
    topic_id = bench.topics.create(name, count)
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()
    return topic_id


def commit(bench: Bench, *entry: Any, group: str = "tool") -> list[Any]:
    found: list[Any] = bench.ask(Api.COMMIT_OFFSETS, group=group, offsets=[list(entry)])["refused"]
    return found


def fetch(bench: Bench, *place: Any, group: str = "tool") -> list[Any]:
    [found] = bench.ask(Api.FETCH_OFFSETS, group=group, partitions=[list(place)])["offsets"]
    return list(found)


# ---- committed offsets ---------------------------------------------------------------------------


def test_offsets_of_a_topic_that_was_made_again_are_refused_by_kind(bench: Bench) -> None:
    old = bench.topics.id_of("orders")
    assert commit(bench, "orders", 0, 5, -1, "", old) == []
    delete(bench)
    [refused] = commit(bench, "orders", 0, 6, -1, "", old)
    assert refused[2] == ErrorCode.UNKNOWN_TOPIC, "there is none of the name either"
    new = make(bench)
    [refused] = commit(bench, "orders", 0, 6, -1, "", old)
    assert refused[:3] == ["orders", 0, ErrorCode.UNKNOWN_TOPIC_ID]
    assert fetch(bench, "orders", 0)[5] == -1, "nothing is committed"
    assert commit(bench, "orders", 0, 7, -1, "", new) == []
    assert commit(bench, "orders", 1, 8, -1, "") == [], "a client of yesterday says the name alone"
    assert commit(bench, "orders", 2, 9, -1, "", None) == []
    assert [fetch(bench, "orders", number)[2] for number in range(3)] == [7, 8, 9]


def test_a_member_cannot_commit_in_the_new_topic_what_it_read_in_the_old_one(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    old = bench.topics.id_of("orders")
    delete(bench)
    make(bench)
    settle(one)
    assert [refused[2] for refused in one.commit(["orders", 0, 10, -1, "", old])] == [
        ErrorCode.UNKNOWN_TOPIC_ID
    ]
    assert one.commit(["orders", 0, 1, -1, "", bench.topics.id_of("orders")]) == []


@pytest.mark.parametrize("topic_id", ["", "0" * 32, "orders", "\0", "x" * 10_000])
def test_an_id_that_no_topic_has_commits_nothing(bench: Bench, topic_id: str) -> None:
    refused = commit(bench, "orders", 0, 5, -1, "", topic_id)
    assert [one[2] for one in refused] == ([ErrorCode.UNKNOWN_TOPIC_ID] if topic_id else [])


def test_an_id_of_another_topic_than_the_name_commits_nothing(bench: Bench) -> None:
    other = make(bench, "clicks")
    assert [one[2] for one in commit(bench, "orders", 0, 5, -1, "", other)] == [
        ErrorCode.UNKNOWN_TOPIC_ID
    ]


def test_what_is_asked_for_by_an_id_is_answered_for_that_topic_alone(bench: Bench) -> None:
    old = bench.topics.id_of("orders")
    commit(bench, "orders", 0, 5)
    assert fetch(bench, "orders", 0, old)[:3] == ["orders", 0, 5]
    assert fetch(bench, "orders", 0, old)[6] == old
    assert len(fetch(bench, "orders", 0)) == 6, "as version 1 has it"
    delete(bench)
    new = make(bench)
    assert fetch(bench, "orders", 0, old)[2:] == [-1, -1, "", -1, ""]
    commit(bench, "orders", 0, 2)
    assert fetch(bench, "orders", 0, old)[2:] == [-1, -1, "", -1, ""]
    assert (fetch(bench, "orders", 0, new)[2], fetch(bench, "orders", 0, new)[6]) == (2, new)


# ---- beginnings ----------------------------------------------------------------------------------


def begins(bench: Bench, group: str = "billing", partitions: int = 4) -> list[int]:
    found = bench.ask(
        Api.FETCH_OFFSETS,
        group=group,
        partitions=[["orders", number] for number in range(partitions)],
    )["offsets"]
    return [row[2] for row in found]


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_consumer_group_begins_a_topic_that_was_made_again_at_its_first_record(
    bench: Bench, is_away: bool, is_restarted: bool
) -> None:
    one = Client(bench)
    settle(one)
    assert begins(bench) == [-1] * 4
    one.commit(["orders", 0, 5])
    if is_away:
        one.leave()
    delete(bench)
    if is_restarted:
        bench.restart()
    make(bench)
    if is_restarted:
        bench.restart()
    if is_away:
        one = Client(bench, member_id="back")
    settle(one)
    assert begins(bench) == [0] * 4
    one.leave()
    two = Client(bench, member_id="two")  # the first one has committed nothing
    settle(two)
    assert begins(bench) == [0] * 4
    assert two.commit(["orders", 1, 3]) == []
    assert begins(bench) == [0, 3, 0, 0]


def test_a_group_that_was_deleted_with_the_topic_in_one_look_begins_there_too(bench: Bench) -> None:
    one = Client(bench)
    settle(one)
    bench.topics.delete("orders")
    make(bench, count=2)
    settle(one)
    assert begins(bench, partitions=2) == [0, 0]


def test_a_group_that_assigns_and_commits_begins_at_the_first_record(bench: Bench) -> None:
    commit(bench, "orders", 0, 5)
    delete(bench)
    make(bench)
    assert begins(bench, "tool") == [0] * 4
    assert begins(bench, "another") == [-1] * 4, "it never knew the old one"


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_share_group_begins_a_topic_that_was_made_again_at_its_first_record(
    bench: Bench, is_away: bool, is_restarted: bool
) -> None:
    def beat(epoch: int, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = bench.ask(
            Api.GROUP_HEARTBEAT,
            group="queue",
            kind="share",
            member_id="m",
            member_epoch=epoch,
            **more,
        )
        return found

    epoch = beat(0, topics=["orders"])["member_epoch"]
    if is_away:
        beat(-1)
    delete(bench)
    if is_restarted:
        bench.restart()
    new = make(bench, count=1)
    if is_restarted:
        bench.restart()
    if is_away:
        epoch = beat(0, topics=["orders"])["member_epoch"]
    acquired = bench.ask(
        Api.SHARE_ACQUIRE, group="queue", member_id="m", member_epoch=epoch, max_records=10
    )["acquired"]
    assert acquired == [[new, 0, 0, 9, 1]]


def test_a_share_group_that_never_knew_the_topic_begins_where_it_says(bench: Bench) -> None:
    make(bench, "clicks")
    delete(bench, "clicks")
    make(bench, "clicks", 1)
    answer = bench.ask(
        Api.GROUP_HEARTBEAT,
        group="queue",
        kind="share",
        member_id="m",
        member_epoch=0,
        topics=["clicks"],
    )
    found = bench.ask(
        Api.SHARE_ACQUIRE,
        group="queue",
        member_id="m",
        member_epoch=answer["member_epoch"],
        max_records=10,
    )
    assert found["acquired"] == []
    assert found["ends"] == [[bench.topics.id_of("clicks"), 0, 1_000]]


# ---- what is left of deleted topics --------------------------------------------------------------


def details(bench: Bench) -> dict[str, dict[str, Any]]:
    return {
        name: orjson.loads(detail)
        for name, detail in bench.store.read("SELECT name, detail FROM groups")
    }


def test_nothing_of_deleted_topics_but_their_names_is_left_in_the_rows(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(30)]
    bench = Bench(tmp_path, FakeTopics(kept=1, **dict.fromkeys(names, 2)), with_share=True)
    one = Client(bench, topics=[*names, "kept"])
    settle(one)
    for name in names:
        assert one.commit([name, 0, 5]) == []
    one.leave()
    bench.ask(
        Api.GROUP_HEARTBEAT,
        group="queue",
        kind="share",
        member_id="m",
        member_epoch=0,
        topics=[*names, "kept"],
        offset_reset="earliest",
    )
    bench.ask(Api.GROUP_HEARTBEAT, group="queue", kind="share", member_id="m", member_epoch=-1)
    gone = [bench.topics.id_of(name) for name in names]
    for name in names:
        bench.topics.delete(name)
    bench.service.topics_changed(bench.now_ns)
    bench.wait(5)
    kept = bench.topics.id_of("kept")
    for detail in details(bench).values():
        text = orjson.dumps(detail).decode()
        assert not any(topic_id in text for topic_id in gone)
        assert sorted(detail["gone"]) == sorted(names)
    assert details(bench)["queue"]["names"] == {kept: "kept"}
    assert bench.store.all_offset_topics() == []
    assert {row[0] for row in bench.store.read("SELECT topic_id FROM share_partitions")} == {kept}
    bench.close()


def test_names_of_deleted_topics_are_bounded_in_number_and_time() -> None:
    names = DeletedTopics()
    for number in range(5 * DELETED_MAX):
        names.add(f"t{number}", number)
        assert len(names) <= DELETED_MAX
    assert "t0" not in names
    assert f"t{5 * DELETED_MAX - 1}" in names
    names.add("later", 5 * DELETED_MAX - 1 + KEPT_MS)
    assert len(names) == 2, "the other one is as old as it may be"
    assert DeletedTopics(names.to_json()).to_json() == names.to_json()
