"""Limits of the host at the start and later: open files, shared memory, a full disk, the machine: a
sentence, and nothing lost.
"""

from __future__ import annotations

import os
import pathlib
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import TailraceError
from tests.kit.appliances.killed_directories import (
    create,
    produce,
    read,
    start,
)
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.processes import HANG_LIMIT_S, children, shared_memory, wait_until


def supervise(
    data_dir: pathlib.Path, *, files: int = 0, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """A start that is expected to end by itself, under a limit of open files, with a command before
    it.
    """

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    command = [
        *before,
        sys.executable,
        "-P",
        "-m",
        "appliance.supervise.supervisor",
        "--data-dir",
        str(data_dir),
        "--listen",
        "tcp://127.0.0.1:0",
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")
    }
    return subprocess.run(
        command,
        preexec_fn=limit,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )


@contextmanager
def with_open_files(data_dir: pathlib.Path, log: pathlib.Path, files: int) -> Iterator[str]:
    """A served appliance that may have so many open files; its address."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "appliance.supervise.supervisor",
        "--data-dir",
        str(data_dir),
        "--listen",
        "tcp://127.0.0.1:0",
    ]
    command += ["--set", "http.listen=", "--set", f"ring_bytes={4 << 20}"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
            env=environment,
            stdout=out,
            stderr=out,
        )
    try:
        wait_until(lambda: " ready " in log.read_text() or process.poll() is not None, "it serves")
        yield re.findall(r"ready address=(\S+)", log.read_text())[0]
    finally:
        process.terminate()
        assert process.wait(HANG_LIMIT_S) == 0


def test_64_open_files_end_in_a_sentence(tmp_path: pathlib.Path) -> None:
    ended = supervise(tmp_path, files=64)
    assert ended.returncode == 74
    assert "the limit of open files is 64" in ended.stderr
    assert "LimitNOFILE" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_256_open_files_serve_as_many_partitions_as_they_can_and_refuse_more(
    tmp_path: pathlib.Path,
) -> None:
    with with_open_files(tmp_path / "data", tmp_path / "log", 256) as address:
        with Admin(address) as admin:
            with pytest.raises(TailraceError, match="partition slots are in use"):
                admin.create_topics([NewTopic("wide", 200)])
            admin.create_topics([NewTopic("narrow", 70)])
        with Producer(address, acks="all") as producer:
            handles = [
                producer.send("narrow", b"%d" % partition, partition=partition)
                for partition in range(70)
            ]
            assert all(handle.exception(60) is None for handle in handles)
        with Admin(address) as admin:
            assert admin.describe_cluster()["offline"] == []
    assert "few_open_files allowed=256" in (tmp_path / "log").read_text()


def test_more_partitions_than_open_files_are_refused_at_start_and_served_with_more(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("wide", 60)])
    assert running.stop() == 0
    ended = supervise(tmp_path, files=150)
    assert ended.returncode == 74
    assert "60 partitions" in ended.stderr
    again = start(tmp_path)
    try:
        with Admin(again.address) as admin:
            assert admin.describe_cluster()["offline"] == []
        produce(again, 0, 5, "wide")
    finally:
        assert again.stop() == 0


def test_a_flusher_out_of_descriptors_waits_takes_nothing_offline_and_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path)
    try:
        create(running)
        produce(running, 0, 3)
        flusher = children(running)["tr-flusher-0"]
        _, hard = resource.prlimit(flusher, resource.RLIMIT_NOFILE)
        resource.prlimit(flusher, resource.RLIMIT_NOFILE, (1, hard))
        with (
            Admin(running.address, request_timeout_ms=1500) as admin,
            pytest.raises(Exception, match=r".+"),
        ):
            admin.create_topics([NewTopic("other", 4)])
        with Producer(running.address, acks="all") as producer:
            handle = producer.send("orders", b"3")
            resource.prlimit(flusher, resource.RLIMIT_NOFILE, (hard, hard))
            handle.result(60)
        wait_until(
            lambda: "waiting_logs_opened" in pathlib.Path(running.log_path).read_text(),
            "the new partitions are opened",
        )
        with Admin(running.address) as admin:
            wait_until(lambda: "other" in admin.list_topics(), "the topic is told to the front")
            produce(running, 0, 4, "other")
            assert admin.describe_cluster()["offline"] == []
        assert children(running)["tr-flusher-0"] == flusher
        assert sorted(read(running, 4, "other")) == list(range(4))
    finally:
        assert running.stop() == 0


def test_a_machine_whose_stores_are_not_in_order_is_refused(tmp_path: pathlib.Path) -> None:
    ended = supervise(tmp_path / "data", before=("setarch", "i686"))
    assert ended.returncode == 74
    assert "this machine is i686" in ended.stderr
    assert "x86-64" in ended.stderr
    assert not (tmp_path / "data").exists()


def test_shared_memory_removed_by_hand_ends_the_appliance_with_a_sentence(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path)
    create(running)
    produce(running, 0, 10)
    for name in shared_memory(running):
        os.unlink(f"/dev/shm/{name}")
    os.kill(children(running)["tr-worker-0"], 9)
    assert running._process.wait(HANG_LIMIT_S) == 75
    said = re.findall(r"^tailrace: .*$", pathlib.Path(running.log_path).read_text(), re.MULTILINE)
    assert any("does not exist" in line for line in said)
    assert any("worker-0 ended" in line for line in said)
    again = start(tmp_path)
    try:
        assert read(again, 10) == list(range(10))
    finally:
        assert again.stop() == 0


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    with small_file_system(tmp_path, 24) as path:
        yield path


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("is_used", [True, False])
def test_a_start_on_a_full_disk_without_its_reserve_ends_in_a_sentence(
    small_disk: pathlib.Path, is_used: bool
) -> None:
    if is_used:
        assert start(small_disk).stop() == 0
    (small_disk / "reserve").unlink(missing_ok=True)
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 9, 1):
            try:
                while filler.write(bytes(size)):
                    pass
            except OSError:
                pass
    ended = supervise(small_disk)
    assert ended.returncode == 73
    assert "No space left on device" in ended.stderr
    assert str(small_disk) in ended.stderr
    assert "Traceback" not in ended.stderr
    (small_disk / "filler").unlink()
    assert start(small_disk).stop() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a /dev/shm of one's own needs root")
def test_no_room_for_a_dedicated_worker_is_said_and_it_is_hired_when_there_is(
    tmp_path: pathlib.Path,
) -> None:
    """In a mount namespace of its own, with a /dev/shm that holds the appliance and no more."""
    log = tmp_path / "log"
    hold = "mount -t tmpfs -o size=48m tmpfs /dev/shm && exec "
    command = (
        f"{hold}{sys.executable} -P -m appliance.supervise.supervisor --data-dir "
        f"{tmp_path}/data --listen tcp://127.0.0.1:0 --set ring_bytes={4 << 20}"
    )
    command += " --set lane_bytes=1048576 --set ring_descriptors=1024 --set http.listen="
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", command], stdout=file, stderr=file, env=environment
        )
    try:
        wait_until(lambda: " ready " in log.read_text() or process.poll() is not None, "it serves")
        address = re.findall(r"ready address=(\S+)", log.read_text())[0]
        inside = pathlib.Path(f"/proc/{process.pid}/root/dev/shm/filler")
        with inside.open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass
        with Admin(address, request_timeout_ms=1000) as admin:
            try:
                admin.create_topics([NewTopic("own", 1, {"worker.dedicated": True})])
            except TailraceError:
                pass  # it waits for its worker
        wait_until(lambda: "no_dedicated_worker" in log.read_text(), "it is said")
        with Admin(address) as admin:
            admin.create_topics([NewTopic("other", 1)])
        with Producer(address) as producer:
            producer.send("other", b"x").result(60)
        said = log.read_text().count("no_dedicated_worker")
        inside.unlink()
        with Admin(address) as admin:
            wait_until(lambda: "own" in admin.partition_counts(), "the topic has its worker")
        with Producer(address) as producer:
            producer.send("own", b"x").result(60)
        assert log.read_text().count("no_dedicated_worker") <= said + 1, "it tries in pauses"
    finally:
        process.terminate()
        assert process.wait(HANG_LIMIT_S) == 0
