"""Restarts that an operator asks for, with clients at work: nothing fails, nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from appliance.cli.options.appliance_control import ask
from appliance.data.format_versions import FORMATS
from appliance.supervise.processes import zygote
from appliance.supervise.processes.next_zygote import ZYGOTE_VARIABLE
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import (
    InvalidRequestError,
    RequestTimeoutError,
    TopicExistsError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.directory.data_dir import CONTROL_SOCKET
from tailrace.protocol.frame import Api
from tests.kit.cli import run
from tests.kit.hosts.ports import free_port
from tests.kit.processes import HANG_LIMIT_S, children, kill_and_wait_for_successor, wait_until

PARTITIONS = 3


class Clients:
    """A producer, a consumer group's member and an administrator, each in a thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._stop_reading = threading.Event()
        self.failures: list[BaseException] = []
        self.sent_count = self.asked_count = 0
        self.read: list[int] = []
        self._reader = threading.Thread(target=self._guarded, args=(self._read,))
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._send, self._ask)
        ]
        for thread in (self._reader, *self._threads):
            thread.start()

    def _guarded(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            self.failures.append(error)

    def _send(self) -> None:
        with Producer(self._address, acks="all", linger_ms=0) as producer:
            while not self._stop.is_set():
                producer.send("orders", b"%d" % self.sent_count).result(HANG_LIMIT_S)
                self.sent_count += 1

    def _ask(self) -> None:
        """Create and delete topics. One change that is under way while the controller ends has an
        unknown outcome, which the client is told.
        """
        with Admin(self._address) as admin:
            while not self._stop.is_set():
                name = f"made-{self.asked_count}"
                self.asked_count += 1
                with contextlib.suppress(RequestTimeoutError, UnknownTopicError):
                    admin.create_topics(NewTopic(name, 1))
                    assert admin.describe_topics(name)[name]["partitions"]
                    admin.delete_topics(name)

    def _read(self) -> None:
        with Consumer(
            "orders", bootstrap=self._address, group_id="readers", auto_offset_reset="earliest"
        ) as consumer:
            while not self._stop_reading.is_set():
                self.read += [int(record.value or b"") for record in consumer.poll(50)]

    def go_on(self) -> None:
        """Wait until each of them has done something more, or failed."""
        sent_count, asked_count, read_count = self.sent_count, self.asked_count, len(self.read)
        wait_until(
            lambda: (
                (
                    self.sent_count > sent_count
                    and self.asked_count > asked_count
                    and len(self.read) > read_count
                )
                or bool(self.failures)
            ),
            "clients go on",
        )

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._stop_reading.set()
        for thread in (*self._threads, self._reader):
            thread.join()

    def finish(self) -> None:
        """Stop sending, read the rest, and check everything."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        wait_until(lambda: len(self.read) >= self.sent_count or bool(self.failures), "all is read")
        assert not self.failures, self.failures
        assert sorted(self.read) == list(range(self.sent_count))


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    """An appliance of this test's own, on a port that it keeps."""
    running = start_embedded(
        data_dir=str(tmp_path / "data"), listen=f"tcp://127.0.0.1:{free_port()}"
    )
    with Admin(running.address) as admin:
        admin.create_topics(NewTopic("orders", PARTITIONS))
    yield running
    assert running.stop() == 0


def test_every_process_is_restarted_and_no_record_is_lost_or_refused(
    own: EmbeddedAppliance,
) -> None:
    with Clients(own.address) as clients:
        wait_until(lambda: len(clients.read) > 0 and clients.asked_count > 0, "clients are at work")
        before = children(own)
        printed = json.loads(run(own, "restart", "--json").stdout)
        after = children(own)
        clients.go_on()
        clients.finish()
    assert [row["process"] for row in printed["restarted"]] == [
        "front-0", "worker-0", "flusher-0", "groups-0", "controller",
    ]  # fmt: skip
    for name, pid in after.items():
        assert (pid == before[name]) == (name == "tr-zygote-0"), name


def test_the_installed_version_takes_the_place_of_the_running_one(own: EmbeddedAppliance) -> None:
    with Clients(own.address) as clients:
        wait_until(lambda: len(clients.read) > 0, "clients are at work")
        before = children(own)
        printed = json.loads(run(own, "upgrade", "--json").stdout)
        clients.go_on()
        clients.finish()
    assert printed["formats"] == []
    after = children(own)
    assert not set(before.values()) & set(after.values())
    begun = {name: psutil.Process(pid).create_time() for name, pid in after.items()}
    assert min(begun, key=lambda name: begun[name]) == "tr-zygote-0"
    assert psutil.Process(after["tr-zygote-0"]).ppid() == own.pid
    assert ZYGOTE_VARIABLE not in psutil.Process(after["tr-worker-0"]).environ()
    with open(f"/proc/{own.pid}/comm", encoding="ascii") as file:
        assert file.read() == "tr-supervisor-0\n"


def test_an_upgrade_whose_next_zygote_is_killed_makes_another(own: EmbeddedAppliance) -> None:
    """It is killed while it imports, before anything stops: the next one is a fork."""
    former = children(own)["tr-zygote-0"]
    ended = threading.Event()

    def kill_next() -> None:
        while not ended.is_set():
            for child in psutil.Process(own.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid != former and zygote.MODULE in child.cmdline():
                        child.kill()
                        return

    killer = threading.Thread(target=kill_next)
    killer.start()
    try:
        run(own, "upgrade", "--json")
    finally:
        ended.set()
        killer.join()
    assert set(children(own)) >= {"tr-zygote-0", "tr-front-0", "tr-worker-0", "tr-flusher-0"}
    with Producer(own.address) as producer:
        producer.send("orders", b"x").result(HANG_LIMIT_S)


def test_one_process_is_chosen_by_its_name_or_kind(own: EmbeddedAppliance) -> None:
    before = children(own)
    assert b"1/1  worker-0 serves after " in run(own, "restart", "worker").stdout
    assert b"1/1  front-0 serves" in run(own, "restart", "tr-front-0").stdout
    after = children(own)
    changed = {name for name, pid in after.items() if before[name] != pid}
    assert changed == {"tr-worker-0", "tr-front-0"}
    assert restarts(own) == {}, "doctor warns of those that nobody asked for"
    kill_and_wait_for_successor(own, "tr-worker-0")
    assert restarts(own) == {"worker-0": 1}


def restarts(appliance: EmbeddedAppliance) -> dict[str, int]:
    with Admin(appliance.address) as admin:
        processes = admin.describe_cluster()["processes"]
    return {p["name"]: p["restarts"] for p in processes if p["restarts"]}


def test_wrong_commands_are_refused_with_a_sentence(own: EmbeddedAppliance) -> None:
    refused = run(own, "restart", "worker-7", status=1).stderr.decode()
    assert "there is no process worker-7; there are front-0, worker-0, flusher-0" in refused
    for line, expected in (
        (b"what\n", "a command is one line with a JSON object"),
        (b"[]\n", "a command is one line with a JSON object"),
        (b'{"command": "dance"}\n', "there is no command 'dance'"),
        (b'{"command": "restart", "processes": "all"}\n', "processes is a list of names"),
        (b"x" * (1 << 20), ""),
        (b"", ""),
    ):
        answer = said(own, line)
        assert (json.loads(answer)["error"] if expected else answer.decode()) == expected
    assert len(list(ask(own.data_dir, {"command": "describe"}))) == 1


def test_an_appliance_on_another_host_is_not_restarted(tmp_path: pathlib.Path) -> None:
    printed = run(None, "restart", "--data-dir", str(tmp_path), status=3).stderr.decode()
    assert f"no appliance of this host serves {tmp_path}" in printed


def test_a_directory_with_a_long_path_has_a_control_socket(tmp_path: pathlib.Path) -> None:
    path = tmp_path / ("d" * 200)
    running = start_embedded(data_dir=str(path))
    try:
        assert [row["serves"] for row in ask(str(path), {"command": "describe"})] == [True]
    finally:
        assert running.stop() == 0
    assert not os.path.lexists(path / CONTROL_SOCKET)


def test_a_directory_that_a_later_version_opened_is_refused_with_the_formats(
    tmp_path: pathlib.Path,
) -> None:
    program = (
        "import sys; from appliance.data import format_versions as f; "
        "f.__version__ = '9.9'; f.FORMATS |= {'groups.db': 99, 'moon.db': 1}; f.record(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path)], check=True)
    tmp_path.chmod(0o700)
    done = run(None, "serve", "--data-dir", str(tmp_path), status=73, is_process=True)
    assert b"was opened by Tailrace 9.9" in done.stderr
    known = FORMATS["groups.db"]
    expected = f"groups.db 99 (known here: {known}), moon.db 1 (known here: none)"
    assert expected.encode() in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {
        "formats.json", "instance.json", "instance.json.copy", "instance.lock",
    }  # fmt: skip


def test_a_repeated_request_for_a_topic_gets_the_topic_that_it_has_made(
    own: EmbeddedAppliance,
) -> None:
    """A restart loses answers: the client repeats the request."""
    request = NewTopic("twice", 1).request()
    with Admin(own.address) as admin:

        def create(changed: dict[str, object]) -> None:
            admin._run_steps(admin._change(Api.CREATE_TOPICS, [{**request, **changed}]))

        create({})
        create({})
        assert admin.topic_info("twice")["twice"].topic_id.hex() == request["topic_id"]
        with pytest.raises(TopicExistsError):
            create({"topic_id": "12" * 16})
        with pytest.raises(InvalidRequestError, match="another topic has this topic_id"):
            create({"name": "thrice"})
        for wrong in ("", "00" * 16, "zz" * 16, 7, ["12"], "12" * 17):
            with pytest.raises(InvalidRequestError, match="32 hexadecimal digits"):
                create({"name": "thrice", "topic_id": wrong})


def said(running: EmbeddedAppliance, line: bytes) -> bytes:
    """The answer to some bytes on the control socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(HANG_LIMIT_S)
        connection.connect(f"{running.data_dir}/{CONTROL_SOCKET}")
        try:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as file:
                return file.readline()
        except (BrokenPipeError, ConnectionResetError):
            return b""
