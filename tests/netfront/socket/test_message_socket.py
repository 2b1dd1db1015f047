"""A ROUTER's messages through pyzmq and through the kernel: the same of the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from netfront.socket.message_socket import LENT_FROM_BYTES, MessageSocket
from shm.memory.atomic_word import is_compiled
from tailrace import kernel


class Pair:
    """A ROUTER that is read through `messages`, and a client of it."""

    def __init__(self, is_plain: bool) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.LINGER, 0)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.client = self.context.socket(zmq.DEALER)
        self.client.setsockopt(zmq.LINGER, 0)
        self.client.setsockopt(zmq.RCVTIMEO, 60_000)
        self.client.setsockopt(zmq.IDENTITY, b"me")
        self.client.connect(f"tcp://127.0.0.1:{port}")
        if is_plain:
            self.messages: MessageSocket = object.__new__(MessageSocket)
            MessageSocket.__init__(self.messages, self.router)
        else:
            self.messages = MessageSocket(self.router)

    def receive(self, known: dict[bytes, object], parts_max: int = 16) -> list[bytes]:
        assert self.router.poll(60_000)
        found = self.messages.try_receive(known, parts_max)
        assert found is not None
        return found

    def close(self) -> None:
        self.messages.close()
        self.router.close()
        self.client.close()
        self.context.term()


@pytest.fixture(params=[True, False], ids=["pyzmq", "chosen"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(bool(request.param))
    yield made
    made.close()  # a second time: nothing happens


def test_the_compiled_one_is_used_where_there_is_one() -> None:
    pair = Pair(is_plain=False)
    assert is_compiled(pair.messages) is (kernel.compiled is not None)
    pair.close()


def test_a_message_of_a_known_identity_comes_whole_with_its_bytes_on_the_wire(pair: Pair) -> None:
    sent = [b"", b"x" * 255, b"y" * 256, bytes(range(256)) * 4000]
    pair.client.send_multipart(sent)
    assert pair.receive({b"me": 1}) == [b"me", *sent]
    assert not pair.messages.has_rest
    assert pair.messages.taken == 2 + 257 + 265 + 9 + 1_024_000
    assert pair.messages.try_receive({b"me": 1}, 16) is None


def test_large_frames_of_batches_are_lent_and_stay_what_they_were_when_the_socket_is_closed(
    pair: Pair,
) -> None:
    large, small = bytes(range(256)) * (LENT_FROM_BYTES // 256), b"z" * (LENT_FROM_BYTES - 1)
    pair.client.send_multipart([large, large, large, small, b""])
    found = pair.receive({b"me": 1})
    pair.client.send_multipart([b"", b"", b"other" * LENT_FROM_BYTES])
    assert [type(frame) for frame in found] == [bytes, bytes, bytes, memoryview, bytes, bytes]
    other = pair.receive({b"me": 1})[3]
    pair.close()
    assert found == [b"me", large, large, large, small, b""]
    assert other == b"other" * LENT_FROM_BYTES


def test_of_an_unknown_identity_the_rest_is_left(pair: Pair) -> None:
    pair.client.send_multipart([b"one", b"two"])
    assert pair.receive({}) == [b"me"]
    assert pair.messages.has_rest
    assert not pair.messages.taken
    assert pair.router.recv_multipart() == [b"one", b"two"]


def test_of_a_message_of_too_many_parts_the_rest_is_left(pair: Pair) -> None:
    pair.client.send_multipart([b"%d" % number for number in range(20)])
    assert pair.receive({b"me": 1}) == [b"me", *(b"%d" % number for number in range(16))]
    assert pair.messages.has_rest
    assert pair.router.recv_multipart() == [b"16", b"17", b"18", b"19"]


def test_what_is_sent_comes_whole_whatever_holds_its_bytes(pair: Pair) -> None:
    pair.client.send(b"here")
    pair.receive({b"me": 1})
    changed = bytearray(b"second")
    pair.messages.send([b"me", b"first", changed, memoryview(b"-third-")[1:6], b""])
    changed[:] = b"others"
    assert pair.client.recv_multipart() == [b"first", b"second", b"third", b""]


def test_a_client_that_is_not_there_is_an_error_and_leaves_the_socket_whole(pair: Pair) -> None:
    with pytest.raises(zmq.ZMQError) as raised:
        pair.messages.send([b"nobody", b"x"])
    assert raised.value.errno == zmq.EHOSTUNREACH
    pair.client.send(b"here")
    pair.receive({b"me": 1})
    pair.messages.send([b"me", b"after it"])
    assert pair.client.recv_multipart() == [b"after it"]


def test_a_client_that_takes_nothing_is_an_error_before_any_of_its_message_is_queued(
    pair: Pair,
) -> None:
    pair.client.send(b"here")
    pair.receive({b"me": 1})

    def fill() -> None:
        for _ in range(1_000_000):
            pair.messages.send([b"me", b"x" * 1000])

    with pytest.raises(zmq.ZMQError) as raised:
        fill()
    assert raised.value.errno == zmq.EAGAIN


@pytest.mark.skipif(kernel.compiled is None, reason="pyzmq looks after its own")
def test_a_closed_one_is_not_called() -> None:
    pair = Pair(is_plain=False)
    pair.close()
    with pytest.raises(zmq.ZMQError) as raised:
        pair.messages.send([b"me", b"x"])
    assert raised.value.errno == zmq.ENOTSOCK
    with pytest.raises(zmq.ZMQError) as raised:
        pair.messages.try_receive({}, 16)
    assert raised.value.errno == zmq.ENOTSOCK


def test_its_events_are_those_that_the_socket_names(pair: Pair) -> None:
    assert pair.messages.events() == int(pair.router.get(zmq.EVENTS))
    pair.client.send(b"x")
    assert pair.router.poll(60_000)
    assert pair.messages.events() & zmq.POLLIN
    assert pair.receive({b"me": 1}) == [b"me", b"x"]
    assert not pair.messages.events() & zmq.POLLIN
