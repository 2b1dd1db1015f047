"""A coordinator.db that is missing, damaged or not what it should be: rebuilt from the partitions'
files with nothing lost, or refused with a sentence.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import sqlite3
import stat
from collections.abc import Callable
from typing import Any

import orjson
import psutil
import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import NotReachableError, TailraceError, UnknownTopicError
from tailrace.embedded_appliance import EmbeddedAppliance, embedded, start_embedded
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tests.kit.matrices import short
from tests.kit.processes import HANG_LIMIT_S, children, kill_and_wait_for_successor, wait_until

DATABASE = "coordinator.db"
RECORDS = 20


def start(directory: pathlib.Path, **settings: Any) -> EmbeddedAppliance:
    return start_embedded(data_dir=str(directory), auto_create_topics=False, settings=settings)


def fill(address: str) -> dict[str, dict[str, Any]]:
    """Topics of every kind, with records; answers what the appliance says of them."""
    with Admin(address) as admin, Producer(address, acks="all") as producer:
        admin.create_topics(
            [
                NewTopic("plain", 3, {"retention.ms": -1}),
                NewTopic("small", 1, {"max.message.bytes": 50_000, "compression.type": "lz4"}),
                NewTopic(
                    "typed", 2, schema=pa.schema([("a", pa.int32()), ("b", pa.list_(pa.utf8()))])
                ),
                NewTopic("later", 2, {"delay.enabled": True, "delay.levels": "1s 5s"}),
                NewTopic("gone", 2),
            ]
        )
        for number in range(RECORDS):
            producer.send("plain", b"%d" % number, partition=number % 3)
            producer.send("small", b"%d" % number)
            producer.send("typed", {"a": number, "b": ["x"]}, partition=number % 2)
            producer.send("later", b"%d" % number, partition=0)
            producer.send("gone", b"x")
        producer.flush()
        admin.create_partitions({"plain": 5})
        admin.alter_topics({"plain": {"segment.bytes": 1 << 20}})
        admin.delete_topics(["gone"])
        return described(admin)


def described(admin: Admin) -> dict[str, dict[str, Any]]:
    found = admin.describe_topics()
    for topic in found.values():
        for partition in topic["partitions"]:
            for name in (
                "leader_epoch",
                "bytes",
                "segments",
            ):  # they grow with each run that was not stopped cleanly, and with end marks
                del partition[name]
            for name in (
                "records",
                "last_append",
                "newest_timestamp",
            ):  # they follow from the records, which are looked at themselves
                del partition[name]
    return found


def check(address: str, expected: dict[str, dict[str, Any]]) -> None:
    with Admin(address) as admin:
        assert described(admin) == expected
        with pytest.raises(UnknownTopicError):
            admin.topic_info(["gone"])
    with Consumer("plain", bootstrap=address, auto_offset_reset="earliest") as consumer:
        seen: list[bytes] = []
        while len(seen) < RECORDS:
            seen += [record.value for record in consumer.poll(60_000)]
    assert sorted(map(int, seen)) == list(range(RECORDS))
    with Producer(address, acks="all") as producer:
        assert producer.send("plain", b"more", partition=4).result(60).offset == 0
        assert (
            producer.send("typed", {"a": 1, "b": []}, partition=1).result(60).offset == RECORDS // 2
        )


def truncated(path: pathlib.Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def with_garbage(path: pathlib.Path) -> None:
    path.write_bytes(os.urandom(8192))


def garbled_inside(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)


def another_database(path: pathlib.Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE topics (something TEXT)")
    db.commit()
    db.close()


DAMAGES: dict[str, Callable[[pathlib.Path], None]] = {
    "removed": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
    "cut in its header": lambda path: os.truncate(path, 50),
    "cut in the middle": lambda path: truncated(path, 0.5),
    "garbage": with_garbage,
    "garbage behind its first page": garbled_inside,
    "another database": another_database,
}


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[pathlib.Path, dict[str, dict[str, Any]]]:
    """A data directory of an appliance that was stopped, and what it said of its topics."""
    directory = tmp_path_factory.mktemp("served") / "data"
    running = start(directory)
    try:
        expected = fill(running.address)
    finally:
        assert running.stop() == 0
    return directory, expected


@pytest.fixture
def copy(
    served: tuple[pathlib.Path, dict[str, dict[str, Any]]], tmp_path: pathlib.Path
) -> tuple[pathlib.Path, dict[str, dict[str, Any]]]:
    directory, expected = served
    target = tmp_path / "data"
    shutil.copytree(
        directory, target, ignore=shutil.ignore_patterns("journal", "reserve")
    )  # large, and empty after a clean stop
    (target / "instance.json").unlink()  # an appliance of its own: tests run side by side
    return target, expected


@pytest.mark.parametrize("damage", short(DAMAGES, 0, 5))
def test_a_damaged_catalog_is_rebuilt_with_every_topic_and_setting(
    copy: tuple[pathlib.Path, dict[str, Any]], damage: str
) -> None:
    directory, expected = copy
    highest = max(producers_of(directory))
    DAMAGES[damage](directory / DATABASE)
    running = start(directory)
    try:
        check(running.address, expected)
        with Producer(running.address) as producer:
            assert producer.send("plain", b"x").result(60)
        said = pathlib.Path(running.log_path).read_text()
        assert "catalog_rebuilt" in said
        assert "topics=5 partitions=12" in said  # the delay log is one of them
    finally:
        assert running.stop() == 0
    assert min(producers_of(directory)) > highest
    assert [path.name for path in directory.glob(f"{DATABASE}.damaged-*[0-9]")] == (
        [] if damage == "removed" else [f"{DATABASE}.damaged-1"]
    )
    assert stat.S_IMODE((directory / DATABASE).stat().st_mode) == 0o600


def producers_of(directory: pathlib.Path) -> list[int]:
    db = sqlite3.connect(directory / DATABASE)
    try:
        return [number for (number,) in db.execute("SELECT producer_id FROM producers")]
    finally:
        db.close()


def answers(admin: Admin) -> bool:
    try:
        return bool(admin.describe_cluster())
    except TailraceError:
        return False


def test_a_catalog_removed_while_everything_runs_is_rebuilt_for_the_processes_that_run(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path / "data")
    try:
        expected = fill(running.address)
        with Producer(running.address, acks="all") as producer:
            producer.send("later", b"before", partition=1).result(60)
            for path in (tmp_path / "data").glob(f"{DATABASE}*"):
                path.unlink()
            kill_and_wait_for_successor(running, "tr-controller-0")
            assert producer.send("later", b"after", partition=1).result(60).offset == 1
        with Admin(running.address) as admin:
            wait_until(lambda: answers(admin), "the successor answers")
            admin.create_topics([NewTopic("new", 4)])
            admin.delete_topics(["new"])
            now = described(admin)
            expected["later"]["partitions"][1]["end_offset"] = 2
            assert now == expected
            assert all(
                process["restarts"] <= 1 for process in admin.describe_cluster()["processes"]
            )
    finally:
        assert running.stop() == 0


def test_several_directories_with_the_catalog_in_none(tmp_path: pathlib.Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    running = start(one, data_dirs=f"{one},{two}")
    try:
        expected = fill(running.address)
    finally:
        assert running.stop() == 0
    (one / DATABASE).unlink()
    running = start(two, data_dirs=f"{two},{one}")
    try:
        check(running.address, expected)
    finally:
        assert running.stop() == 0


def refusal(directory: pathlib.Path, **settings: Any) -> str:
    with pytest.raises(NotReachableError, match=r"exit code 73") as caught:
        start(directory, **settings)
    return caught.value.detail


def a_link(path: pathlib.Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_directory(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def a_later_version(path: pathlib.Path) -> None:
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = 99 WHERE name = 'schema_version'")
    db.commit()
    db.close()


@pytest.mark.parametrize(
    ("bend", "sentence"),
    [(a_link, "symbolic link"), (a_directory, "is a directory"), (a_later_version, "version 99")],
)
def test_what_is_no_plain_file_of_this_version_is_refused_by_its_place(
    copy: tuple[pathlib.Path, dict[str, Any]], bend: Callable[[pathlib.Path], None], sentence: str
) -> None:
    directory, _ = copy
    bend(directory / DATABASE)
    said = refusal(directory)
    assert sentence in said
    assert str(directory / DATABASE) in said


def test_a_catalog_that_others_could_read_is_closed_to_them(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    for mode in (0o600, 0o644):
        with embedded(data_dir=str(directory)) as running, Admin(running.address) as admin:
            admin.create_topics([NewTopic(f"t{mode}")])
            assert {
                stat.S_IMODE(path.stat().st_mode) for path in directory.glob(f"{DATABASE}*")
            } == {0o600}
        os.chmod(directory / DATABASE, 0o644)


def test_a_missing_partition_is_named_and_made_empty_only_when_an_empty_directory_says_so(
    copy: tuple[pathlib.Path, dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    directory, expected = copy
    (directory / DATABASE).unlink()
    (directory / "plain-1").rename(tmp_path / "lost")
    assert "plain-1" in refusal(directory)
    (directory / "plain-1").mkdir()
    running = start(directory)
    try:
        with Admin(running.address) as admin:
            found = described(admin)
        expected = orjson.loads(orjson.dumps(expected))
        expected["plain"]["partitions"][1]["end_offset"] = 0
        assert orjson.loads(orjson.dumps(found)) == expected
    finally:
        assert running.stop() == 0


def test_two_topics_of_one_name_are_refused_by_their_places(
    copy: tuple[pathlib.Path, dict[str, Any]],
) -> None:
    directory, _ = copy
    (directory / DATABASE).unlink()
    path = directory / "plain-2" / PARTITION_FILE
    known = PartitionMetadata.decode(path.read_bytes())
    assert known is not None
    known.topic_id = os.urandom(16)
    path.write_bytes(known.encode())
    said = refusal(directory)
    assert "plain-2" in said
    assert "one name" in said


def test_files_of_an_older_build_are_restored_to_keep_everything(
    copy: tuple[pathlib.Path, dict[str, Any]],
) -> None:
    directory, expected = copy
    (directory / DATABASE).unlink()
    for path in directory.glob(f"*/{PARTITION_FILE}"):
        known = PartitionMetadata.decode(path.read_bytes())
        assert known is not None
        known.decision = None
        path.write_bytes(known.encode())
    running = start(directory)
    try:
        with Admin(running.address) as admin:
            partitions = {name: topic["partitions"] for name, topic in expected.items()}
            wait_until(
                lambda: (
                    {name: t["partitions"] for name, t in described(admin).items()} == partitions
                ),
                "all logs are open as they were",
            )
            found = described(admin)
            assert {name: (topic["typed"], topic["schema"]) for name, topic in found.items()} == {
                name: (topic["typed"], topic["schema"]) for name, topic in expected.items()
            }
            assert all(topic["configs"]["retention.ms"] == -1 for topic in found.values())
            assert found["later"]["configs"]["delay.enabled"]
    finally:
        assert running.stop() == 0


def test_a_catalog_that_is_older_than_the_partitions_beside_it_is_made_again_from_them(
    tmp_path: pathlib.Path,
) -> None:
    directory = tmp_path / "data"
    with (
        embedded(data_dir=str(directory), auto_create_topics=False) as running,
        Admin(running.address) as admin,
    ):
        admin.create_topics([NewTopic("old"), NewTopic("new", 2)])
    db = sqlite3.connect(directory / DATABASE)
    db.execute("PRAGMA foreign_keys=ON")
    db.execute("DELETE FROM topics WHERE name = 'new'")
    db.commit()
    db.close()
    shutil.copytree(directory / "old-0", directory / "copied-0")
    with (
        embedded(data_dir=str(directory), auto_create_topics=False) as running,
        Admin(running.address) as admin,
    ):
        assert admin.list_topics() == ["new", "old"]
        said = pathlib.Path(running.log_path).read_text()
        assert "it is older than 2 partitions that are here" in said
        assert f"directories_of_no_topic count=1 first='{directory}/copied-0'" in said, (
            "what was copied there is none"
        )


def test_a_log_of_changes_that_is_lost_behind_a_kill_loses_no_topic_and_no_batch(
    tmp_path: pathlib.Path,
) -> None:
    directory = tmp_path / "data"
    running = start_embedded(data_dir=str(directory), auto_create_topics=False)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("orders")])
    os.kill(children(running)["tr-flusher-0"], signal.SIGSTOP)
    with Producer(running.address, acks=1) as producer:
        producer.send("orders", b"in memory").result(60)
    os.kill(running.pid, signal.SIGKILL)
    running.stop()
    wait_until(lambda: not children(running), "the children have died")
    (directory / f"{DATABASE}-wal").write_bytes(b"")
    with (
        embedded(data_dir=str(directory), auto_create_topics=False) as again,
        Consumer("orders", bootstrap=again.address, auto_offset_reset="earliest") as consumer,
    ):
        assert [record.value for record in consumer.poll(60_000)] == [b"in memory"]


def controller_of(running: EmbeddedAppliance) -> psutil.Process:
    return next(
        child
        for child in psutil.Process(running.pid).children()
        if child.name().startswith("tr-controller")
    )


@pytest.mark.slow_because("the controller waits for a locked catalog before it refuses a change")
def test_a_database_that_is_locked_or_breaks_while_running_is_answered_and_served_on(
    tmp_path: pathlib.Path,
) -> None:
    directory = tmp_path / "data"
    with (
        embedded(data_dir=str(directory), auto_create_topics=False) as running,
        Admin(running.address) as admin,
    ):
        admin.create_topics([NewTopic("before")])
        holder = sqlite3.connect(directory / DATABASE, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(TailraceError, match="STORAGE_ERROR"):
            admin.create_topics([NewTopic("refused", configs={"delay.enabled": True})])
        with pytest.raises(TailraceError, match="STORAGE_ERROR"):
            admin.delete_topics(["before"])
        holder.execute("ROLLBACK")
        admin.create_topics([NewTopic("refused", configs={"delay.enabled": True})])
        holder.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        holder.close()
        admin.delete_topics(["before"])
        assert admin.list_topics() == ["refused"]
        assert controller_of(running).is_running()
        assert all(process["restarts"] == 0 for process in admin.describe_cluster()["processes"])


def test_an_end_of_a_change_that_cannot_be_noted_is_noted_when_it_can(
    tmp_path: pathlib.Path,
) -> None:
    directory = tmp_path / "data"
    with (
        embedded(data_dir=str(directory), auto_create_topics=False) as running,
        Admin(running.address) as admin,
    ):
        flusher = next(
            child
            for child in psutil.Process(running.pid).children()
            if child.name().startswith("tr-flusher")
        )
        os.kill(flusher.pid, signal.SIGSTOP)  # the topic is decided, and not carried out
        with Admin(running.address, request_timeout_ms=500) as hasty, pytest.raises(TailraceError):
            hasty.create_topics([NewTopic("slow")])
        holder = sqlite3.connect(directory / DATABASE, isolation_level=None, timeout=HANG_LIMIT_S)
        holder.execute("BEGIN IMMEDIATE")
        os.kill(flusher.pid, signal.SIGCONT)
        log = pathlib.Path(running.log_path)
        wait_until(lambda: "change_not_noted" in log.read_text(), "the catalog refused")
        holder.execute("ROLLBACK")
        holder.close()
        wait_until(lambda: "slow" in admin.list_topics(), "it is tried again")
        with Producer(running.address, acks="all") as producer:
            assert producer.send("slow", b"x").result(60).offset == 0


def test_fewer_slots_than_partitions_use_are_refused_with_the_number_to_set(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("wide", 20)])
    finally:
        assert running.stop() == 0
    with pytest.raises(NotReachableError, match="slots is 16; the existing partitions need 20"):
        start(tmp_path, slots=16)
    running = start(tmp_path, slots=20)
    try:
        with Admin(running.address) as admin:
            assert len(admin.topic_info(["wide"])["wide"].partitions) == 20
    finally:
        assert running.stop() == 0
