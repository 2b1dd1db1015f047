"""Promises of every transport of a front (`netfront.socket.transport.Transport`): the real one over
ZeroMQ, and the simulated one that schedules are played on.
"""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pytest
import zmq

from netfront.socket.flow_control import Credit
from netfront.socket.peers.connections import Limits
from netfront.socket.router import Router
from netfront.socket.transport import Transport
from tests.kit.processes import wait_until
from tests.sim.machine.network import Network, SimSocket

MIB = 1 << 20
LIMITS = Limits(
    connections_max=100,
    unshaken_peer_max=MIB,
    unshaken_max=2 * MIB,
    untaken_max=8 * MIB,
    unsent_max=64 * MIB,
    memory_growth_max=512 * MIB,
)
TIMEOUT_MS = 30_000


class Client(Protocol):
    """A DEALER's end."""

    def send(self, *frames: bytes) -> None: ...
    def receive(self) -> list[bytes]: ...
    def close(self) -> None: ...


class Bench:
    """A transport, and clients of it."""

    def __init__(
        self,
        transport: Transport,
        connect: Callable[[], Client],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake`: what the front's loop does before a step, for this transport."""
        self.transport = transport
        self.connect = connect
        self._wake = wake
        self.ended: list[bytes] = []
        """Identities that the transport has said to have ended."""

    def receive(self) -> list[bytes]:
        """The next message; it comes."""
        found: list[list[bytes]] = []

        def is_there() -> bool:
            self.watch()
            message = self.transport.try_receive()
            if message is not None:
                found.append(message)
            return bool(found)

        wait_until(is_there, "a message comes")
        return found[0]

    def watch(self) -> None:
        """Have the transport watch for connections that have ended, at the time that it wants."""
        self._wake()
        now_ns = time.monotonic_ns()
        if now_ns >= self.transport.watch_at_ns:
            self.ended += self.transport.watch(now_ns).ended

    def greet(self) -> tuple[Client, bytes]:
        """A client with a session, and its identity."""
        client = self.connect()
        client.send(b"hello")
        identity, hello = self.receive()
        assert hello == b"hello"
        self.transport.shaken(identity, Credit())
        return client, identity


class RealClient:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> list[bytes]:
        return self._socket.recv_multipart()

    def close(self) -> None:
        """Close; what was sent still leaves."""
        self._socket.close(TIMEOUT_MS)


class SimClient:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._socket = SimSocket(network)

    def send(self, *frames: bytes) -> None:
        """A connection that has ended takes nothing: as our clients do, make another."""
        if not self._socket.try_send(frames):
            self._socket.close()
            self._socket = SimSocket(self._network)
            assert self._socket.try_send(frames)

    def receive(self) -> list[bytes]:
        message = self._socket.try_receive()
        assert message is not None
        return message

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["real", "simulated"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "simulated":
        network = Network(random.Random(1))
        yield Bench(network, lambda: SimClient(network))
        return
    router = Router(["tcp://127.0.0.1:*"], MIB, LIMITS)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients: list[RealClient] = []

    def connect() -> Client:
        clients.append(RealClient(context, router.port))
        return clients[-1]

    poll = select.poll()
    poll.register(router.monitor_fd, select.POLLIN)

    def wake() -> None:
        if poll.poll(0):
            router.watch_at_ns = 0

    yield Bench(router, connect, wake)
    for client in clients:
        client.close()
    context.destroy(0)
    router.close()


def test_there_is_nothing_before_something_was_sent(bench: Bench) -> None:
    assert bench.transport.try_receive() is None
    assert bench.transport.unsent_total() == 0
    assert bench.transport.unsent_bytes(b"nobody") == 0
    assert not bench.transport.try_send(b"nobody", [b"x"])
    bench.transport.shaken(b"nobody", None)
    bench.transport.close_peer(b"nobody", "it is not there")


def test_messages_come_whole_and_those_of_a_connection_in_order_under_one_identity(
    bench: Bench,
) -> None:
    clients = [bench.greet() for _ in range(3)]
    assert len({identity for _, identity in clients}) == 3
    for number in range(50):
        for client, identity in clients:
            client.send(b"%d" % number, b"", identity)
    seen: dict[bytes, list[int]] = {identity: [] for _, identity in clients}
    for _ in range(150):
        identity, sent, empty, said = bench.receive()
        assert (said, empty) == (identity, b"")
        seen[identity].append(int(sent))
    assert all(numbers == list(range(50)) for numbers in seen.values())
    assert bench.transport.try_receive() is None


def test_answers_reach_their_client_in_order_and_their_frames_may_be_changed_afterwards(
    bench: Bench,
) -> None:
    (one, first), (other, second) = bench.greet(), bench.greet()
    frame = bytearray(b"a" * 100)
    for number in range(20):
        frame[:1] = b"%c" % (65 + number)
        assert bench.transport.try_send(first, [b"%d" % number, memoryview(frame)])
    assert bench.transport.try_send(second, [b"only"])
    frame[:] = bytes(100)
    assert [one.receive() for _ in range(20)] == [
        [b"%d" % n, b"%c" % (65 + n) + b"a" * 99] for n in range(20)
    ]
    assert other.receive() == [b"only"]


@pytest.mark.parametrize("sizes", [(10, 100), (200_000, 70_000, 1), (64 << 10, 1 << 20)])
def test_buffers_hold_what_was_asked_for_and_are_sent_behind_their_frames(
    bench: Bench, sizes: Sequence[int]
) -> None:
    client, identity = bench.greet()
    for size in sizes:
        buffer = bench.transport.new_buffer(size)
        assert len(buffer) >= size
        buffer[:size] = b"%c" % (size % 251) * size
        assert bench.transport.try_send_buffer(identity, [b"head"], memoryview(buffer)[:size])
    assert [client.receive() for _ in sizes] == [
        [b"head", b"%c" % (size % 251) * size] for size in sizes
    ]


def test_what_a_client_sent_before_it_closed_is_read_and_then_it_has_ended_and_cannot_be_reached(
    bench: Bench,
) -> None:
    staying, stays = bench.greet()
    client, identity = bench.greet()
    for number in range(10):
        client.send(b"%d" % number)
    client.close()
    for number in range(10):
        assert identity not in bench.ended
        assert bench.receive() == [identity, b"%d" % number]

    def has_ended() -> bool:
        bench.transport.try_receive()
        bench.watch()
        return identity in bench.ended and not bench.transport.try_send(identity, [b"gone?"])

    wait_until(has_ended, "the transport says that the connection has ended")
    assert bench.ended == [identity]
    assert bench.transport.try_send(stays, [b"you are here"])
    assert staying.receive() == [b"you are here"]


def test_a_connection_that_is_closed_gets_what_it_was_sent_and_comes_back_as_another(
    bench: Bench,
) -> None:
    client, identity = bench.greet()
    assert bench.transport.try_send(identity, [b"why"])
    assert client.receive() == [b"why"]
    bench.transport.close_peer(identity, "a test")

    def is_gone() -> bool:
        bench.watch()
        bench.transport.try_receive()
        return not bench.transport.try_send(identity, [b"gone?"])

    wait_until(is_gone, "the connection ends")
    received: list[list[bytes]] = []

    def has_come_back() -> bool:
        client.send(
            b"again"
        )  # once more: libzmq drops what is sent before the client's end of the connection has noticed  # noqa: E501
        bench.watch()
        message = bench.transport.try_receive()
        if message is not None:
            received.append(message)
        return bool(received)

    wait_until(has_come_back, "the client connects again")
    (message,) = received
    assert message[1:] == [b"again"]
    assert message[0] != identity
