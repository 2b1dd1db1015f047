"""The real socket of a front: what a client is sent, it gets, whichever buffer it was sent from and
however late it takes it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
import zmq

from netfront.socket.flow_control import Credit
from netfront.socket.listening_socket import BACKLOG
from netfront.socket.message_socket import LENT_FROM_BYTES
from netfront.socket.peers.connections import SWEEP_INTERVAL_NS, Connections, Limits
from netfront.socket.peers.unsent_responses import MARK_BYTES
from netfront.socket.router import MONITOR_REST_NS, PARTS_MAX, Router, Security
from shm.queues.doorbell import Doorbell
from shm.runtime.timing_wheel import NEVER_NS
from tailrace.protocol.frame import FRAMES_MAX
from tests.kit.processes import HANG_LIMIT_S, wait_until

MIB = 1 << 20
LIMITS = Limits(
    connections_max=10,
    unshaken_peer_max=MIB,
    unshaken_max=2 * MIB,
    untaken_max=8 * MIB,
    unsent_max=64 * MIB,
    memory_growth_max=512 * MIB,
)
CLIENTS = 4
ANSWERS = 64


@pytest.mark.parametrize(
    "size", [LENT_FROM_BYTES // 16, LENT_FROM_BYTES - 1, LENT_FROM_BYTES, 3 * MARK_BYTES]
)
def test_answers_that_are_taken_late_are_not_overwritten_by_those_of_others(size: int) -> None:
    router = Router(["tcp://127.0.0.1:*"], MIB, LIMITS)
    context = zmq.Context()
    clients = []
    identities = []
    for _ in range(CLIENTS):
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.RCVTIMEO, 60_000)
        client.connect(f"tcp://127.0.0.1:{router.port}")
        client.send(b"hello")
        assert router.socket.poll(30_000)
        received = router.try_receive()
        assert received is not None
        router.shaken(received[0], Credit())
        clients.append(client)
        identities.append(received[0])
    try:
        for answer in range(ANSWERS):
            for number, identity in enumerate(identities):
                data = memoryview(router.new_buffer(size))[:size]
                data[:] = bytes([answer * CLIENTS + number & 0xFF]) * size
                assert router.try_send_buffer(identity, [b"head"], data)
        for number, client in enumerate(clients):
            for answer in range(ANSWERS):
                head, body = client.recv_multipart()
                assert head == b"head"
                assert body == bytes([answer * CLIENTS + number & 0xFF]) * size
    finally:
        for client in clients:
            client.close(0)
        context.term()
        router.close()


def test_large_frames_of_batches_are_lent_and_all_others_are_copies() -> None:
    router = Router(["tcp://127.0.0.1:*"], MIB, LIMITS)
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(f"tcp://127.0.0.1:{router.port}")
    frames = [bytes([number]) * LENT_FROM_BYTES for number in range(4)] + [b"small"]
    try:
        client.send_multipart(frames)
        assert router.socket.poll(30_000)
        received = router.try_receive()
        assert received is not None
        assert [bytes(part) for part in received[1:]] == frames
        assert [type(part) for part in received] == [
            bytes,
            bytes,
            bytes,
            memoryview,
            memoryview,
            bytes,
        ]
        kept = received[3]
        del received
        client.send_multipart([b"x" * LENT_FROM_BYTES] * 4)
        assert router.socket.poll(30_000)
        assert router.try_receive() is not None
        assert kept == frames[2], "it lasts as long as it is held"
    finally:
        client.close(0)
        context.term()
        router.close()


def test_a_client_whose_queue_of_answers_is_full_is_closed_so_that_it_does_not_wait_for_what_it_missed() -> (  # noqa: E501
    None
):
    router = Router(["tcp://127.0.0.1:*"], MIB, LIMITS)
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RCVHWM, 1)
    client.connect(f"tcp://127.0.0.1:{router.port}")
    client.send(b"hello")
    try:
        assert router.socket.poll(30_000)
        received = router.try_receive()
        assert received is not None
        router.shaken(received[0], Credit())
        while router.try_send(received[0], [b"head", b"x" * 200]):
            pass
        assert router.watch(0).closed_count == 1
    finally:
        client.close(0)
        context.term()
        router.close()


WITHOUT_DESCRIPTORS = """
import os, resource, zmq
from netfront.socket.peers.connections import Limits
from netfront.socket.router import Router
router = Router(["tcp://127.0.0.1:*"], 1 << 20, Limits(10, 1 << 20, 2 << 20, 8 << 20, 64 << 20, 512 << 20))
client = zmq.Context().socket(zmq.DEALER)
client.setsockopt(zmq.RCVTIMEO, 30_000)
client.connect(f"tcp://127.0.0.1:{router.port}")
client.send(b"hello")
assert router.socket.poll(30_000)
identity = router.try_receive()[0]
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
try:
    while True:
        os.dup(0)
except OSError:
    pass
assert router.try_send_buffer(identity, [b"head"], memoryview(router.new_buffer(200_000))[:200_000])
assert [len(frame) for frame in client.recv_multipart()] == [4, 200_000]
print("sent", flush=True)
os._exit(0)
"""  # noqa: E501


def test_a_large_answer_is_sent_when_no_descriptor_is_left() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_DESCRIPTORS],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert done.stdout == "sent\n", done.stderr


def test_a_message_of_too_many_parts_closes_its_sender_or_can_be_answered_where_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not known while a connection that had the descriptor before may have sent it: who would
    be closed might be another.
    """
    router = Router(["tcp://127.0.0.1:*"], MIB, LIMITS)
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RCVTIMEO, 60_000)
    client.connect(f"tcp://127.0.0.1:{router.port}")

    def receive() -> list[bytes] | None:
        assert router.socket.poll(30_000)
        return router.try_receive()

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Connections, "is_sender", lambda _self, _peer: False)
            client.send_multipart([b"x"] * 5_000)
            received = receive()
            assert received is not None
            assert FRAMES_MAX < len(received) <= PARTS_MAX + 1
            assert router.try_send(received[0], [b"told"])
            assert client.recv() == b"told"
            client.send(b"a request")
            while (received := receive()) is None:
                pass  # the rest of that message
            assert received[1:] == [b"a request"]
            assert router.watch(0).closed_count == 0
        client.send_multipart([b"x"] * 5_000)
        assert receive() is None
        assert router.watch(0).closed_count == 1
    finally:
        client.close(0)
        context.term()
        router.close()


GOES_WITH_ITS_QUEUE_FULL = """
import socket, struct, time, zmq
from netfront.socket.peers.connections import Limits
from netfront.socket.router import Router
from tests.kit.peers.raw_zmtp import RawPeer, message

def set_soon(self, option, value, made=zmq.Socket.set):
    return made(self, option, 50 if option in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT) and value > 0 else value)

zmq.Socket.set = zmq.Socket.setsockopt = set_soon  # heartbeats, if there are any, come soon
M = 1 << 20
router = Router(["tcp://127.0.0.1:*"], M, Limits(10, M, 2 * M, 8 * M, 64 * M, 512 * M))
peer = RawPeer(f"tcp://127.0.0.1:{router.port}")
peer.shake_zmtp()
peer.socket.settimeout(0.5)
try:
    while True:
        peer.socket.sendall(message([b"x"]) * 20_000)
except TimeoutError:
    pass
peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
peer.close()
time.sleep(0.5)  # ten heartbeats, the first of which ended the process
count = 0
while router.socket.poll(500):
    while router.try_receive() is not None:
        count += 1
assert count > 4_000, count
router.close()
print("lives")
"""  # noqa: E501


def test_a_peer_that_goes_while_what_it_sent_fills_its_queue_does_not_end_the_front() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", GOES_WITH_ITS_QUEUE_FULL],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert done.stdout == "lives\n", (done.returncode, done.stderr)


def test_a_connection_that_is_learnt_of_with_its_first_message_is_watched() -> None:
    """That message's receiver reads the monitor, whose descriptor then wakes nobody: the only
    connection was never looked at, nor closed.
    """
    router = Router(["tcp://127.0.0.1:*"], MIB, LIMITS)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    try:
        router.watch(time.monotonic_ns())
        assert router.watch_at_ns == NEVER_NS
        client.connect(f"tcp://127.0.0.1:{router.port}")
        client.send(b"hello")
        assert router.socket.poll(30_000)
        assert router.try_receive() is not None
        now_ns = time.monotonic_ns()
        assert router.watch_at_ns <= now_ns
        router.watch(now_ns)
        assert router.watch_at_ns <= now_ns + SWEEP_INTERVAL_NS
    finally:
        client.close(0)
        context.term()
        router.close()


def test_an_identity_that_another_client_has_now_gets_nothing_of_the_first_one() -> None:
    """A client chooses its identity: the second one had the session of the first, which had left a
    moment before, with its rights and its responses.
    """
    server, server_secret = zmq.curve_keypair()
    router = Router(
        ["tcp://127.0.0.1:*"], MIB, LIMITS,
        security=Security(server_secret.decode(), lambda _claim: True),
    )  # fmt: skip
    rebound: list[bytes] = []
    router.on_rebound = rebound.append
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = [zmq.curve_keypair() for _ in range(2)]
    assert router.zap is not None
    zap = router.zap

    def connected(number: int) -> zmq.Socket[bytes]:
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.ROUTING_ID, b"chosen")
        client.curve_serverkey = server
        client.curve_publickey, client.curve_secretkey = keys[number]
        client.connect(f"tcp://127.0.0.1:{router.port}")
        return client

    def received() -> list[bytes]:
        found: list[list[bytes]] = []

        def has_come() -> bool:
            zap.step()
            frames = router.try_receive()
            if frames is not None:
                found.append(frames)
            return bool(found)

        wait_until(has_come, "a message has come")
        return found[0]

    def has_left() -> bool:
        assert router.try_receive() is None
        try:
            router.socket.send_multipart([b"chosen", b"lost"], zmq.NOBLOCK)
        except zmq.ZMQError:
            return True
        return False

    try:
        first = connected(0)
        first.send_multipart([b"one", b"x", b"y", b"z" * LENT_FROM_BYTES])
        frames = [bytes(frame) for frame in received()]
        assert frames == [b"chosen", b"one", b"x", b"y", b"z" * LENT_FROM_BYTES]
        rebound.clear()
        first.send(b"again")
        assert received() == [b"chosen", b"again"]
        assert rebound == []
        owner = router.claim(b"chosen")
        assert router.try_send(b"chosen", [b"to the first"])
        assert first.recv() == b"to the first"
        first.close()
        wait_until(has_left, "the first one has left")
        assert not router.try_send(b"chosen", [b"to nobody"])
        second = connected(1)
        second.setsockopt(zmq.RCVTIMEO, 60_000)
        second.send(b"two")
        wait_until(lambda: bool(zap.step()), "the second one is let in")
        assert not router.try_send(b"chosen", [b"a late response to the first"])
        data = memoryview(router.new_buffer(LENT_FROM_BYTES))
        assert not router.try_send_buffer(b"chosen", [b"late"], data)
        assert received() == [b"chosen", b"two"]
        assert rebound == [b"chosen"]
        assert router.claim(b"chosen") not in (None, owner)
        assert router.try_send(b"chosen", [b"to the second"])
        assert second.recv() == b"to the second"
        ended = router.watch(time.monotonic_ns()).ended
        assert ended == [], "the identity is the second one's"
        second.close()
    finally:
        context.destroy(0)
        router.close()


def test_connections_that_come_and_go_end_the_sleep_once_in_a_while_and_not_each_time() -> None:
    router, bell = Router(["tcp://127.0.0.1:*"], MIB, LIMITS), Doorbell.create()
    monitor = select.poll()
    monitor.register(router.monitor_fd, select.POLLIN)
    try:
        router.watch(time.monotonic_ns())
        router._monitor.had_events_ns = time.monotonic_ns() + 3_600_000_000_000
        with socket.create_connection(("127.0.0.1", router.port), HANG_LIMIT_S) as stranger:
            assert monitor.poll(30_000)
            router.wait(bell, 0, 0)
            assert router.watch_at_ns == NEVER_NS, "strangers wake nobody now"
            router._monitor.had_events_ns = 0
            router.wait(bell, None, 0)
            assert router.watch_at_ns == 0
            router.watch(time.monotonic_ns())
            assert len(router._peers) == 1
            read_ns = router._monitor.had_events_ns
            assert read_ns > 0
            stranger.shutdown(socket.SHUT_RDWR)
            router.wait(bell, None, 0)  # it ends with the rest, also without a message
            while router.watch_at_ns:
                router.wait(bell, None, 0)
            assert time.monotonic_ns() - read_ns >= MONITOR_REST_NS
            router.watch(time.monotonic_ns())
            assert len(router._peers) == 0
    finally:
        router.close()


def test_the_kernel_keeps_thousands_of_connections_for_a_front_that_has_no_time() -> None:
    router = Router(["tcp://127.0.0.1:*"], MIB, LIMITS)
    try:
        most = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and (
                    found.getsockname()[1] == router.port
                ):
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
                    most = struct.unpack_from("I", info, 28)[0]  # tcpi_sacked: of a listening one
        somaxconn = int(pathlib.Path("/proc/sys/net/core/somaxconn").read_text())
        assert most == min(BACKLOG, somaxconn)
    finally:
        router.close()


def test_a_router_that_was_closed_has_no_descriptor_open() -> None:
    before = os.listdir("/proc/self/fd")
    Router(["tcp://127.0.0.1:*"], MIB, LIMITS).close()
    assert os.listdir("/proc/self/fd") == before


def test_nothing_that_comes_is_slept_over_whatever_the_socket_was_used_for_before() -> None:
    """A client sends its next message when it has its answer: one that the front sleeps over ends
    the test. Some turns begin with a ring, some send between receiving and sleeping, which takes
    the news of a message out of the descriptor, some do neither.
    """
    router, bell = Router(["tcp://127.0.0.1:*"], MIB, LIMITS), Doorbell.create()
    context, count = zmq.Context(), 3_000
    failures: list[object] = []

    def ask() -> None:
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.RCVTIMEO, 60_000)
        client.connect(f"tcp://127.0.0.1:{router.port}")
        try:
            for number in range(count):
                client.send(b"%d" % number)
                if number % 3 == 0:
                    bell.ring()
                while client.recv() != b"%d" % number:
                    pass  # what was sent in between
        except zmq.ZMQError as error:
            failures.append(error)
        client.close(0)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    answered = 0
    try:
        while answered < count and not failures:
            received = router.try_receive()
            if received is None:
                router.wait(bell, None if answered else 1_000, 20_000 if answered % 2 else 0)
                continue
            if answered == 0:
                router.shaken(received[0], Credit())
            answered += 1
            assert router.try_send(received[0], [received[1]])
            if answered % 5 == 0 and answered < count:
                assert router.try_send(received[0], [b"in between"])
        thread.join(HANG_LIMIT_S)
        assert not thread.is_alive()
        assert not failures
    finally:
        context.destroy(0)
        router.close()


def test_a_ring_alone_does_not_ask_the_socket() -> None:
    router, bell = Router(["tcp://127.0.0.1:*"], MIB, LIMITS), Doorbell.create()
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    try:
        assert router.try_receive() is None
        client.connect(f"tcp://127.0.0.1:{router.port}")
        client.send(b"hello")
        while not (received := router.try_receive()):
            router.wait(bell, None, 0)
        router.shaken(received[0], Credit())
        assert router.try_receive() is None
        bell.ring()
        router.wait(bell, None, 0)
        client.send(b"again")  # after the turn began: it is for the next one
        assert router.try_receive() is None
        received = None
        while not received:
            router.wait(bell, None, 0)
            received = router.try_receive()
        assert received[1:] == [b"again"]
    finally:
        client.close(0)
        context.term()
        router.close()
