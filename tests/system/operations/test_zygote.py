"""One image for all processes: forked by the zygote, kept alive and ended by the supervisor, and
started all the same where there is no zygote.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from shm.runtime.agent_runner import SPEC_VARIABLE
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children, kill_and_wait_for_successor, wait_until

ZYGOTE = "tr-zygote-0"


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    """An appliance of this test's own, with its data in tmp_path."""
    running = start_embedded(data_dir=str(tmp_path / "data"))
    yield running
    running.stop()


def is_forked(pid: int) -> bool:
    """True if a process came from the zygote: an interpreter of its own was executed with the place
    of its specification.
    """
    with open(f"/proc/{pid}/environ", "rb") as file:
        return f"{SPEC_VARIABLE}=".encode() not in file.read()


def workers_of(appliance: EmbeddedAppliance) -> dict[str, int]:
    """The processes that serve."""
    return {name: pid for name, pid in children(appliance).items() if name != ZYGOTE}


def log_of(appliance: EmbeddedAppliance) -> str:
    return pathlib.Path(appliance.log_path).read_text()


def produce_and_consume(appliance: EmbeddedAppliance, topic: str, count: int = 20) -> None:
    with Producer(appliance.address, acks="all") as producer:
        first = producer.send(topic, b"0").result(60).offset or 0
        for number in range(1, count):
            producer.send(topic, b"%d" % number)
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found: list[bytes] = []
        while len(found) < first + count:
            records = consumer.poll(60_000)
            assert records
            found += [record.value for record in records]
    assert found[first:] == [b"%d" % number for number in range(count)]


def open_files(pid: int) -> Counter[str]:
    """Open files of a process, with everything that differs between two runs taken out of the
    names.
    """
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            name = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue  # closed since
        found[
            re.sub(
                r":\[.*|/proc/\d+|.*/data\b|.*-(?=[a-z]+[-.>0-9a-z]*$)",
                "",
                name.removeprefix("anon_inode:"),
            )
        ] += 1
    return found


def test_every_process_is_a_fork_and_the_supervisors_child(own: EmbeddedAppliance) -> None:
    found = workers_of(own)
    assert sorted(found) == [
        "tr-controller-0",
        "tr-flusher-0",
        "tr-front-0",
        "tr-worker-0",
    ]
    assert all(is_forked(pid) for pid in found.values())
    assert {psutil.Process(pid).ppid() for pid in found.values()} == {own.pid}
    produce_and_consume(own, "orders")


@pytest.mark.parametrize("is_second", [False, True])
def test_the_zygote_has_one_thread_and_nothing_of_the_appliance(
    own: EmbeddedAppliance, is_second: bool
) -> None:
    """No lock of the data directory, no shared memory, no socket but the one to the supervisor:
    what it does not have, no fork inherits. The first is a fork of the supervisor, its successor an
    interpreter of its own.
    """
    if is_second:
        kill_and_wait_for_successor(own, ZYGOTE)
        kill_and_wait_for_successor(own, "tr-worker-0")
        assert is_forked(children(own)["tr-worker-0"])
    pid = children(own)[ZYGOTE]
    assert psutil.Process(pid).num_threads() == 1
    assert [(int(fd) > 2) for fd in os.listdir(f"/proc/{pid}/fd")].count(True) == 1
    with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
        maps = file.read()
    assert "/dev/shm" not in maps
    assert own.data_dir not in maps
    assert "pyarrow" not in maps
    assert "numpy" not in maps


def test_forked_processes_have_open_what_others_have(tmp_path: pathlib.Path) -> None:
    """They open a file for a moment now and then, so they are looked at until both have the
    same.
    """
    both: list[EmbeddedAppliance] = []

    def open_files_of(running: EmbeddedAppliance) -> dict[str, Counter[str]]:
        return {name: open_files(pid) for name, pid in workers_of(running).items()}

    try:
        for zygote in ("true", "false"):
            running = start_embedded(
                data_dir=str(tmp_path / zygote / "data"), settings={"zygote": zygote}
            )
            both.append(running)
            assert {is_forked(pid) for pid in workers_of(running).values()} == {zygote == "true"}
            assert (ZYGOTE in children(running)) == (zygote == "true")
        wait_until(
            lambda: open_files_of(both[0]) == open_files_of(both[1]), "both have the same open"
        )
        for running in both:
            produce_and_consume(running, "orders")
    finally:
        stopped = [running.stop() for running in both]
    assert stopped == [0, 0]


def test_a_killed_zygote_is_followed_by_another_and_a_killed_worker_by_a_fork_of_it(
    own: EmbeddedAppliance,
) -> None:
    produce_and_consume(own, "orders")
    before = workers_of(own)
    kill_and_wait_for_successor(own, ZYGOTE)
    assert workers_of(own) == before, "those that it made go on"
    kill_and_wait_for_successor(own, "tr-worker-0")
    produce_and_consume(own, "orders")
    assert is_forked(children(own)["tr-worker-0"])
    kill_and_wait_for_successor(own, "tr-front-0")
    produce_and_consume(own, "orders")
    assert len(re.findall("ended process=zygote .* action=RESTART", log_of(own))) == 1


def test_zygotes_that_end_again_and_again_are_given_up_and_every_process_is_started_all_the_same(
    own: EmbeddedAppliance,
) -> None:
    def is_given_up() -> bool:
        if ZYGOTE in (found := children(own)):
            os.kill(found[ZYGOTE], signal.SIGKILL)
        return "no_zygote" in log_of(own)

    wait_until(is_given_up, "the supervisor has had enough")
    for victim in ("tr-worker-0", "tr-front-0"):
        kill_and_wait_for_successor(own, victim)
        wait_until(
            lambda name=victim: not is_forked(children(own)[name]),  # type: ignore[misc]
            f"{victim} is an interpreter of its own",
        )
        produce_and_consume(own, "orders")
    assert ZYGOTE not in children(own)
    assert log_of(own).count("no_zygote") == 1


def test_everything_ends_with_a_killed_supervisor(own: EmbeddedAppliance) -> None:
    kill_and_wait_for_successor(own, "tr-worker-0")
    pids = children(own)
    assert ZYGOTE in pids
    os.kill(own.pid, signal.SIGKILL)
    wait_until(
        lambda: not any(psutil.pid_exists(pid) for pid in pids.values()),
        "all die with the supervisor",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_does_not_end_the_zygote(
    own: EmbeddedAppliance, number: int
) -> None:
    """A terminal's Ctrl-C, or its end: the supervisor stops everything in order."""
    before = children(own)[ZYGOTE]
    os.kill(before, number)
    kill_and_wait_for_successor(own, "tr-worker-0")
    produce_and_consume(own, "orders")
    assert is_forked(children(own)["tr-worker-0"])
    assert children(own)[ZYGOTE] == before


def test_a_stop_leaves_no_process(own: EmbeddedAppliance) -> None:
    pids = children(own)
    assert own.stop() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert "zygote" not in log_of(own) if pathlib.Path(own.log_path).exists() else True


def test_each_of_two_appliances_has_a_zygote_and_the_end_of_one_is_not_the_others(
    tmp_path: pathlib.Path,
) -> None:
    first, second = (start_embedded(data_dir=str(tmp_path / name)) for name in ("first", "second"))
    try:
        theirs = children(second)
        assert children(first)[ZYGOTE] != theirs[ZYGOTE]
        kill_and_wait_for_successor(first, ZYGOTE)
        os.kill(first.pid, signal.SIGKILL)
        first.stop()
        assert children(second) == theirs
        produce_and_consume(second, "orders")
    finally:
        assert second.stop() == 0


def test_processes_that_are_started_when_first_needed_are_forks(own: EmbeddedAppliance) -> None:
    """That of groups, and a dedicated worker."""
    with Admin(own.address) as admin:
        admin.create_topics(
            [NewTopic("orders"), NewTopic("alone", 1, {"worker.dedicated": "true"})]
        )
    produce_and_consume(own, "alone")
    with Consumer("orders", bootstrap=own.address, group_id="g") as consumer:
        consumer.poll(1)
        wait_until(lambda: {"tr-groups-0", "tr-worker-1"} <= set(children(own)), "they are started")
        found = children(own)
    assert is_forked(found["tr-groups-0"])
    assert is_forked(found["tr-worker-1"])
    kill_and_wait_for_successor(own, "tr-groups-0")
    with Consumer("orders", bootstrap=own.address, group_id="g") as consumer:
        consumer.poll(1)
        assert consumer.assignment() is not None


def test_orphans_of_the_appliances_processes_are_collected(own: EmbeddedAppliance) -> None:
    """The supervisor is the parent of whatever its descendants leave: none stays a zombie."""
    assert all(
        child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(own.pid).children()
    )
    kill_and_wait_for_successor(own, "tr-worker-0")
    wait_until(
        lambda: all(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(own.pid).children()), "no zombie is left"  # noqa: E501
    )  # fmt: skip


def test_names_and_command_lines_are_those_of_an_interpreter_of_its_own(
    own: EmbeddedAppliance,
) -> None:
    modules = {
        "tr-controller-0": "appliance.control.controller", "tr-flusher-0": "workers.flush.flusher",
        "tr-front-0": "netfront.front",
        "tr-scheduler-0": "workers.delays.scheduler", "tr-worker-0": "workers.append.worker",
    }  # fmt: skip
    for name, pid in workers_of(own).items():
        shown = [argument for argument in psutil.Process(pid).cmdline() if argument]
        assert shown[1] == "-I"
        assert shown[3:] == [modules[name]]
