"""A host that runs short: of open files, memory, shared memory, or of patience with connections.
(Full disks: test_durability.)

For each: who is refused, and with what; a client that is connected goes on; and when the pressure
ends everything is as before, without a restart.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import NotReachableError, RequestTimeoutError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.fuzz.connections.watch import private_bytes
from tests.fuzz.requests import conversations
from tests.fuzz.requests.peer import GREETING, READY, Peer, message, tcp_address
from tests.fuzz.requests.world import World
from tests.kit.processes import HANG_LIMIT_S, children, kill_and_wait_for_successor, wait_until

SMALL: dict[str, Any] = {
    "ring_bytes": 4 << 20,
    "ring_descriptors": 4096,
    "lane_bytes": 1 << 20,
    "credit_bytes": 4 << 20,
    "journal_bytes": 4 << 20,
    "slots": 1024,
}
IDLE_CONNECTIONS = 10_000
FLEETING_CONNECTIONS = 3_000
FLEETING_PER_S = 1_000
FRONT_MAX_BYTES = 512 << 20
MEMORY_LIMIT_BYTES = 384 << 20

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def start_under(directory: pathlib.Path, before: str, **settings: Any) -> EmbeddedAppliance:
    """An appliance that a shell starts after these commands: limits, cgroups and mounts of
    its own.
    """
    shell = directory / "start.sh"
    shell.write_text(f'#!/bin/sh\nset -e\n{before}\nexec {sys.executable} "$@"\n')
    shell.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(shell))
        return start_embedded(
            data_dir=str(directory / "data"),
            settings={**SMALL, **settings},
            auto_create_topics=False,
        )


class Steady:
    """A client that is connected before the pressure begins, and what every process's id was
    then.
    """

    def __init__(self, appliance: EmbeddedAppliance) -> None:
        self.appliance = appliance
        with Admin(appliance.address) as admin:
            admin.create_topics([NewTopic("steady")])
        self.pids = children(appliance)
        self._producer = Producer(appliance.address, acks="all")
        self._consumer = Consumer(bootstrap=appliance.address, auto_offset_reset="earliest")
        self._consumer.assign([TopicPartition("steady", 0)])
        self._count = 0
        self.goes_on()

    def goes_on(self, count: int = 50) -> None:
        """Send records, and read each of them once, in order."""
        handles = [
            self._producer.send("steady", b"%d" % number)
            for number in range(self._count, self._count + count)
        ]
        assert [handle.result(60).offset for handle in handles] == list(
            range(self._count, self._count + count)
        )
        found: list[bytes | None] = []
        while len(found) < count:
            records = self._consumer.poll(60_000)
            assert records, f"{len(found)} of {count} records came"
            found += [record.value for record in records]
        assert found == [b"%d" % number for number in range(self._count, self._count + count)]
        self._count += count

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()


@contextlib.contextmanager
def steady(running: EmbeddedAppliance, *, lost: tuple[str, ...] = ()) -> Iterator[Steady]:
    """A client for the block; behind it nothing is offline, and no process but `lost` has ended."""
    client = None
    try:
        client = Steady(running)
        yield client
        with Admin(running.address) as admin:
            wait_until(
                lambda: not admin.describe_cluster()["offline"],
                "every partition takes writes again",
            )
        now = children(running)
        assert {name: now.get(name) for name in client.pids if name not in lost} == {
            n: pid for n, pid in client.pids.items() if n not in lost
        }
    finally:
        if client is not None:
            client.close()
        running.stop()


def connect(address: str, said: bytes) -> socket.socket | None:
    """A connection on which this was said and something was heard; None when the appliance takes no
    more.
    """
    try:
        made = socket.create_connection(tcp_address(address), 5)
    except OSError:
        return None
    try:
        made.sendall(said)
        if made.recv(len(GREETING)):
            return made
    except OSError:
        pass
    made.close()
    return None


@contextlib.contextmanager
def idle_connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Peers that greet, and never say another word."""
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            one = connect(address, GREETING)
            if one is None:
                break
            made.append(one)
        yield made
    finally:
        for one in made:
            one.close()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_served(address: str) -> bool:
    """True if a new client is taken."""
    with Admin(address, request_timeout_ms=3_000) as admin:
        try:
            return bool(admin.describe_cluster()["processes"])
        except (NotReachableError, RequestTimeoutError):
            return False


def started_or_refused(directory: pathlib.Path, limit: int) -> EmbeddedAppliance | None:
    """An appliance with so many open files; None when it has refused to start with a sentence about
    them.
    """
    try:
        return start_under(directory, f"ulimit -n {limit}")
    except NotReachableError as error:
        sentence = str(error)
    assert "open files" in sentence
    return None


@pytest.mark.parametrize("limit", [64, 256])
def test_few_open_files_refuse_new_connections_before_files_and_take_no_partition_offline_for_good(
    tmp_path: pathlib.Path, limit: int
) -> None:
    running = started_or_refused(tmp_path, limit)
    if running is None:
        return
    with (
        steady(running) as client,
        Admin(running.address) as admin,
        Consumer(bootstrap=running.address, auto_offset_reset="earliest") as reader,
    ):
        fill(admin, running, "cold", 1)
        reader.assign([TopicPartition("steady", 0)])
        assert reader.poll(60_000)
        with idle_connections(running.address, 2 * limit):
            client.goes_on()
            reader.assign([TopicPartition("cold", 0)])  # the front has not opened its files yet
            assert reader.poll(60_000), "descriptors are kept for files"
            fill(admin, running, "made-meanwhile", 1, admin_only=True)
        wait_until(
            lambda: is_served(running.address), "a client is taken when the others have gone"
        )
        names = [
            "wide-0",
            "wide-1",
            "wide-2",
        ]  # more partitions than files: two are needed for each
        for name in names:
            with contextlib.suppress(TailraceError):
                admin.create_topics([NewTopic(name, limit // 5)])
        client.goes_on()
        for name in names[:2]:
            wait_until(
                lambda name=name: name not in admin.list_topics() or is_deleted(admin, name),  # type: ignore[misc]
                f"{name} is deleted",
            )
        fill(admin, running, "wide-2", limit // 5)
        client.goes_on()


def fill(
    admin: Admin,
    running: EmbeddedAppliance,
    topic: str,
    partitions: int,
    *,
    admin_only: bool = False,
) -> None:
    """Have a topic, and a record in each of its partitions: what was refused for want of something
    is taken in the end.
    """
    wait_until(
        lambda: topic in admin.list_topics() or retried(admin, NewTopic(topic, partitions)),
        f"{topic} can be made",
    )
    if admin_only:
        return
    with Producer(running.address, acks="all") as producer:
        for partition in range(partitions):
            wait_until(
                lambda partition=partition: (  # type: ignore[misc]
                    producer.send(topic, b"x", partition=partition).exception(30) is None
                ),
                "it is written",
            )


def is_deleted(admin: Admin, topic: str) -> bool:
    try:
        admin.delete_topics([topic])
    except TailraceError:
        return False
    return True


def retried(admin: Admin, topic: NewTopic) -> bool:
    """True if a topic that was refused is taken now."""
    try:
        admin.create_topics([topic])
    except TailraceError:
        return False
    return True


@pytest.fixture
def memory_group() -> Iterator[pathlib.Path]:
    """A cgroup of the test's own below the one that it runs in, with a limit of memory."""
    mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
    mine = dict(
        line.split(":", 2)[1:]
        for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    )
    first = next((m[1] for m in mounts if m[2] == "cgroup" and "memory" in m[3].split(",")), None)
    second = next((m[1] for m in mounts if m[2] == "cgroup2"), None)
    base, limit = (
        (f"{first}{mine.get('memory', '/')}", "memory.limit_in_bytes")
        if first
        else (f"{second}{mine.get('', '/')}", "memory.max")
    )
    group = pathlib.Path(base) / f"tailrace-test-{os.urandom(4).hex()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip(f"{base} gives its cgroups no memory controller")
        (group / limit).write_text(str(MEMORY_LIMIT_BYTES))
        yield group
    finally:
        wait_until(
            lambda: not (group / "cgroup.procs").read_text(), "what ran in the cgroup has ended"
        )
        group.rmdir()


HOG = """
import os, sys
group, victim = sys.argv[1:]
open("/proc/self/oom_score_adj", "w").write("-1000")
open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
held = []
try:
    while open(f"/proc/{victim}/stat").read().split(") ")[1][0] not in "ZX" and len(held) < 200:
        held.append(b"x" * (2 << 20))
except (FileNotFoundError, ProcessLookupError):
    pass  # it is gone
"""


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("victim", ["tr-worker-0", "tr-front-0"])
def test_a_process_that_the_kernel_kills_for_memory_comes_back_and_nothing_is_lost(
    tmp_path: pathlib.Path, memory_group: pathlib.Path, victim: str
) -> None:
    running = start_under(tmp_path, f"echo $$ > {memory_group}/cgroup.procs")
    with steady(running, lost=(victim,)) as client:
        pid = client.pids[victim]
        pathlib.Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        # A neighbour in the same cgroup, whom the kernel spares, takes all that is left. While the
        # victim is dying, and nobody else may be killed, the kernel may end the neighbour, too:
        # that is no matter of the appliance.
        done = subprocess.run(
            [sys.executable, "-c", HOG, str(memory_group), str(pid)],
            check=False,
            timeout=HANG_LIMIT_S,
        )
        assert done.returncode in (0, -signal.SIGKILL)
        wait_until(
            lambda: children(running).get(victim, pid) != pid, f"{victim} is killed and restarted"
        )
        client.goes_on()
        with Admin(running.address) as admin:
            assert {
                p["name"]: p["restarts"] > 0
                for p in admin.describe_cluster()["processes"]
                if p["restarts"] > 0
            } == {process_of(victim): True}


def process_of(comm_name: str) -> str:
    return comm_name.removeprefix("tr-")


@pytest.mark.root
@needs_root
def test_full_shared_memory_refuses_what_needs_more_of_it_and_disturbs_nothing_else(
    tmp_path: pathlib.Path,
) -> None:
    try:
        subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace can be made here: {error}")
    # In a namespace of its own, so that nothing else on this host runs short.
    inside = (
        '[ "$INSIDE" ] || { export INSIDE=1; exec unshare -m "$0" "$@"; }\nmount -t tmpfs -o '
        "size=256m tmpfs /dev/shm\nunset INSIDE"
    )
    running = start_under(tmp_path, inside)
    filler = pathlib.Path(f"/proc/{running.pid}/root/dev/shm/filler")
    with steady(running, lost=("tr-worker-0",)) as client:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        client.goes_on()
        with Admin(running.address) as admin:
            with pytest.raises(TailraceError) as caught:
                admin.create_topics([NewTopic("own-worker", 1, {"worker.dedicated": True})])
            assert not isinstance(caught.value, RequestTimeoutError), "it is answered, with a code"
            kill_and_wait_for_successor(running, "tr-worker-0")
            client.goes_on()
            filler.unlink()
            wait_until(
                lambda: (
                    "own-worker" in admin.list_topics()
                    or retried(admin, NewTopic("own-worker", 1, {"worker.dedicated": True}))
                ),
                "there is room",
            )
        with Producer(running.address, acks="all") as producer:
            assert producer.send("own-worker", b"x").result(HANG_LIMIT_S).offset == 0
        client.goes_on()


@pytest.fixture
def many_files() -> Iterator[int]:
    """As many open files as this user may have; returns how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield min(IDLE_CONNECTIONS, hard - 300)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_idle_connections_cost_no_client_its_service(
    tmp_path: pathlib.Path, many_files: int
) -> None:
    running = start_under(tmp_path, "true")
    with steady(running) as client:
        front = client.pids["tr-front-0"]
        before = open_files(front)
        with idle_connections(running.address, many_files) as idle:
            assert len(idle) > min(1_000, many_files // 2), (
                "whoever is refused is refused after he was taken"
            )
            client.goes_on()
            assert private_bytes(front) < FRONT_MAX_BYTES
        wait_until(lambda: open_files(front) <= before + 5, "the front has let go of all of them")
        assert is_served(running.address)
        client.goes_on()


@pytest.mark.long
def test_a_thousand_connections_a_second_that_come_and_go_cost_no_client_its_service(
    tmp_path: pathlib.Path,
) -> None:
    running = start_under(tmp_path, "true")
    request = conversations.handshake(random.Random(0), World(0))
    shake = message([request.header(), *request.body])
    with steady(running) as client:
        front = client.pids["tr-front-0"]
        files, memory = open_files(front), private_bytes(front)
        begun_s = time.monotonic()
        for number in range(FLEETING_CONNECTIONS):
            made = connect(running.address, GREETING)
            if made is not None:
                with made, contextlib.suppress(OSError):
                    made.sendall(READY + shake)
            if number % 500 == 499:
                client.goes_on(5)
            # A load, not a synchronisation: connections come at FLEETING_PER_S, no faster.
            time.sleep(max(0.0, begun_s + number / FLEETING_PER_S - time.monotonic()))
        wait_until(lambda: open_files(front) <= files + 5, "the front has let go of all of them")
        assert private_bytes(front) < memory + (64 << 20)
        late = Peer(running.address)
        with contextlib.closing(late):
            late.send([request.header(), *request.body])
            wait_until(lambda: bool(late.receive()), "somebody new is answered")
        client.goes_on()
