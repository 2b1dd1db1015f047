"""Processes: names, restarts, kills of each at a random moment, clean stops, take-overs."""

from __future__ import annotations

import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from shm.memory.layout import RegionKind
from shm.memory.region import Region
from shm.queues.ring import Ring
from tailrace import Admin, Consumer, NewTopic, Producer, launcher
from tailrace.core.errors import RequestTimeoutError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.matrices import short
from tests.kit.processes import (
    HANG_LIMIT_S,
    children,
    comm,
    kill_and_wait_for_successor,
    shared_memory,
    stopped,
    wait_until,
)


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    """An appliance of this test's own, with its data in tmp_path."""
    running = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    yield running
    running.stop()


def make_topic(appliance: EmbeddedAppliance, partitions: int = 2) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("orders", partitions)])
    return "orders"


def values_by_partition(appliance: EmbeddedAppliance, count: int) -> dict[int, list[bytes]]:
    """Everything in the topic; fails when offsets are not dense or more or fewer than `count`
    come.
    """
    found: dict[int, list[bytes]] = {}
    with Consumer("orders", bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        total = 0
        while total < count:
            records = consumer.poll(60_000, max_records=10_000)
            assert records, f"{total} of {count}"
            for record in records:
                part = found.setdefault(record.partition, [])
                assert record.offset == len(part)
                part.append(record.value)
            total += len(records)
        assert consumer.poll(200) == []
    return found


def test_processes_are_named_by_role_and_started_isolated(own: EmbeddedAppliance) -> None:
    assert comm(own.pid) == "tr-supervisor-0"
    found = children(own)
    assert sorted(found) == [
        "tr-controller-0",
        "tr-flusher-0",
        "tr-front-0",
        "tr-worker-0",
        "tr-zygote-0",
    ]
    for pid in found.values():
        assert psutil.Process(pid).cmdline()[1:3] == ["-I", launcher.__file__]


def test_a_listed_core_is_obeyed(tmp_path: pathlib.Path) -> None:
    core = max(os.sched_getaffinity(0))
    running = start_embedded(data_dir=str(tmp_path), settings={"cores": f"[{core}]"})
    try:
        assert os.sched_getaffinity(children(running)["tr-worker-0"]) == {core}
    finally:
        assert running.stop() == 0


def test_processes_that_look_for_work_find_it_and_sleep_when_there_is_none(
    tmp_path: pathlib.Path,
) -> None:
    """Also where they share cores: then it costs time, and nothing else."""
    running = start_embedded(data_dir=str(tmp_path), settings={"busy_poll_us": "3000"})
    try:
        make_topic(running, 2)
        with Producer(running.address, linger_ms=0) as producer:
            for number in range(100):
                assert (
                    producer.send("orders", b"%d" % number, partition=number % 2)
                    .result(HANG_LIMIT_S)
                    .offset
                    == number // 2
                )
        assert values_by_partition(running, 100) == {
            p: [b"%d" % n for n in range(p, 100, 2)] for p in range(2)
        }
        looking = [
            psutil.Process(pid)
            for name, pid in children(running).items()
            if name in ("tr-front-0", "tr-worker-0")
        ]
        assert len(looking) == 2

        def are_asleep() -> bool:
            before = [process.num_ctx_switches() for process in looking]
            states = {process.status() for _ in range(20) for process in looking}
            return (
                states == {psutil.STATUS_SLEEPING}
                and [process.num_ctx_switches() for process in looking] == before
            )

        wait_until(are_asleep, "both sleep without waking, in twenty looks")
    finally:
        assert running.stop() == 0


def test_several_workers_share_the_partitions(tmp_path: pathlib.Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    running = start_embedded(data_dir=str(tmp_path), settings={"cores": str(cores)})
    try:
        assert {"tr-worker-0", "tr-worker-1"} <= set(children(running))
        make_topic(running, 4)
        with Producer(running.address) as producer:
            for number in range(400):
                producer.send("orders", b"%d" % number, partition=number % 4)
        found = values_by_partition(running, 400)
        assert found == {p: [b"%d" % n for n in range(p, 400, 4)] for p in range(4)}
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize(
    "victim", short(["tr-worker-0", "tr-flusher-0", "tr-front-0", "tr-controller-0"], 0, 1)
)
def test_any_process_can_be_killed_under_load_and_nothing_is_lost_repeated_or_reordered(
    own: EmbeddedAppliance, victim: str
) -> None:
    topic = make_topic(own)
    count = 60_000
    handles = []
    with Producer(own.address, acks="all", batch_size=8192) as producer:
        killed = threading.Event()

        def killer() -> None:
            kill_and_wait_for_successor(own, victim)
            killed.set()

        thread = threading.Thread(target=killer)
        for number in range(count):
            handles.append(producer.send(topic, b"%d" % number, partition=number % 2))
            if number == count // 3:
                thread.start()
        thread.join()
        producer.flush(60)
        assert all(handle.exception(60) is None for handle in handles)
    found = values_by_partition(own, count)
    assert found == {p: [b"%d" % n for n in range(p, count, 2)] for p in (0, 1)}
    with Admin(own.address) as admin:
        restarts = {
            process["name"]: process["restarts"]
            for process in admin.describe_cluster()["processes"]
        }
        assert sum(restarts.values()) == 1
        admin.create_topics([NewTopic("after")])
        with Producer(own.address) as producer:
            assert producer.send("after", b"x").result(60).offset == 0


def test_consumers_go_on_after_the_front_was_killed(own: EmbeddedAppliance) -> None:
    topic = make_topic(own, 1)
    with (
        Producer(own.address) as producer,
        Consumer(topic, bootstrap=own.address, auto_offset_reset="earliest") as consumer,
    ):
        producer.send(topic, b"before").result(60)
        assert [r.value for r in consumer.poll(60_000)] == [b"before"]
        kill_and_wait_for_successor(own, "tr-front-0")
        producer.send(topic, b"after").result(60)
        assert [r.value for r in consumer.poll(60_000)] == [b"after"]


def test_a_clean_stop_leaves_nothing_in_shared_memory_and_everything_on_disk(
    tmp_path: pathlib.Path,
) -> None:
    running = start_embedded(data_dir=str(tmp_path))
    with Producer(running.address, acks=1) as producer:
        for number in range(5000):
            producer.send("orders", b"%d" % number)
        producer.flush()
    assert shared_memory(running)
    pids = [running.pid, *children(running).values()]
    assert running.stop() == 0
    assert shared_memory(running) == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    again = start_embedded(data_dir=str(tmp_path))
    try:
        assert values_by_partition(again, 5000) == {0: [b"%d" % n for n in range(5000)]}
    finally:
        assert again.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_cleanly_on_signals_also_when_the_whole_group_gets_them(
    tmp_path: pathlib.Path, number: int
) -> None:
    tailrace = str(pathlib.Path(sys.executable).parent / "tailrace")
    served = subprocess.Popen(
        [tailrace, "serve", "--data-dir", str(tmp_path), "--listen", "tcp://127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert served.stderr is not None
    line = next(line for line in served.stderr if " ready " in line)
    assert "address=tcp://127.0.0.1:" in line
    os.killpg(served.pid, number)
    rest = served.stderr.read()
    served.stderr.close()
    assert served.wait(HANG_LIMIT_S) == 0, rest
    assert "stopped clean=True" in rest
    assert "ended_badly" not in rest


def test_children_die_with_a_killed_supervisor_and_the_next_start_drains_the_rings(
    tmp_path: pathlib.Path,
) -> None:
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    make_topic(running, 2)
    pids = children(running)
    # The flusher stands still, so what acks=1 acknowledges is only in the ring.
    os.kill(pids["tr-flusher-0"], signal.SIGSTOP)
    with Producer(running.address, acks=1, batch_size=4096) as producer:
        handles = [
            producer.send("orders", b"%d" % number, partition=number % 2) for number in range(4000)
        ]
        assert all(handle.result(60).offset is not None for handle in handles)
    os.kill(running.pid, signal.SIGKILL)
    wait_until(
        lambda: not any(psutil.pid_exists(pid) for pid in pids.values()),
        "children die with the supervisor",
    )
    assert [name for name in shared_memory(running) if "ring" in name], (
        "the rings outlive everybody"
    )
    again = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        assert values_by_partition(again, 4000) == {
            p: [b"%d" % n for n in range(p, 4000, 2)] for p in (0, 1)
        }
        # Only the regions of this run are left, once the old ring is drained.
        with Producer(again.address) as producer:
            assert producer.send("orders", b"new", partition=0).result(60).offset == 2000
    finally:
        assert again.stop() == 0
    assert shared_memory(again) == []
    running.stop()


def test_a_flush_with_acks_0_waits_until_the_front_has_read_what_was_sent(
    tmp_path: pathlib.Path,
) -> None:
    """Messages in a socket that is closed may be lost, also behind a flush that returned."""
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    make_topic(running, 1)
    front = children(running)["tr-front-0"]
    with Producer(running.address, acks=0) as producer:
        producer.send("orders", b"0")
        producer.flush()
        os.kill(front, signal.SIGSTOP)
        producer.send("orders", b"1")
        with pytest.raises(RequestTimeoutError):
            producer.flush(timeout=0.1)
        os.kill(front, signal.SIGCONT)
        producer.flush()
        os.kill(front, signal.SIGSTOP)
        producer.send("orders", b"2")
        started = time.monotonic()
        resume = threading.Timer(0.2, os.kill, (front, signal.SIGCONT))
        resume.start()
    assert time.monotonic() - started >= 0.2, "closing waits, too"
    resume.join()
    assert values_by_partition(running, 3) == {0: [b"0", b"1", b"2"]}
    assert running.stop() == 0


def test_every_front_serves_every_partition_and_may_be_killed(tmp_path: pathlib.Path) -> None:
    running = start_embedded(
        data_dir=str(tmp_path),
        listen=["tcp://127.0.0.1:0", f"ipc://{tmp_path}/s"],
        settings={"fronts": 2},
        auto_create_topics=False,
    )
    try:
        make_topic(running, 4)
        first, _, second, second_local = running.addresses
        assert second_local == f"ipc://{tmp_path}/s.1"
        with Producer(first) as one, Producer(second) as other, Producer(second_local) as local:
            producers = {b"one": one, b"other": other, b"local": local}
            for number in range(600):
                for name, producer in producers.items():
                    producer.send("orders", b"%s %d" % (name, number), partition=number % 4)
                if number in (200, 400):
                    kill_and_wait_for_successor(running, f"tr-front-{number // 200 - 1}")
            for producer in producers.values():
                producer.flush()
            assert sum(producer.metrics()["errors"] for producer in producers.values()) == 0
        for address in running.addresses:
            with Consumer("orders", bootstrap=address, auto_offset_reset="earliest") as consumer:
                found: dict[bytes, list[int]] = {name: [] for name in producers}
                count = 0
                while count < 1800:
                    records = consumer.poll(60_000)
                    assert records
                    count += len(records)
                    for record in records:
                        name, number = record.value.split()
                        found[name].append(int(number))
            for numbers in found.values():
                assert sorted(numbers) == list(range(600))
                for partition in range(4):
                    mine = [number for number in numbers if number % 4 == partition]
                    assert mine == sorted(mine)
    finally:
        assert running.stop() == 0


def test_a_second_kill_during_the_drain_changes_nothing(tmp_path: pathlib.Path) -> None:
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    make_topic(running, 1)
    os.kill(children(running)["tr-flusher-0"], signal.SIGSTOP)
    with Producer(running.address, acks=1, batch_size=2048) as producer:
        for number in range(20_000):
            producer.send("orders", b"%d" % number)
        producer.flush()
    os.kill(running.pid, signal.SIGKILL)
    for pause_ms in (60, 120, 180):
        starting = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "appliance.supervise.supervisor",
                "--data-dir",
                str(tmp_path),
                "--listen",
                "tcp://127.0.0.1:0",
            ],
            stderr=subprocess.DEVNULL,
        )
        threading.Event().wait(pause_ms / 1000)
        starting.kill()
        starting.wait()
    again = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        assert values_by_partition(again, 20_000) == {0: [b"%d" % n for n in range(20_000)]}
    finally:
        assert again.stop() == 0
    running.stop()


def test_stopped_children_of_a_killed_supervisor_are_killed_by_the_take_over(
    tmp_path: pathlib.Path,
) -> None:
    running = start_embedded(data_dir=str(tmp_path))
    flusher = children(running)["tr-flusher-0"]
    os.kill(flusher, signal.SIGSTOP)
    os.kill(running.pid, signal.SIGKILL)
    again = start_embedded(data_dir=str(tmp_path))
    try:
        assert (
            not psutil.pid_exists(flusher)
            or psutil.Process(flusher).status() == psutil.STATUS_ZOMBIE
        )
    finally:
        assert again.stop() == 0
    running.stop()


def test_a_producer_goes_on_when_the_appliance_is_stopped_and_started_again(
    tmp_path: pathlib.Path,
) -> None:
    address = f"ipc://{tmp_path}/socket"
    first = start_embedded(data_dir=str(tmp_path), listen=address, auto_create_topics=False)
    make_topic(first, 1)
    with Producer(address, acks="all", batch_size=2048) as producer:
        handles = [producer.send("orders", b"%d" % n) for n in range(3000)]
        assert first.stop() == 0
        handles += [producer.send("orders", b"%d" % n) for n in range(3000, 6000)]
        second = start_embedded(data_dir=str(tmp_path), listen=address, auto_create_topics=False)
        try:
            producer.flush(60)
            assert [handle.exception(60) for handle in handles if handle.exception(60)] == []
            assert values_by_partition(second, 6000) == {0: [b"%d" % n for n in range(6000)]}
        finally:
            assert second.stop() == 0


def test_what_cannot_be_delivered_raises_on_its_handle(tmp_path: pathlib.Path) -> None:
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    make_topic(running, 1)
    errors: list[TailraceError | None] = []
    with Producer(running.address, delivery_timeout_ms=5_000) as producer:
        producer.send("orders", b"x").result(60)
        assert running.stop() == 0
        handle = producer.send(
            "orders", b"y", on_delivery=lambda _metadata, error: errors.append(error)
        )
        error = handle.exception(HANG_LIMIT_S)
        assert error is not None
        assert error.code.name in ("NOT_REACHABLE", "DELIVERY_TIMEOUT")
        assert errors == [error]


def test_a_hanging_process_is_killed_and_replaced(tmp_path: pathlib.Path) -> None:
    running = start_embedded(
        data_dir=str(tmp_path), settings={"hang_timeout_ms": 1000}, auto_create_topics=False
    )
    try:
        make_topic(running, 1)
        worker = children(running)["tr-worker-0"]
        os.kill(worker, signal.SIGSTOP)
        wait_until(
            lambda: children(running).get("tr-worker-0", worker) != worker,
            "the hanging worker is replaced",
        )
        with Producer(running.address) as producer:
            assert producer.send("orders", b"x").result(60).offset == 0
    finally:
        assert running.stop() == 0


def test_a_producer_faster_than_the_disk_is_slowed_and_nothing_is_lost(
    tmp_path: pathlib.Path,
) -> None:
    """The flusher stands still for a while; the producer sends several times what ring, lane and
    credit hold.
    """
    ring = 4 << 20
    running = start_embedded(
        data_dir=str(tmp_path),
        settings={"ring_bytes": ring, "lane_bytes": 1 << 20, "credit_bytes": 4 << 20},
        auto_create_topics=False,
    )
    try:
        make_topic(running, 1)
        payload = os.urandom(900)
        count = 40_000  # 36 MB
        flusher = children(running)["tr-flusher-0"]
        pids = children(running)
        sending_since = [math.inf]

        def resume_when_blocked() -> None:
            try:
                wait_until(
                    lambda: time.monotonic() - sending_since[0] > 0.5,
                    "send() blocks: something holds the producer back",
                )
            finally:
                os.kill(flusher, signal.SIGCONT)

        with Producer(
            running.address, acks="all", buffer_memory=4 << 20, batch_size=65536
        ) as producer:
            os.kill(flusher, signal.SIGSTOP)
            resuming = threading.Thread(target=resume_when_blocked)
            resuming.start()
            for number in range(count):
                sending_since[0] = time.monotonic()
                producer.send("orders", b"%08d" % number + payload)
                sending_since[0] = math.inf
                assert producer.metrics()["buffered_bytes"] <= 4 << 20
            producer.flush(60)
            resuming.join()
        for name, pid in pids.items():
            with open(f"/proc/{pid}/status", encoding="ascii") as status:
                anonymous_kib = next(
                    int(line.split()[1]) for line in status if line.startswith("RssAnon")
                )
            assert anonymous_kib < 80_000, f"{name} grew to {anonymous_kib} KiB"
        found = values_by_partition(running, count)
        assert [value[:8] for value in found[0]] == [b"%08d" % n for n in range(count)]
    finally:
        assert running.stop() == 0


def test_buffer_memory_that_stays_full_raises(tmp_path: pathlib.Path) -> None:
    from tailrace.core.errors import BufferExhaustedError

    running = start_embedded(
        data_dir=str(tmp_path),
        settings={"ring_bytes": 1 << 20, "lane_bytes": 256 << 10, "credit_bytes": 1 << 20},
        auto_create_topics=False,
    )
    try:
        make_topic(running, 1)
        flusher = children(running)["tr-flusher-0"]
        with Producer(
            running.address, acks="all", buffer_memory=1 << 20, max_block_ms=300, batch_size=16384
        ) as producer:
            refused = pytest.raises(BufferExhaustedError, match="stayed full for 300 ms")
            with stopped(flusher), refused:
                send_many(producer, 10_000)
            producer.flush(HANG_LIMIT_S)
    finally:
        assert running.stop() == 0


def send_many(producer: Producer, count: int) -> None:
    for _ in range(count):
        producer.send("orders", bytes(1000))


def test_reading_a_ring_from_outside_shows_what_is_settled(own: EmbeddedAppliance) -> None:
    """`shm` is readable by tools: attaching changes nothing and removes nothing."""
    make_topic(own, 1)
    with Producer(own.address, acks="all") as producer:
        producer.send("orders", b"x").result(60)
    name = next("/" + n for n in shared_memory(own) if n.endswith("ring-0"))
    ring = Ring(Region.attach(name, RegionKind.RING))
    assert ring.settled.load() == ring.producer_position.load() > 0
    assert "/" + name.lstrip("/") in ["/" + n for n in shared_memory(own)]
