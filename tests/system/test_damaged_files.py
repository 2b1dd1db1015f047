"""Files that a start depends on, damaged or replaced; a copied directory; limits of the host: recovered with nothing lost, or refused with a sentence."""

from __future__ import annotations

import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shm.region import names_with
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.data_directory import read_identity
from tailrace.errors import NotReachableError, TailraceError
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children, kill_and_wait_for_successor, shared_memory, wait_until

COPIES = ("shm.json", "shm.json.copy")


def start(data_dir: pathlib.Path, **settings: Any) -> EmbeddedAppliance:
    return start_embedded(data_dir=str(data_dir), settings={"ring_bytes": 1 << 20, **settings}, auto_create_topics=False)


def create(appliance: EmbeddedAppliance, name: str = "orders", **configs: Any) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name, 1, {key.replace("_", "."): value for key, value in configs.items()})])


def produce(appliance: EmbeddedAppliance, first: int, last: int, topic: str = "orders", acks: Any = "all") -> None:
    with Producer(appliance.address, acks=acks) as producer:
        handles = [producer.send(topic, b"%d" % number) for number in range(first, last)]
        for handle in handles:
            handle.result(20)


def read(appliance: EmbeddedAppliance, count: int, topic: str = "orders") -> list[int]:
    found: list[int] = []
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while len(found) < count:
            records = consumer.poll(10_000)
            assert records, f"{len(found)} of {count}"
            found += [int(record.value) for record in records]
        assert consumer.poll(100) == []
    return found


def kill_everything(appliance: EmbeddedAppliance) -> None:
    pids = [*children(appliance).values(), appliance.pid]
    for pid in pids:
        os.kill(pid, 19)  # nobody reacts to another's end
    for pid in pids:
        os.kill(pid, 9)
    appliance.stop()


def killed_with_acknowledged_batches_in_the_ring(data_dir: pathlib.Path, **settings: Any) -> None:
    """One record is on the disk, 50 more are acknowledged (acks=1) and lie in the ring alone: the flusher was stopped."""
    running = start(data_dir, **settings)
    create(running)
    produce(running, 0, 1)
    os.kill(children(running)["tr-flusher-0"], 19)
    produce(running, 1, 51, acks=1)
    kill_everything(running)


def refusal(data_dir: pathlib.Path, **settings: Any) -> str:
    """What a start says that ends with exit code 73."""
    with pytest.raises(NotReachableError) as caught:
        start(data_dir, **settings).stop()
    assert "exit code 73" in str(caught.value)
    return str(caught.value)


def damage_cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def damage_flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_remove(path: pathlib.Path) -> None:
    path.unlink()


def damage_link(path: pathlib.Path) -> None:
    target = path.parent.parent / f"{path.name}.target"
    target.write_bytes(b"precious")
    path.unlink()
    path.symlink_to(target)


DAMAGES = [damage_cut, damage_empty, damage_flip, damage_remove, damage_link]


@pytest.mark.parametrize(
    ("damaged", "damage"), [(COPIES[:1], damage_cut), (COPIES[1:], damage_flip), *((COPIES, damage) for damage in DAMAGES)]
)
def test_acknowledged_batches_in_memory_survive_a_damaged_manifest(tmp_path: pathlib.Path, damaged: tuple[str, ...], damage: Any) -> None:
    directory = tmp_path / "data"
    killed_with_acknowledged_batches_in_the_ring(directory)
    for name in damaged:
        damage(directory / name)
    again = start(directory)
    try:
        assert read(again, 51) == list(range(51))
        produce(again, 51, 52)
        assert "memory_lost" not in pathlib.Path(again.log_path).read_text()
    finally:
        assert again.stop() == 0
    assert all(path.read_bytes() == b"precious" for path in tmp_path.glob("*.target"))
    identity = read_identity(str(directory))
    assert identity is not None
    assert not names_with(identity.prefix)


def test_a_damaged_manifest_and_no_memory_are_said(tmp_path: pathlib.Path) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path)
    identity = read_identity(str(tmp_path))
    assert identity is not None
    for name in names_with(identity.prefix):
        os.unlink(f"/dev/shm{name}")
    for name in COPIES:
        damage_cut(tmp_path / name)
    again = start(tmp_path)
    try:
        assert read(again, 1) == [0]
        assert "memory_lost" in pathlib.Path(again.log_path).read_text()
    finally:
        assert again.stop() == 0


def test_rings_of_another_worker_are_drained_though_one_is_gone(tmp_path: pathlib.Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    killed_with_acknowledged_batches_in_the_ring(tmp_path, cores=str(cores))
    identity = read_identity(str(tmp_path))
    assert identity is not None
    os.unlink(f"/dev/shm{next(name for name in names_with(identity.prefix) if name.endswith('-ring-1'))}")
    again = start(tmp_path)
    try:
        assert read(again, 51) == list(range(51))
        assert "memory_lost" in pathlib.Path(again.log_path).read_text()
    finally:
        assert again.stop() == 0


def test_a_ring_without_its_table_is_refused(tmp_path: pathlib.Path) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path)
    identity = read_identity(str(tmp_path))
    assert identity is not None
    os.unlink(f"/dev/shm{next(name for name in names_with(identity.prefix) if name.endswith('-table-0'))}")
    said = refusal(tmp_path)
    assert "-ring-0" in said
    assert "to give them up" in said
    for name in names_with(identity.prefix):
        os.unlink(f"/dev/shm{name}")


@pytest.mark.parametrize("damage", [damage_flip, damage_remove, damage_link])
def test_one_damaged_identity_is_mended_by_the_other(tmp_path: pathlib.Path, damage: Any) -> None:
    directory = tmp_path / "data"
    killed_with_acknowledged_batches_in_the_ring(directory)
    damage(directory / "instance.json")
    again = start(directory)
    try:
        assert read(again, 51) == list(range(51))
    finally:
        assert again.stop() == 0
    damage(directory / "instance.json.copy")
    again = start(directory)
    try:
        assert read(again, 51) == list(range(51))
    finally:
        assert again.stop() == 0


@pytest.mark.parametrize("damage", [damage_cut, damage_remove])
def test_without_any_identity_a_used_directory_is_refused_and_named(tmp_path: pathlib.Path, damage: Any) -> None:
    running = start(tmp_path)
    create(running)
    assert running.stop() == 0
    for name in ("instance.json", "instance.json.copy"):
        damage(tmp_path / name)
    assert str(tmp_path / "instance.json") in refusal(tmp_path)


@pytest.mark.parametrize("name", ["shm.json", "shm.json.copy", "shm.json.tmp", "instance.json", "instance.lock", "journal"])
def test_a_directory_where_a_file_belongs_is_refused_and_named(tmp_path: pathlib.Path, name: str) -> None:
    running = start(tmp_path)
    assert running.stop() == 0
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    assert str(tmp_path / name) in refusal(tmp_path)


@pytest.mark.parametrize("name", ["instance.lock", "shm.json.tmp", "shm.json", "instance.json.copy"])
def test_a_link_in_the_data_directory_is_never_followed(tmp_path: pathlib.Path, name: str) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    directory = tmp_path / "data"
    assert start(directory).stop() == 0
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(target)
    if name == "instance.lock":
        assert str(directory / name) in refusal(directory)
    else:
        assert start(directory).stop() == 0
    assert target.read_bytes() == b"precious"


# ---- whose directory it is -----------------------------------------------------------------------------------------------------------


def test_a_copy_beside_its_original_leaves_the_originals_memory_alone(tmp_path: pathlib.Path) -> None:
    original = start(tmp_path / "data")
    try:
        create(original)
        produce(original, 0, 10)
        before = sorted(shared_memory(original))
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        copy = start(tmp_path / "copy")
        try:
            assert read(copy, 10) == list(range(10))
            produce(copy, 10, 12)
        finally:
            assert copy.stop() == 0
        assert sorted(shared_memory(original)) == before
        kill_and_wait_for_successor(original, "tr-worker-0")
        produce(original, 100, 103)
        assert read(original, 13) == [*range(10), 100, 101, 102]
    finally:
        assert original.stop() == 0


def test_a_copy_of_a_killed_directory_leaves_its_batches_to_the_original(tmp_path: pathlib.Path) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    copy = start(tmp_path / "copy")
    try:
        assert read(copy, 1) == [0]
        said = pathlib.Path(copy.log_path).read_text()
        assert "copied_directory" in said
        assert "memory_lost" in said
    finally:
        assert copy.stop() == 0
    original = start(tmp_path / "data")
    try:
        assert read(original, 51) == list(range(51))
    finally:
        assert original.stop() == 0


def test_a_directory_renamed_after_a_kill_drains_what_it_left_in_memory(tmp_path: pathlib.Path) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    again = start(tmp_path / "moved")
    try:
        assert read(again, 51) == list(range(51))
    finally:
        assert again.stop() == 0


def test_a_directory_moved_to_another_file_system_after_a_kill_is_refused_while_memory_holds_batches(tmp_path: pathlib.Path) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path / "data")
    identity = read_identity(str(tmp_path / "data"))
    assert identity is not None
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    shutil.rmtree(tmp_path / "data")
    said = refusal(tmp_path / "moved")
    assert f"{identity.prefix}-" in said
    for name in names_with(identity.prefix):
        os.unlink(f"/dev/shm{name}")
    again = start(tmp_path / "moved")
    try:
        assert read(again, 1) == [0]
    finally:
        assert again.stop() == 0


def test_a_lock_file_removed_lets_no_second_appliance_in_and_is_made_again(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path, hang_timeout_ms=1000)
    try:
        create(running)
        (tmp_path / "instance.lock").unlink()
        assert f"process id {running.pid}" in refusal(tmp_path)
        wait_until(
            lambda: (tmp_path / "instance.lock").exists() and bool((tmp_path / "instance.lock").stat().st_size), "the lock is made again"
        )
        assert "lock_file_gone" in pathlib.Path(running.log_path).read_text()
        assert f"process id {running.pid}" in refusal(tmp_path)
        kill_and_wait_for_successor(running, "tr-flusher-0")
        produce(running, 0, 5)
        assert read(running, 5) == list(range(5))
    finally:
        assert running.stop() == 0


def test_a_directory_that_every_user_may_write_in_is_refused(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    directory.chmod(0o777)
    said = refusal(directory)
    assert str(directory) in said
    assert "chmod o-w" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused_to_root_too(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    os.chown(directory, 65534, 65534)
    assert "belongs to user" in refusal(directory)
    os.chown(directory, 0, 0)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_files_are_readable_by_their_owner_alone_whatever_the_umask(tmp_path: pathlib.Path, umask: int) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    before = os.umask(0o022)
    log = directory / "tailrace.log"
    log.touch(0o600)
    os.umask(umask)
    try:
        running = start(directory)
    finally:
        os.umask(before)
    try:
        create(running)
        produce(running, 0, 3)
        open_to_others = [str(path) for path in directory.rglob("*") if path != log and path.stat().st_mode & 0o077]
        assert open_to_others == []
        assert read(running, 3) == [0, 1, 2]
    finally:
        assert running.stop() == 0


# ---- limits --------------------------------------------------------------------------------------------------------------------------


def supervise(data_dir: pathlib.Path, *, files: int = 0, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A start that is expected to end by itself, under a limit of open files, with a command before it."""

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    command = [*before, sys.executable, "-P", "-m", "appliance.supervisor", "--data-dir", str(data_dir), "--listen", "tcp://127.0.0.1:0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return subprocess.run(command, preexec_fn=limit, env=environment, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def with_open_files(data_dir: pathlib.Path, log: pathlib.Path, files: int) -> Iterator[str]:
    """A served appliance that may have so many open files; its address."""
    command = [sys.executable, "-P", "-m", "appliance.supervisor", "--data-dir", str(data_dir), "--listen", "tcp://127.0.0.1:0"]
    command += ["--set", "http.listen=", "--set", f"ring_bytes={4 << 20}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)), env=environment, stdout=out, stderr=out
        )
    try:
        wait_until(lambda: " ready " in log.read_text() or process.poll() is not None, "it serves")
        yield re.findall(r"ready address=(\S+)", log.read_text())[0]
    finally:
        process.terminate()
        assert process.wait(30) == 0


def test_64_open_files_end_in_a_sentence(tmp_path: pathlib.Path) -> None:
    ended = supervise(tmp_path, files=64)
    assert ended.returncode == 74
    assert "64 open files are allowed" in ended.stderr
    assert "LimitNOFILE" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_256_open_files_serve_as_many_partitions_as_they_can_and_refuse_more(tmp_path: pathlib.Path) -> None:
    with with_open_files(tmp_path / "data", tmp_path / "log", 256) as address:
        with Admin(address) as admin:
            with pytest.raises(TailraceError, match="partition slots are in use"):
                admin.create_topics([NewTopic("wide", 200)])
            admin.create_topics([NewTopic("narrow", 70)])
        with Producer(address, acks="all") as producer:
            handles = [producer.send("narrow", b"%d" % partition, partition=partition) for partition in range(70)]
            assert all(handle.exception(20) is None for handle in handles)
        with Admin(address) as admin:
            assert admin.describe_cluster()["offline"] == []
    assert "few_open_files allowed=256" in (tmp_path / "log").read_text()


def test_more_partitions_than_open_files_are_refused_at_start_and_served_with_more(tmp_path: pathlib.Path) -> None:
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


def test_a_flusher_out_of_descriptors_waits_takes_nothing_offline_and_goes_on(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)
    try:
        create(running)
        produce(running, 0, 3)
        flusher = children(running)["tr-flusher-0"]
        _, hard = resource.prlimit(flusher, resource.RLIMIT_NOFILE)
        resource.prlimit(flusher, resource.RLIMIT_NOFILE, (1, hard))
        with Admin(running.address, request_timeout_ms=1500) as admin, pytest.raises(Exception, match=r".+"):
            admin.create_topics([NewTopic("other", 4)])
        with Producer(running.address, acks="all") as producer:
            handle = producer.send("orders", b"3")
            resource.prlimit(flusher, resource.RLIMIT_NOFILE, (hard, hard))
            handle.result(20)
        wait_until(lambda: "waiting_logs_opened" in pathlib.Path(running.log_path).read_text(), "the new partitions are opened")
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


def test_shared_memory_removed_by_hand_ends_the_appliance_with_a_sentence(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)
    create(running)
    produce(running, 0, 10)
    for name in shared_memory(running):
        os.unlink(f"/dev/shm/{name}")
    os.kill(children(running)["tr-worker-0"], 9)
    assert running._process.wait(30) == 75
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
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("is_used", [True, False])
def test_a_start_on_a_full_disk_without_its_reserve_ends_in_a_sentence(small_disk: pathlib.Path, is_used: bool) -> None:
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
def test_no_room_for_a_dedicated_worker_is_said_and_it_is_hired_when_there_is(tmp_path: pathlib.Path) -> None:
    """In a mount namespace of its own, with a /dev/shm that holds the appliance and no more."""
    log = tmp_path / "log"
    hold = "mount -t tmpfs -o size=48m tmpfs /dev/shm && exec "
    command = f"{hold}{sys.executable} -P -m appliance.supervisor --data-dir {tmp_path}/data --listen tcp://127.0.0.1:0 --set ring_bytes={4 << 20}"
    command += " --set lane_bytes=1048576 --set ring_descriptors=1024 --set http.listen="
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    with log.open("wb") as file:
        process = subprocess.Popen(["unshare", "-m", "sh", "-c", command], stdout=file, stderr=file, env=environment)
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
            admin.create_topics([NewTopic("other", 1)])
        with Producer(address) as producer:
            producer.send("other", b"x").result(10)
        said = log.read_text().count("no_dedicated_worker")
        inside.unlink()
        with Admin(address) as admin:
            wait_until(lambda: "own" in admin.partition_counts(), "the topic has its worker")
        with Producer(address) as producer:
            producer.send("own", b"x").result(10)
        assert log.read_text().count("no_dedicated_worker") <= said + 1, "it tries in pauses"
    finally:
        process.terminate()
        assert process.wait(30) == 0
