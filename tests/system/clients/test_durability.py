"""The log's promises with real processes: full disks, several directories, dedicated workers, kills
at crash points.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import orjson
import pytest

from shm.crash_points import CRASH_POINT_VARIABLE, CRASH_POINTS
from shm.memory.region import names_with
from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import InvalidSettingError, TailraceError
from tailrace.format.directory.data_dir import read_identity
from tests.kit.appliances.orders import create, kill_everything, produce, read, start
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.matrices import short
from tests.kit.processes import HANG_LIMIT_S, children, kill_and_wait_for_successor, wait_until


@pytest.mark.parametrize(
    "name", short(name for name in CRASH_POINTS if name.startswith(("controller.", "supervisor.")))
)
def test_controller_and_supervisor_killed_at_each_named_place(
    tmp_path: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)
    create(first)
    produce(first, 0, 50)
    kill_everything(first)
    environment = {**os.environ, CRASH_POINT_VARIABLE: name}
    ours, theirs = os.pipe()
    armed = subprocess.Popen(
        [sys.executable, "-P", "-m", "appliance.supervise.supervisor", "--data-dir", str(tmp_path),
        "--listen", f"ipc://{tmp_path}/s", "--set", "ring_bytes=16777216"],
        env=environment, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    address = f"ipc://{tmp_path}/s"
    try:
        if name.startswith("controller."):
            with Admin(address) as admin:
                try:
                    admin.create_topics([NewTopic("more")])
                except TailraceError:
                    pass  # killed before it could answer: the decision is carried out all the same
                wait_until(lambda: "more" in admin.list_topics(), "the topic is there")
                with (
                    Producer(address, acks="all") as producer
                ):  # its id is asked for only now: a change that is under way at a kill is given up
                    assert producer.send("more", b"1:").result(HANG_LIMIT_S).offset == 0
                wait_until(
                    lambda: any(
                        p["name"] == "controller" and p["restarts"]
                        for p in admin.describe_cluster()["processes"]
                    ),
                    "it was killed",
                )
            armed.terminate()
            assert armed.wait(HANG_LIMIT_S) == 0
        else:
            if name == "supervisor.in_clean_up":
                with Admin(address) as admin:
                    admin.list_topics()
                armed.terminate()
            assert armed.wait(HANG_LIMIT_S) == -signal.SIGKILL
    finally:
        armed.kill()
        armed.wait()
    again = start(tmp_path)
    try:
        assert read(again, 50) == list(range(50))
        produce(again, 50, 60)
        assert read(again, 60) == list(range(60))
    finally:
        assert again.stop() == 0
    identity = read_identity(str(tmp_path))
    assert identity is not None
    assert not names_with(identity.prefix)


def test_several_data_directories_share_the_partitions_and_a_forgotten_one_is_named(
    tmp_path: pathlib.Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    running = start(one, data_dirs=f"{one},{two}")
    try:
        create(running, partitions=4)
        with Producer(running.address, acks="all") as producer:
            for number in range(400):
                producer.send("orders", b"%d:" % number, partition=number % 4)
        assert len(list(one.glob("orders-*"))) == len(list(two.glob("orders-*"))) == 2
    finally:
        kill_everything(running)
    swapped = start(two, data_dirs=f"{two},{one}")  # in another order: the same appliance
    try:
        assert read(swapped, 100) == list(range(0, 400, 4))
    finally:
        assert swapped.stop() == 0
    with pytest.raises(TailraceError, match="data_dirs lacks"):
        start(one)


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    with small_file_system(tmp_path, 64) as path:
        yield path


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_refuses_producers_serves_readers_survives_a_restart_and_resumes(
    small_disk: pathlib.Path,
) -> None:
    running = start(
        small_disk / "data",
        ring_bytes=1 << 20,
        lane_bytes=256 << 10,
        credit_bytes=1 << 20,
        journal_bytes=1 << 20,
    )
    create(running)
    produce(running, 0, 100, size=1000)
    filler = small_disk / "filler"
    with open(filler, "wb") as file:
        free = os.statvfs(small_disk)
        file.write(
            bytes(free.f_bavail * free.f_frsize - (3 << 20))
        )  # less than the reserve is left
    with Producer(running.address, acks="all", delivery_timeout_ms=3000) as producer:

        def is_refused() -> bool:
            return "DISK_FULL" in str(producer.send("orders", b"-1:refused").exception(60))

        wait_until(is_refused, "a full disk refuses, and says so")
    with Admin(running.address) as admin:
        assert admin.describe_cluster()["data_dirs"][0]["state"] == "FULL"
    assert read(running, 100)[:100] == list(range(100))
    kill_everything(running)
    with open(filler, "ab") as file:
        free = os.statvfs(small_disk)
        file.write(bytes(free.f_bavail * free.f_frsize))  # nothing at all is left
    again = start(
        small_disk / "data",
        ring_bytes=1 << 20,
        lane_bytes=256 << 10,
        credit_bytes=1 << 20,
        journal_bytes=1 << 20,
    )
    try:
        assert read(again, 100)[:100] == list(range(100))
        with Producer(again.address, acks="all") as producer:
            handle = producer.send("orders", b"200:after")
            assert not handle.done()
            filler.unlink()
            assert handle.result(60).offset is not None
    finally:
        assert again.stop() == 0


def test_a_producer_that_was_forgotten_takes_a_new_epoch_and_goes_on_without_a_loss_or_a_duplicate(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path, **{"producer.id.expiration.ms": 1})
    try:
        create(running)
        with Producer(running.address, acks="all") as producer:
            sent = 0

            def is_forgotten() -> bool:
                nonlocal sent
                assert producer.send("orders", b"%d:" % sent, partition=0).result(60).offset == sent
                sent += 1
                return producer.metrics()["epoch_bumps"] > 0

            wait_until(is_forgotten, "a pause of a millisecond between two batches")
        assert read(running, sent) == list(range(sent))
    finally:
        assert running.stop() == 0


def test_another_number_of_workers_drains_what_the_old_ones_left(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path, cores="[0]")
    create(running, partitions=3)
    os.kill(children(running)["tr-flusher-0"], signal.SIGSTOP)
    with Producer(running.address, acks=1) as producer:
        for number in range(300):
            producer.send("orders", b"%d:" % number, partition=number % 3)
        producer.flush(HANG_LIMIT_S)
    kill_everything(running)
    again = start(tmp_path, cores="[0, 1]" if len(os.sched_getaffinity(0)) > 1 else "auto")
    try:
        assert read(again, 100) == list(range(0, 300, 3))
    finally:
        assert again.stop() == 0


def test_doctor_names_what_is_wrong_and_says_so_by_its_exit_status(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)

    def doctor() -> tuple[int, dict[str, dict[str, str]]]:
        command = [
            sys.executable,
            "-P",
            "-m",
            "appliance.cli.main",
            "doctor",
            "--json",
            "--bootstrap",
            running.address,
        ]
        ended = subprocess.run(command, capture_output=True, check=False)
        return ended.returncode, {check["check"]: check for check in orjson.loads(ended.stdout)}

    try:
        create(running)
        code, checks = doctor()
        assert checks["processes"]["level"] == "ok"
        quarantine = tmp_path / "quarantine"
        quarantine.mkdir()
        (quarantine / "orders-0-0-0.json").write_text("{}")
        kill_and_wait_for_successor(running, "tr-worker-0")
        code, checks = doctor()
        assert code == 1
        assert checks[f"quarantine {tmp_path}"]["level"] == "problem"
        assert "worker-0 1 times" in checks["processes"]["detail"]
    finally:
        assert running.stop() == 0


def test_each_partition_of_a_dedicated_topic_has_a_worker_of_its_own_over_kills_and_restarts(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path, dedicated_workers=3, cores="[0]", ring_bytes=1 << 20)
    try:
        create(running, partitions=2, worker_dedicated="true")
        produce(running, 0, 100, acks=1)
        assert {"tr-worker-0", "tr-worker-1", "tr-worker-2"} <= set(children(running))
        with Admin(running.address) as admin:
            assert (
                admin.describe_topics(["orders"])["orders"]["configs"]["worker.dedicated"] is True
            )
            with pytest.raises(
                InvalidSettingError,
                match="needs 2 more workers, and 1 of dedicated_workers = 3 are free",
            ):
                admin.create_topics([NewTopic("more", 2, {"worker.dedicated": True})])
            with pytest.raises(InvalidSettingError, match="when a topic is created"):
                admin.alter_topics({"orders": {"worker.dedicated": False}})
            admin.create_partitions({"orders": 3})
        wait_until(lambda: "tr-worker-3" in children(running), "the new partition has a worker")
        for name in ("tr-worker-1", "tr-flusher-0", "tr-controller-0", "tr-front-0"):
            kill_and_wait_for_successor(running, name)
        produce(running, 100, 200)
        assert read(running, 200) == list(range(200))
        os.kill(children(running)["tr-flusher-0"], signal.SIGSTOP)
        produce(running, 200, 300, acks=1)
    finally:
        kill_everything(running)
    again = start(tmp_path, dedicated_workers=3)
    try:
        assert read(again, 300) == list(range(300))
        with Admin(again.address) as admin:
            admin.delete_topics(["orders"])
            wait_until(
                lambda: not {"tr-worker-2", "tr-worker-3", "tr-worker-4"} & set(children(again)),
                "their workers are gone",
            )
            admin.create_topics([NewTopic("orders", 3, {"worker.dedicated": True})])
        produce(again, 0, 10)
        assert read(again, 10) == list(range(10))
    finally:
        assert again.stop() == 0
    with pytest.raises(TailraceError, match="more partitions than dedicated_workers = 2"):
        start(tmp_path, dedicated_workers=2)
