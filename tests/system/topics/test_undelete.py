"""A deleted topic stays in the bin and comes back with what it had, whatever is killed."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import pathlib
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from shm.crash_points import CRASH_POINT_VARIABLE
from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.aio import AsyncAdmin
from tailrace.core.errors import (
    InvalidRequestError,
    StorageError,
    TailraceError,
    TopicExistsError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.topics import read_all
from tests.kit.cli import run
from tests.kit.hosts.file_systems import fill_to_the_byte, small_file_system
from tests.kit.processes import HANG_LIMIT_S, comm, wait_until

KEPT: dict[str, Any] = {"topic.delete.retention.ms": "3600000"}


@contextmanager
def running(directory: pathlib.Path, **settings: Any) -> Iterator[EmbeddedAppliance]:
    appliance = start_embedded(data_dir=str(directory / "data"), settings={**KEPT, **settings})
    try:
        yield appliance
    finally:
        appliance.stop()


def make(admin: Admin, topic: str, partitions: int = 1, **configs: str) -> str:
    """Returns the topic's id."""
    settings = {name.replace("_", "."): value for name, value in configs.items()}
    admin.create_topics(NewTopic(topic, partitions, settings))
    return str(admin.describe_topics(topic)[topic]["topic_id"])


def send(appliance: EmbeddedAppliance, topic: str, *values: bytes) -> None:
    with Producer(appliance.address) as producer:
        for value in values:
            producer.send(topic, value, partition=0).result(HANG_LIMIT_S)


def values(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes | None]:
    return [record.value for record in read_all(appliance, topic, count)]


def in_bin(appliance: EmbeddedAppliance, directory: str | None = None) -> list[str]:
    path = f"{directory or appliance.data_dir}/bin"
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAppliance]:
    with running(tmp_path_factory.mktemp("undelete")) as appliance:
        yield appliance


@pytest.fixture
def admin(kept: EmbeddedAppliance) -> Iterator[Admin]:
    with Admin(kept.address) as it:
        yield it


def test_records_come_back_with_keys_headers_offsets_and_settings(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    topic_id = make(admin, topic, 2, retention_ms="777777")
    with Producer(kept.address) as producer:
        for number in range(20):
            producer.send(
                topic, b"v%d" % number, b"k%d" % number, partition=number % 2,
                headers=[("n", b"%d" % number)],
            )  # fmt: skip
    before = read_all(kept, topic, 20)
    admin.delete_topics(topic)
    with pytest.raises(UnknownTopicError):
        admin.describe_topics(topic)
    assert topic not in admin.list_topics()
    [listed] = [each for each in admin.list_deleted_topics() if each["topic_id"] == topic_id]
    assert (listed["name"], listed["partitions"], listed["state"]) == (topic, 2, "kept")
    assert listed["bytes"] > 0
    assert 0 < listed["left_ms"] <= 3_600_000
    assert {f"{topic_id}-0", f"{topic_id}-1"} <= set(in_bin(kept))
    assert admin.undelete_topic(topic) == topic
    described = admin.describe_topics(topic)[topic]
    assert described["topic_id"] == topic_id
    assert described["configs"]["retention.ms"] == 777777
    order = lambda record: (record.partition, record.offset)  # noqa: E731
    assert sorted(read_all(kept, topic, 20), key=order) == sorted(before, key=order)
    assert not [name for name in in_bin(kept) if name.startswith(topic_id)]
    with Producer(kept.address) as producer:
        assert producer.send(topic, b"next", partition=0).result(HANG_LIMIT_S).offset == 10


def test_delayed_records_come_back_and_are_delivered_under_another_name(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    make(admin, topic, delay_enabled="true")
    with Producer(kept.address) as producer:
        producer.send(topic, b"now").result(HANG_LIMIT_S)
        later = producer.send(topic, b"later", deliver_after=dt.timedelta(hours=1))
        assert later.result(HANG_LIMIT_S).delay_id
    admin.delete_topics(topic)
    back = f"{topic}-back"
    assert admin.undelete_topic(topic, back) == back
    [pending] = admin.list_delays(back)
    admin.reschedule_delays({pending.delay_id: dt.datetime.now(dt.UTC)})
    assert values(kept, back, 2) == [b"now", b"later"]


def test_a_group_goes_on_at_its_committed_offsets(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    make(admin, topic)
    send(kept, topic, b"a", b"b", b"c")
    key = TopicPartition(topic, 0)
    admin.alter_group_offsets(f"{topic}-group", {key: 2})
    admin.delete_topics(topic)
    assert not admin.list_group_offsets(f"{topic}-group")
    admin.undelete_topic(topic)
    committed = admin.list_group_offsets(f"{topic}-group")[key]
    assert committed is not None
    assert committed.offset == 2
    with Consumer(topic, bootstrap=kept.address, group_id=f"{topic}-group") as consumer:
        assert [record.value for record in consumer.poll(HANG_LIMIT_S * 1000)] == [b"c"]


def test_a_queue_goes_on_behind_what_was_acknowledged(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    make(admin, topic)
    send(kept, topic, b"a", b"b")
    with ShareConsumer(topic, bootstrap=kept.address, group_id=f"{topic}-queue",
                       auto_offset_reset="earliest") as consumer:  # fmt: skip
        taken = consumer.poll(HANG_LIMIT_S * 1000, 1)
        consumer.acknowledge(taken[0], "accept")
        consumer.commit()
    admin.delete_topics(topic)
    admin.undelete_topic(topic)
    with ShareConsumer(topic, bootstrap=kept.address, group_id=f"{topic}-queue") as consumer:
        assert [record.value for record in consumer.poll(HANG_LIMIT_S * 1000)] == [b"b"]


def test_committed_transactions_come_back_and_open_ones_are_aborted(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    other = f"{topic}-other"
    make(admin, topic)
    make(admin, other)
    with Producer(kept.address, transactional_id=topic) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(topic, b"committed")
        producer.begin_transaction()
        producer.send(other, b"kept").result(HANG_LIMIT_S)
        producer.send(topic, b"open").result(HANG_LIMIT_S)
        admin.delete_topics(topic)
        producer.commit_transaction()
        assert values(kept, other, 1) == [b"kept"]
        admin.undelete_topic(topic)
        with producer.transaction():
            producer.send(topic, b"after")
    assert values(kept, topic, 2) == [b"committed", b"after"]
    [partition] = admin.describe_topics(topic)[topic]["partitions"]
    assert "last_stable_offset" not in partition  # nothing is open


def test_a_taken_name_is_refused_and_another_one_offered(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    topic_id = make(admin, topic)
    send(kept, topic, b"old")
    admin.delete_topics(topic)
    make(admin, topic)
    with pytest.raises(TopicExistsError, match=f"undelete {topic_id} --as NEWNAME"):
        admin.undelete_topic(topic)
    assert admin.undelete_topic(topic_id, f"{topic}-old") == f"{topic}-old"
    assert values(kept, f"{topic}-old", 1) == [b"old"]


def test_two_deletions_of_one_name_are_separated_by_id(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    ids = []
    for value in (b"first", b"second"):
        ids.append(make(admin, topic))
        send(kept, topic, value)
        admin.delete_topics(topic)
    for ask in (admin.undelete_topic, admin.purge_topic):
        with pytest.raises(InvalidRequestError, match=ids[0]):
            ask(topic)
    admin.purge_topic(ids[1])
    admin.undelete_topic(topic)
    assert values(kept, topic, 1) == [b"first"]


def test_a_purge_and_a_deletion_with_now_free_the_space_at_once(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    topic_id = make(admin, topic, delay_enabled="true")
    send(kept, topic, b"x" * 1000)
    admin.alter_group_offsets(f"{topic}-group", {TopicPartition(topic, 0): 1})
    admin.delete_topics(topic)
    assert admin.purge_topic(topic) > 0
    assert not [name for name in in_bin(kept) if name.startswith(topic_id)]
    with pytest.raises(UnknownTopicError, match="list --deleted"):
        admin.undelete_topic(topic)
    before = in_bin(kept)
    make(admin, topic)
    admin.delete_topics(topic, now=True)
    assert in_bin(kept) == before
    assert topic not in str(admin.list_deleted_topics())
    with contextlib.closing(sqlite3.connect(f"{kept.data_dir}/groups.db")) as groups:
        query = "SELECT count(*) FROM offsets WHERE topic_id = ?"
        wait_until(
            lambda: groups.execute(query, (topic_id,)).fetchone() == (0,), "its offsets are gone"
        )


def test_the_command_line_lists_brings_back_and_purges(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    topic_id = make(admin, topic)
    back = f"{topic}-back"
    shown = run(kept, "topic", "delete", topic, "--yes").stderr.decode()
    assert f"within 1 h: tailrace topic undelete {topic}" in shown
    listed = json.loads(run(kept, "topic", "list", "--deleted", "--json").stdout)
    assert topic_id in [each["topic_id"] for each in listed]
    assert topic_id in run(kept, "topic", "list", "--deleted").stdout.decode()
    assert "topic list --deleted" in run(kept, "status").stdout.decode()
    done = run(kept, "topic", "undelete", topic_id, "--as", back, "--json")
    assert json.loads(done.stdout) == {"undeleted": back}
    refused = run(kept, "topic", "delete", back, status=2).stderr.decode()
    assert "it can be undone for 1 h" in refused
    deleted = json.loads(run(kept, "topic", "delete", back, "--yes", "--json").stdout)
    assert deleted == {"deleted": back, "kept_ms": 3_600_000}
    assert "confirm with --yes" in run(kept, "topic", "purge", back, status=2).stderr.decode()
    assert f"removed {back} for good" in run(kept, "topic", "purge", back, "--yes").stderr.decode()
    other = f"{topic}-other"
    make(admin, other)
    admin.delete_topics(other)
    for command in (("undelete", back), ("purge", back, "--yes")):
        refused = run(kept, "topic", *command, status=1).stderr.decode()
        assert f"there is no deleted topic {back!r}. Those that can come back: " in refused
        assert other in refused
        assert "topic create" not in refused


def test_a_coroutine_lists_brings_back_and_purges(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    async def body() -> None:
        async with AsyncAdmin(kept.address) as client:
            await client.delete_topics(topic)
            assert topic in [each["name"] for each in await client.list_deleted_topics()]
            assert await client.undelete_topic(topic) == topic
            await client.delete_topics(topic)
            assert await client.purge_topic(topic) >= 0

    make(admin, topic)
    asyncio.run(body())


def test_a_missing_partition_is_said_and_not_made_empty(
    kept: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    topic_id = make(admin, topic, 2)
    send(kept, topic, b"x")
    admin.delete_topics(topic)
    os.rename(f"{kept.data_dir}/bin/{topic_id}-1", f"{kept.data_dir}/elsewhere")
    with pytest.raises(StorageError, match=f"{topic_id}-1 is missing"):
        admin.undelete_topic(topic)
    os.rename(f"{kept.data_dir}/elsewhere", f"{kept.data_dir}/bin/{topic_id}-1")
    admin.undelete_topic(topic)
    assert values(kept, topic, 1) == [b"x"]


def test_a_kept_topic_expires_by_the_retention_of_its_deletion(tmp_path: pathlib.Path) -> None:
    with (
        running(tmp_path, **{"topic.delete.retention.ms": "1"}) as appliance,
        Admin(appliance.address) as admin,
    ):
        make(admin, "t")
        admin.delete_topics("t")
        wait_until(lambda: not admin.list_deleted_topics(), "it has expired")
        assert in_bin(appliance) == []


def test_two_data_directories_and_a_kill_of_everything(tmp_path: pathlib.Path) -> None:
    dirs = [str(tmp_path / name) for name in ("data", "other")]
    settings = {"data_dirs": ",".join(dirs)}
    with running(tmp_path, **settings) as appliance:
        with Admin(appliance.address) as admin:
            topic_id = make(admin, "t", 2)
            with Producer(appliance.address) as producer:
                for partition in range(2):
                    producer.send("t", b"%d" % partition, partition=partition).result(60)
            admin.delete_topics("t")
        assert [in_bin(appliance, path) for path in dirs] in (
            [[f"{topic_id}-0"], [f"{topic_id}-1"]],
            [[f"{topic_id}-1"], [f"{topic_id}-0"]],
        )
        kill_all(appliance)
    with running(tmp_path, **settings) as appliance, Admin(appliance.address) as admin:
        admin.undelete_topic("t")
        assert sorted(map(str, values(appliance, "t", 2))) == ["b'0'", "b'1'"]


def kill_all(appliance: EmbeddedAppliance) -> None:
    supervisor = psutil.Process(appliance.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes[1:], timeout=HANG_LIMIT_S)


def test_a_lost_catalog_finds_deleted_topics_in_the_bin(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as appliance, Admin(appliance.address) as admin:
        make(admin, "t", 2, delay_enabled="true")
        send(appliance, "t", b"x")
        admin.delete_topics("t")
        make(admin, "u")
    for name in ("coordinator.db", "coordinator.db-wal", "coordinator.db-shm"):
        (tmp_path / "data" / name).unlink(missing_ok=True)
    with running(tmp_path) as appliance, Admin(appliance.address) as admin:
        assert admin.list_topics() == ["u"]
        [deleted] = admin.list_deleted_topics()
        assert (deleted["name"], deleted["partitions"]) == ("t", 2)
        admin.undelete_topic("t")
        assert values(appliance, "t", 1) == [b"x"]


STEPS = [
    ("controller.after_decision:2", "delete"), ("controller.after_apply:2", "delete"),
    ("flusher.in_bin:1", "delete"), ("flusher.in_bin:2", "delete"),
    ("controller.after_decision:3", "undelete"), ("controller.after_apply:3", "undelete"),
    ("flusher.in_undelete:1", "undelete"), ("flusher.in_undelete:2", "undelete"),
    ("flusher.in_purge:1", "purge"), ("flusher.in_purge:2", "purge"),
]  # fmt: skip
"""A visit of a crash point, and the change that comes to it. The first visits of the controller's
are those of the topic's creation.
"""
QUICK = ("flusher.in_bin:1", "flusher.in_undelete:2", "flusher.in_purge:1")


@contextmanager
def armed(directory: pathlib.Path, point: str) -> Iterator[tuple[psutil.Process, str]]:
    """The supervisor and the address of an appliance with a crash point."""
    address = f"ipc://{directory}/s"
    running = subprocess.Popen(
        [sys.executable, "-P", "-m", "appliance.supervise.supervisor", "--data-dir",
        str(directory / "data"), "--listen", address, "--set", "ring_bytes=16777216",
        "--set", "topic.delete.retention.ms=1h"],
        env={**os.environ, CRASH_POINT_VARIABLE: point}, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield psutil.Process(running.pid), address
    finally:
        running.kill()
        running.wait()


def prepare(address: str, change: str) -> Callable[[], object]:
    """Bring a topic to where `change` begins. Returns the change, which a kill may interrupt."""
    with Admin(address) as admin:
        make(admin, "t", 2)
        with Producer(address) as producer:
            for partition in range(2):
                producer.send("t", b"x", partition=partition).result(HANG_LIMIT_S)
        if change != "delete":
            admin.delete_topics("t")

    def interrupted() -> None:
        # without an answer the change is carried out all the same
        with (
            Admin(address, request_timeout_ms=3000, connect_timeout_ms=3000) as admin,
            contextlib.suppress(TailraceError),
        ):
            if change == "delete":
                admin.delete_topics("t")
            elif change == "undelete":
                admin.undelete_topic("t", "u")
            else:
                admin.purge_topic("t")

    return interrupted


def check_done(admin: Admin, address: str, data: pathlib.Path, change: str) -> None:
    """The change is carried out, wholly."""
    expected = (["u"] if change == "undelete" else [], ["t"] if change == "delete" else [])

    def state() -> tuple[list[str], list[Any]]:
        return admin.list_topics(), [each["name"] for each in admin.list_deleted_topics()]

    wait_until(lambda: state() == expected, f"{change} is carried out")
    assert len(os.listdir(data / "bin")) == (2 if change == "delete" else 0)
    if change == "delete":
        admin.undelete_topic("t", "u")
    if change != "purge":
        with Consumer("u", bootstrap=address, auto_offset_reset="earliest") as consumer:
            found: list[Any] = []
            while len(found) < 2:
                found += [record.partition for record in consumer.poll(HANG_LIMIT_S * 1000)]
        assert sorted(found) == [0, 1]


@pytest.mark.parametrize(
    ("point", "change"),
    [pytest.param(*each, marks=() if each[0] in QUICK else pytest.mark.long) for each in STEPS],
)
def test_a_process_killed_at_a_step_is_followed_by_one_that_finishes_it(
    tmp_path: pathlib.Path, point: str, change: str
) -> None:
    with armed(tmp_path, point) as (_, address):
        prepare(address, change)()
        with Admin(address) as admin:
            check_done(admin, address, tmp_path / "data", change)
            killed = [p["name"] for p in admin.describe_cluster()["processes"] if p["restarts"]]
            assert killed == ["controller" if point.startswith("controller") else "flusher-0"], (
                killed
            )


@pytest.mark.parametrize(
    ("point", "change"),
    [pytest.param(*each, marks=() if each[0] in QUICK[:2] else pytest.mark.long) for each in STEPS],
)
def test_an_appliance_killed_at_a_step_finishes_it_at_its_next_start(
    tmp_path: pathlib.Path, point: str, change: str
) -> None:
    name = "tr-controller" if point.startswith("controller") else "tr-flusher-0"
    with armed(tmp_path, point) as (supervisor, address):
        interrupted = prepare(address, change)
        [victim] = [each for each in supervisor.children() if comm(each.pid).startswith(name)]
        supervisor.suspend()  # it starts no other
        changing = threading.Thread(target=interrupted)
        changing.start()
        wait_until(lambda: victim.status() == psutil.STATUS_ZOMBIE, "it is killed")
        others = supervisor.children(recursive=True)
        for process in [*others, supervisor]:
            process.kill()
        psutil.wait_procs(others, timeout=HANG_LIMIT_S)
    with running(tmp_path) as appliance, Admin(appliance.address) as admin:
        check_done(admin, appliance.address, tmp_path / "data", change)
        changing.join(HANG_LIMIT_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_fills_gives_up_the_bin_before_it_refuses_records(
    tmp_path: pathlib.Path,
) -> None:
    with small_file_system(tmp_path, 96) as disk:
        settings = {**KEPT, "ring_bytes": 1 << 20, "disk_reserve_bytes": 4 << 20}
        settings |= {"journal_bytes": 1 << 20}
        appliance = start_embedded(data_dir=str(disk / "data"), settings=settings)
        try:
            with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
                for name in ("old", "new", "live"):
                    make(admin, name)
                for name in ("old", "new"):
                    for _ in range(50):
                        producer.send(name, os.urandom(200_000)).result(HANG_LIMIT_S)
                    admin.delete_topics(name)
                cluster = admin.describe_cluster()["bin"]
                assert (cluster["topics"], cluster["oldest"]) == (2, "old")
                assert cluster["bytes"] >= 20_000_000
                kept = ["old", "new"]
                while "old" in kept:  # no send is refused
                    producer.send("live", os.urandom(200_000)).result(HANG_LIMIT_S)
                    kept = [each["name"] for each in admin.list_deleted_topics()]
                assert kept == ["new"]
                fill_to_the_byte(disk / "filler")
                wait_until(lambda: not admin.list_deleted_topics(), "the bin is empty")
        finally:
            appliance.stop()


@pytest.mark.long
def test_a_thousand_partitions_come_back(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as appliance, Admin(appliance.address) as admin:
        make(admin, "t", 1000)
        with Producer(appliance.address) as producer:
            for partition in range(0, 1000, 100):
                producer.send("t", b"%d" % partition, partition=partition)
        admin.delete_topics("t")
        assert len(in_bin(appliance)) == 1000
        admin.undelete_topic("t")
        assert in_bin(appliance) == []
        assert len(values(appliance, "t", 10)) == 10
