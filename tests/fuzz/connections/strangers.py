"""Strangers at the port of an appliance with users, before any login.

- Bytes: greetings of every mechanism, and commands of CURVE in any order, of right and wrong sizes,
  bent.
- A relay that bends what a real client sends while it logs in: flipped, doubled, cut and exchanged
  bytes. So every stage of the handshake is reached, with boxes that are right up to that byte.
- A disabled user. CURVE lets it in, for its handshake with us is to tell it why it is refused. It
  sends bent requests of every API instead.

A finding is a process that ends or grows beyond its bound, an internal error, or an administrator
who is not answered meanwhile.

`make fuzz FUZZ=strangers SECONDS=600 SEED=1`; a line names the seed of a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import orjson
import zmq

from tailrace import Admin, NewTopic
from tailrace.client.connections.credentials import Credentials, resolve
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import API_VERSIONS, Api
from tests.fuzz.connections.protocol_fuzzer import SETTINGS
from tests.fuzz.connections.watch import Finding, Watch
from tests.fuzz.requests.mutations import mutate_bytes
from tests.fuzz.requests.peer import frame, tcp_address
from tests.kit.appliances.secured import Users, secured
from tests.kit.peers.raw_client import RawClient

MECHANISMS = (b"CURVE", b"CURVE", b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", b"\xff" * 20, b"")
COMMAND = 4
ANSWER_S = 0.2
"""Time that a stranger waits for an answer: there need not be one."""
RELAYED_S = 1.0
SCRIPTS_A_LOOK = 10


def greeting(rng: random.Random) -> bytes:
    made = (
        b"\xff" + bytes(8) + b"\x7f" + bytes([rng.choice((3, 3, 3, 2, 1, 0, 255)), 1])
        + rng.choice(MECHANISMS).ljust(20, b"\0")[:20]
        + bytes([rng.choice((0, 0, 1, 255))]) + bytes(31)
    )  # fmt: skip
    return mutate_bytes(rng, made)[0] if rng.random() < 0.3 else made


def command(rng: random.Random) -> bytes:
    """A command of the handshake with a body of any size."""
    name = rng.choice((b"HELLO", b"HELLO", b"INITIATE", b"READY", b"WELCOME", b"MESSAGE", b"ERROR"))
    size = rng.choice((194, 194, 249, 257, 300, 8, 0, 1, 33, 70_000))
    body = (b"\x01\x00" + bytes(72) + rng.randbytes(120)) if size == 194 else rng.randbytes(size)
    made = frame(bytes([len(name)]) + name + body, rng.choice((COMMAND, COMMAND, COMMAND, 0, 1, 5)))
    return mutate_bytes(rng, made)[0] if rng.random() < 0.4 else made


def bytes_of_a_stranger(address: str, rng: random.Random) -> None:
    with contextlib.suppress(OSError), socket.create_connection(tcp_address(address), 30) as peer:
        peer.settimeout(ANSWER_S)
        begun = greeting(rng)
        peer.sendall(begun[: rng.choice((len(begun), len(begun), rng.randrange(len(begun) + 1)))])
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            if rng.random() < 0.7:
                peer.recv(1 << 16)
            peer.sendall(command(rng))
        peer.recv(1 << 16)


class Relay:
    """Passes one client's bytes on, and bends some of them."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self._target = tcp_address(address)
        self._rng = rng
        self._bends_from = rng.randrange(600)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(30)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            with client, socket.create_connection(self._target, 30) as server:
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                self._bend(client, server)
                back.join()

    def _bend(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if passed + len(data) > self._bends_from and self._rng.random() < 0.8:
                    at = max(0, self._bends_from - passed)
                    data = data[:at] + mutate_bytes(self._rng, data[at:])[0]
                    if self._rng.random() < 0.1:
                        data += data
                passed += len(data)
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(RELAYED_S)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def bent_login(address: str, rng: random.Random, credentials: Credentials) -> None:
    relay = Relay(address, rng)
    with contextlib.suppress(zmq.ZMQError, AssertionError, TailraceError):
        RawClient(relay.address, credentials=credentials, timeout_ms=int(ANSWER_S * 1_000)).close()
    relay.close()


def requests_without_session(address: str, rng: random.Random, credentials: Credentials) -> None:
    client = RawClient(
        address, credentials=credentials, handshake=False, timeout_ms=int(ANSWER_S * 1_000)
    )
    try:
        for _ in range(rng.choice((1, 3, 8))):
            api = rng.choice(list(Api))
            versions = {"versions": {str(int(each)): [1, 1] for each in Api}, "client_id": "x"}
            body = orjson.dumps(versions if api is Api.HANDSHAKE else {"topics": [{"name": "t"}]})
            if rng.random() < 0.6:
                body = mutate_bytes(rng, body)[0]
            with contextlib.suppress(zmq.ZMQError, AssertionError, TailraceError):
                client.versions = {int(each): top for each, (_, top) in API_VERSIONS.items()}
                client.ask(api, body)
    finally:
        client.close()


class Fuzzer:
    """An appliance with users, and what strangers have of it."""

    def __init__(self, users: Users) -> None:
        users.admin.create_topics(NewTopic("t"))
        known = users.add("known", "write topic t")
        disabled = users.add("disabled", "write topic t")
        users.admin.disable_user("disabled")
        self._users = users
        self._known, self._disabled = _credentials(known), _credentials(disabled)
        self._address = users.appliance.address
        self.watch = Watch(users.appliance)

    def play(self, seed: int) -> None:
        """One seed's stranger."""
        rng = random.Random(seed)
        chance = rng.random()
        if chance < 0.5:
            bytes_of_a_stranger(self._address, rng)
        elif chance < 0.85:
            bent_login(self._address, rng, self._known)
        else:
            requests_without_session(self._address, rng, self._disabled)

    def close(self) -> None:
        self.watch.close()

    def look(self) -> list[Finding]:
        """Report what is new, and see that an administrator who logs in now is answered."""
        found = self.watch.look()
        try:
            with Admin(_administrator(self._users)) as admin:
                assert admin.list_topics() == ["t"]
        except (TailraceError, AssertionError) as error:
            found.append(Finding("unanswered", repr(error)))
        return found


def _administrator(users: Users) -> str:
    return f"context:{users.appliance.data_dir}/admin.context#{users.appliance.address}"


def _credentials(address: str) -> Credentials:
    found = resolve(address).credentials
    assert found is not None
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz FUZZ=strangers")
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    given = parser.parse_args(arguments)
    until, played = time.monotonic() + given.seconds, 0
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-strangers-") as directory,
        secured(pathlib.Path(directory), **SETTINGS) as users,
    ):
        fuzzer = Fuzzer(users)
        while time.monotonic() < until:
            for _ in range(SCRIPTS_A_LOOK):
                fuzzer.play((given.seed << 32) + played)
                played += 1
            if findings := fuzzer.look():
                for finding in findings:
                    print(f"seed {given.seed}, up to stranger {played}: {finding}")
                return 1
        fuzzer.close()
        peaks = {name: size >> 20 for name, size in fuzzer.watch.peak_bytes.items()}
    print(f"{played} strangers, no finding; MiB at most: {peaks}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
