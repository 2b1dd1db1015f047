"""Partitions that move to another data directory while they are written and read."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from contextlib import suppress

import pytest

from shm.crash_points import CRASH_POINTS
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import InvalidRequestError, UnknownTopicError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.killed_directories import start
from tests.kit.appliances.moves import (
    Addressed,
    armed,
    await_removal,
    create,
    directories,
    kill_in_move,
    move,
    numbers,
    produce,
    where,
)
from tests.kit.cli import run
from tests.kit.matrices import short
from tests.kit.processes import HANG_LIMIT_S, children, wait_until

POINTS = [
    name
    for name in CRASH_POINTS
    if name.startswith("move.")
    and name not in ("move.before_going_back", "move.delays_copied")  # tested beside
]
CONTROLLERS = "move.before_decision", "move.after_decision", "move.before_opening"


@pytest.mark.slow_because("the former files are kept for 5 s, twice")
def test_a_partition_moves_while_it_is_written_and_read(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    create(appliance)
    produce(appliance, range(3_000))
    ended = threading.Event()
    acknowledged: list[int] = []
    read: list[int] = []

    def send() -> None:
        with Producer(appliance.address, linger_ms=0) as producer:
            number = 3_000
            while not ended.is_set():
                producer.send("orders", b"%d" % number, partition=0).result(HANG_LIMIT_S)
                acknowledged.append(number)
                number += 1

    def consume() -> None:
        with Consumer(
            "orders", bootstrap=appliance.address, auto_offset_reset="earliest"
        ) as consumer:
            while sender.is_alive() or not read or read[-1] != acknowledged[-1]:
                read.extend(int(r.value.rstrip(b"\0")) for r in consumer.poll(timeout_ms=100))

    sender = threading.Thread(target=send)
    threads = [sender, threading.Thread(target=consume)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(acknowledged) > 10, "records are acknowledged")
        assert where(appliance) == "data"
        assert "orders:0 is in" in move(appliance, tmp_path / "second")
        assert where(appliance) == "second"
        count = len(acknowledged)
        wait_until(lambda: len(acknowledged) > count + 100, "records are acknowledged there")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    expected = list(range(3_000 + len(acknowledged)))
    assert read == expected
    assert numbers(appliance) == expected
    await_removal(tmp_path / "data" / "orders-0")
    assert (tmp_path / "second" / "orders-0").is_dir()
    assert numbers(appliance) == expected
    move(appliance, tmp_path / "data", "--rate", "500MB")  # and back
    assert numbers(appliance) == expected
    await_removal(tmp_path / "second" / "orders-0")
    assert run(None, "log", "verify", str(tmp_path / "data"), status=None).returncode == 0


@pytest.mark.slow_because("the former files are kept for 5 s")
def test_a_topic_that_is_deleted_behind_a_move_leaves_no_files_and_keeps_no_start_back(
    tmp_path: pathlib.Path,
) -> None:
    """Its former files outlive it. A start that knew nothing of them took the catalog for older
    than the partitions, and refused to serve.
    """
    running = start(tmp_path / "data", data_dirs=directories(tmp_path))
    try:
        create(running, partitions=2)
        produce(running, range(10))
        move(running, tmp_path / "second")
        former = tmp_path / "data" / "orders-0"
        with Admin(running.address) as admin:
            admin.delete_topics("orders", now=True)
        assert former.is_dir(), "readers may need it"
        run(None, "restart", "controller", "--data-dir", running.data_dir)
        create(running, "other")
        await_removal(former)
        create(running, partitions=2)
        produce(running, range(5))
        assert numbers(running) == list(range(5))
        move(running, tmp_path / ("second" if where(running) == "data" else "data"))
        with Admin(running.address) as admin:
            admin.delete_topics("orders", now=True)
    finally:
        assert running.stop() == 0
    left = sorted(path.name for path in tmp_path.glob("*/orders-*"))
    assert len(left) == 1, "the appliance was stopped before it was removed"
    again = start(tmp_path / "data", data_dirs=directories(tmp_path))
    try:
        with Admin(again.address) as admin:
            assert admin.list_topics() == ["other"]
        for name in "data", "second":
            await_removal(tmp_path / name / "orders-0")
    finally:
        assert again.stop() == 0


@pytest.mark.slow_because("the former files are kept for 5 s, twice")
def test_a_partition_with_a_worker_of_its_own_gets_one_in_its_new_place(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path / "data", data_dirs=directories(tmp_path), dedicated_workers=2)
    try:
        create(running, worker_dedicated=True)
        produce(running, range(1_500))
        with Producer(
            running.address, transactional_id="t", transaction_timeout_ms=60_000
        ) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send("orders", b"1500", partition=0).result(HANG_LIMIT_S)
            move(running, tmp_path / "second")
            workers = {name for name in children(running) if "worker" in name}
            assert len(workers) == 4, "two common ones, two of this partition"
            producer.send("orders", b"1501", partition=0).result(HANG_LIMIT_S)
            producer.commit_transaction()
        wait_until(lambda: numbers(running) == list(range(1_502)), "it is committed")
        await_removal(tmp_path / "data" / "orders-0")
        wait_until(
            lambda: sum("worker" in name for name in children(running)) == 3,
            "the former worker has ended",
        )
        move(running, tmp_path / "data")  # with the worker that this directory had
        produce(running, range(1_502, 1_600))
        assert numbers(running) == list(range(1_600))
        await_removal(tmp_path / "second" / "orders-0")
    finally:
        assert running.stop() == 0


def test_a_partition_that_can_have_no_worker_of_its_own_there_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path / "data", data_dirs=directories(tmp_path), dedicated_workers=1)
    try:
        create(running, worker_dedicated=True)
        assert "raise dedicated_workers" in move(running, tmp_path / "second", status=1)
        assert where(running) == "data"
    finally:
        assert running.stop() == 0


def test_transactions_go_on_over_a_move_and_a_kill_of_both_workers(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    create(appliance)
    with Producer(appliance.address, transactional_id="t", transaction_timeout_ms=60_000) as one:
        one.init_transactions()
        one.begin_transaction()
        one.send("orders", b"0", partition=0).result(HANG_LIMIT_S)
        move(appliance, tmp_path / "second")
        workers = [pid for name, pid in children(appliance).items() if "worker" in name]
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        one.send("orders", b"1", partition=0).result(HANG_LIMIT_S)
        assert (tmp_path / "data" / "orders-0").is_dir(), "the transaction is open"
        one.commit_transaction()
        wait_until(lambda: numbers(appliance) == [0, 1], "the transaction is committed")
        one.begin_transaction()
        one.send("orders", b"2", partition=0).result(HANG_LIMIT_S)
        one.abort_transaction()
    produce(appliance, range(3, 5), size=0)
    wait_until(lambda: numbers(appliance) == [0, 1, 3, 4], "the aborted one is passed over")
    await_removal(tmp_path / "data" / "orders-0")
    assert numbers(appliance) == [0, 1, 3, 4]


def test_moves_that_cannot_be_are_refused_with_a_sentence(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    create(appliance)
    produce(appliance, range(10))
    assert "no data directory of this appliance" in move(appliance, tmp_path / "third", status=1)
    with Admin(appliance.address) as admin:
        with pytest.raises(InvalidRequestError, match="already"):
            admin.move_partition("orders", 0, str(tmp_path / "data"))
        with pytest.raises(InvalidRequestError, match="partitions 0 to 0"):
            admin.move_partition("orders", 1, str(tmp_path / "second"))
        (tmp_path / "second" / "orders-0").mkdir()
        with pytest.raises(InvalidRequestError, match="is there already"):
            admin.move_partition("orders", 0, str(tmp_path / "second"))
    assert numbers(appliance) == list(range(10))


def test_a_drained_directory_is_empty_and_the_appliance_starts_without_it(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path / "data", data_dirs=directories(tmp_path))
    create(running, partitions=4)
    with Producer(running.address) as producer:
        for number in range(40):
            producer.send("orders", b"%d" % number, partition=number % 4)
        producer.flush(HANG_LIMIT_S)
    assert len(list((tmp_path / "second").glob("orders-*"))) == 2
    done = run(
        None, "disk", "drain", str(tmp_path / "second"), "--data-dir", running.data_dir,
        "--bootstrap", running.address,
    )  # fmt: skip
    assert b"2 partitions moved" in done.stderr
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("new", 2)])
    assert len(list((tmp_path / "data").glob("new-*"))) == 2, "it gets no new partitions"
    rows = run(None, "disk", "list", "--data-dir", running.data_dir, "--bootstrap", running.address)
    assert b"OK, drained" in rows.stdout
    assert running.stop() == 0
    again = start(tmp_path / "data")
    try:
        with Consumer("orders", bootstrap=again.address, auto_offset_reset="earliest") as consumer:
            found: list[int] = []
            deadline = time.monotonic() + HANG_LIMIT_S
            while len(found) < 40 and time.monotonic() < deadline:
                found += [int(record.value) for record in consumer.poll(timeout_ms=1_000)]
        assert sorted(found) == list(range(40))
    finally:
        assert again.stop() == 0


def test_a_directory_whose_drain_is_cancelled_gets_partitions_again(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    options = "--data-dir", appliance.data_dir, "--bootstrap", appliance.address
    second = str(tmp_path / "second")
    with Admin(appliance.address) as admin:
        run(None, "disk", "drain", second, *options)
        done = run(None, "disk", "drain", str(tmp_path / "data"), *options, status=1)
        assert b"no other data directory" in done.stderr
        admin.create_topics([NewTopic("one", 2)])
        run(None, "disk", "drain", second, "--cancel", *options)
        admin.create_topics([NewTopic("two", 2)])
        done = run(None, "disk", "drain", str(tmp_path / "third"), *options, status=1)
        assert b"no data directory of this appliance" in done.stderr
    names = {path.name for path in (tmp_path / "second").iterdir()}
    assert "two-0" in names
    assert not [name for name in names if name.startswith("one")]


def found(appliance: Addressed) -> list[int]:
    """The numbers; none while the topic is not known yet, as when its change is taken up."""
    with suppress(UnknownTopicError):
        return numbers(appliance)
    return []


def check_one_place(appliance: Addressed, tmp_path: pathlib.Path, count: int) -> None:
    """The partition is in one place, with all records. It takes others, and moves (again)."""
    wait_until(lambda: found(appliance) == list(range(count)), "everything is there")
    produce(appliance, range(count, count + 10))
    assert numbers(appliance) == list(range(count + 10))
    if where(appliance) == "data":
        move(appliance, tmp_path / "second")
    assert where(appliance) == "second"
    await_removal(tmp_path / "data" / "orders-0")
    assert numbers(appliance) == list(range(count + 10))
    bins = [tmp_path / name / "bin" for name in ("data", "second")]
    assert [list(path.iterdir()) for path in bins if path.exists()] in ([], [[]], [[], []])


@pytest.mark.slow_because("the former files are kept for 5 s")
@pytest.mark.parametrize("point", short(POINTS))
def test_a_process_killed_in_a_move_leaves_the_partition_in_one_place(
    tmp_path: pathlib.Path, point: str
) -> None:
    with armed(tmp_path, point) as appliance:
        create(appliance)
        produce(appliance, range(1_500))
        move(appliance, tmp_path / "second", status=None)
        check_one_place(appliance, tmp_path, 1_500)
        with Admin(appliance.address) as admin:
            killed = [p["name"] for p in admin.describe_cluster()["processes"] if p["restarts"]]
        assert killed == ["controller" if point in CONTROLLERS else "flusher-0"]


@pytest.mark.slow_because("the former files are kept for 5 s")
@pytest.mark.parametrize("point", short(POINTS))
def test_an_appliance_killed_in_a_move_starts_with_the_partition_in_one_place(
    tmp_path: pathlib.Path, point: str
) -> None:
    with armed(tmp_path, point) as appliance:
        create(appliance)
        produce(appliance, range(1_500))
        kill_in_move(appliance, tmp_path / "second", flusher=point not in CONTROLLERS)
    again = start(tmp_path / "data", data_dirs=directories(tmp_path))
    try:
        check_one_place(again, tmp_path, 1_500)
    finally:
        assert again.stop() == 0
