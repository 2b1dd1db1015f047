"""Strangers at the port of an appliance with users: what they send changes nothing, whatever it is
and however often.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from netfront.socket.zap import claim_of
from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import NotAuthenticatedError
from tailrace.embedded_appliance import start_embedded
from tests.kit.appliances.secured import Users, admin_address, secured
from tests.kit.processes import wait_until

CURVE_GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + bytes([3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)
)
MEMORY_MAX = 50 << 20


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    with secured(tmp_path_factory.mktemp("strangers")) as found:
        found.admin.create_topics([NewTopic("orders")])
        yield found


def place_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def front_of(users: Users) -> psutil.Process:
    supervisor = psutil.Process(users.appliance.pid)
    (found,) = (
        child
        for child in supervisor.children(recursive=True)
        if child.name() == "tr-front-0" or "tr-front-0" in " ".join(child.cmdline())
    )
    return found


class Tap:
    """A relay that keeps every byte that its only client sends."""

    def __init__(self, address: str) -> None:
        self._target = place_of(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = bytearray()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._copy, args=(server, client, None), daemon=True)
            back.start()
            self._copy(client, server, self.sent)
            back.join()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if kept is not None:
                    kept += data
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self._thread.join()


def test_a_recorded_session_that_is_sent_once_more_does_nothing(users: Users) -> None:
    """Each connection has keys of its own: what was recorded opens nothing later."""
    context = users.add("recorded", "write topic orders")
    tap = Tap(users.appliance.address)
    with Producer(f"{context}#{tap.address}") as producer:
        assert producer.send("orders", b"once").result(60).offset == 0
    tap.close()
    assert len(tap.sent) > 500
    for data in (tap.sent, tap.sent[64:], tap.sent + tap.sent):
        with (
            socket.create_connection(place_of(users.appliance.address), 60) as stranger,
            contextlib.suppress(OSError),
        ):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    with Producer(context) as producer:
        assert producer.send("orders", b"next").result(60).offset == 1, "nothing lies between"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: tailrace\r\n\r\n",
        b"POST /api/login HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + bytes(4_096),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        CURVE_GREETING.replace(b"CURVE", b"NULL\0") + b"\x04\x19\x05READY\x0bSocket-Type"
        b"\x00\x00\x00\x06DEALER",
    ],
    ids=["http", "a post", "tls", "plain zmtp"],
)
def test_other_protocols_at_the_encrypted_port_are_closed(users: Users, data: bytes) -> None:
    with (
        socket.create_connection(place_of(users.appliance.address), 60) as stranger,
        contextlib.suppress(ConnectionError),
    ):
        stranger.sendall(data)
        answer = b""
        while piece := stranger.recv(4096):
            answer += piece
        assert b"TRRQ" not in answer
        assert len(answer) <= 64, "the greeting of ZMTP at most"
    assert users.admin.list_topics()


def test_a_request_of_another_zap_domain_or_version_is_no_claim() -> None:
    """Another socket of the process would ask with its own domain."""
    request = [b"1.0", b"1", b"tailrace", b"10.0.0.1", b"", b"CURVE", bytes(32)]
    assert claim_of(request) is not None
    for place, other in (
        (0, b"2.0"), (2, b""), (2, b"global"), (2, b"tailrace\0"), (5, b"PLAIN"), (6, bytes(31)),
    ):  # fmt: skip
        assert claim_of([*request[:place], other, *request[place + 1 :]]) is None


def _half_handshakes(users: Users, user: str, count: int, at_once: int) -> None:
    """Connections that begin a handshake and never end it, while a producer goes on."""
    place, held = place_of(users.appliance.address), list[socket.socket]()
    context = users.add(user, "write topic orders")
    front = front_of(users)
    with Producer(context) as producer:
        producer.send("orders", b"before").result(60)
        before = front.memory_info().rss
        for number in range(count):
            stranger = socket.create_connection(place, 60)
            stranger.sendall(CURVE_GREETING + (b"\x04\xc8\x05HELLO" if number % 2 else b""))
            held.append(stranger)
            if len(held) == at_once:
                producer.send("orders", b"between").result(60)
                for one in held:
                    one.close()
                held.clear()
        producer.send("orders", b"after").result(60)
        assert front.memory_info().rss - before < MEMORY_MAX
    for one in held:
        one.close()


def test_half_handshakes_take_bounded_memory_and_hold_nobody_up(users: Users) -> None:
    _half_handshakes(users, "steady", 600, 200)


@pytest.mark.long
def test_ten_thousand_half_handshakes_take_bounded_memory(users: Users) -> None:
    _half_handshakes(users, "steadier", 10_000, 500)


def lose(directory: pathlib.Path) -> None:
    for path in directory.glob("coordinator.db*"):
        path.unlink()


def damage(directory: pathlib.Path) -> None:
    """Overwrite all of the catalog but its first page."""
    path = directory / "coordinator.db"
    content = path.read_bytes()
    assert len(content) > 8_192
    path.write_bytes(content[:4_096] + b"\x5a" * (len(content) - 4_096))


@pytest.mark.parametrize("harm", [lose, damage])
def test_a_lost_or_damaged_catalog_lets_nobody_in_but_the_owner_of_the_directory(
    tmp_path: pathlib.Path, harm: Callable[[pathlib.Path], None]
) -> None:
    settings = {"security.enabled": "true"}
    directory = tmp_path / "data"
    appliance = start_embedded(data_dir=str(directory), settings=settings)
    try:
        users = Users(appliance, tmp_path)
        users.admin.create_topics([NewTopic("orders")])
        context = users.add("known", "write topic orders")
        with Producer(context) as producer:
            producer.send("orders", b"x").result(60)
        users.close()
    finally:
        appliance.stop()
    harm(directory)
    appliance = start_embedded(data_dir=str(directory), settings=settings)
    try:
        with (
            Admin(f"{context}#{appliance.address}", connect_timeout_ms=60_000) as admin,
            pytest.raises(NotAuthenticatedError, match="does not know the key"),
        ):
            admin.list_topics()
        with Admin(admin_address(appliance)) as admin:
            assert admin.list_topics() == ["orders"]
            assert [user["name"] for user in admin.list_users()] == ["admin"]
            public = _public_key(context)
            admin.add_user("known", public_key=public)
        with Admin(f"{context}#{appliance.address}") as admin:
            wait_until(lambda: admin.list_topics() == [], "the user is known, without its rules")
    finally:
        appliance.stop()


def _public_key(context: str) -> str:
    from tailrace.client.connections.credentials import resolve

    found = resolve(context).credentials
    assert found is not None
    return found.public_key


def test_whoever_connects_while_the_catalog_cannot_be_read_is_told_so(
    tmp_path: pathlib.Path,
) -> None:
    directory = tmp_path / "data"
    appliance = start_embedded(data_dir=str(directory), settings={"security.enabled": "true"})
    try:
        users = Users(appliance, tmp_path)
        context = users.add("known")
        content = (directory / "coordinator.db").read_bytes()
        damage(directory)
        with (
            Admin(context, connect_timeout_ms=60_000) as admin,
            pytest.raises(NotAuthenticatedError, match="cannot read its users"),
        ):
            admin.list_topics()
        (directory / "coordinator.db").write_bytes(content)
        wait_until(lambda: reads(context), "the users can be read again")
    finally:
        appliance.stop()


def reads(context: str) -> bool:
    try:
        with Admin(context) as admin:
            return admin.list_topics() == []
    except NotAuthenticatedError:
        return False
