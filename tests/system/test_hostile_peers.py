"""Peers that send what no library would, read nothing, come in numbers or go: the front's memory stays bounded, and others are served throughout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from tailrace import Producer, TopicPartition
from tailrace.admin import Admin, NewTopic
from tailrace.consumer import Consumer
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children, wait_until
from tests.kit.raw_zmtp import RawPeer, frame, message

MIB = 1 << 20
ATTACK_BYTES = 600 * MIB
"""What an attacker sends at most, where nobody stops it."""
GROWTH_MAX = 300 * MIB
"""Of the front's resident memory, below half of what an attack sends."""


@pytest.fixture(scope="module")
def appliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAppliance]:
    path = tmp_path_factory.mktemp("sockets")
    running = start_embedded(auto_create_topics=False, listen=["tcp://127.0.0.1:0", f"ipc://{path}/t.sock"])
    yield running
    assert running.stop() == 0, "the appliance did not stop cleanly"


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> Iterator[str]:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    yield topic
    with Admin(appliance.address) as admin:
        admin.delete_topics([topic])


def tcp(appliance: EmbeddedAppliance) -> str:
    return next(address for address in appliance.addresses if address.startswith("tcp://"))


def front(appliance: EmbeddedAppliance) -> psutil.Process:
    return psutil.Process(children(appliance)["tr-front-0"])


def sessions(appliance: EmbeddedAppliance) -> int:
    with Admin(tcp(appliance)) as admin:
        return int(next(p["sessions"] for p in admin.describe_cluster()["processes"] if p["name"] == "front-0"))


class Traffic(threading.Thread):
    """A well-behaved producer and consumer, record after record, until stopped."""

    def __init__(self, address: str, topic: str) -> None:
        super().__init__(name="traffic")
        self._address = address
        self._topic = topic
        self._done = threading.Event()
        self.count = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with Producer(self._address, linger_ms=0) as producer, Consumer(bootstrap=self._address) as consumer:
                consumer.assign([TopicPartition(self._topic, 0)])
                consumer.seek_to_beginning()
                while not self._done.is_set():
                    producer.send(self._topic, b"%d" % self.count, partition=0).result(20)
                    got: list[bytes] = []
                    while not got:
                        got = [record.value for record in consumer.poll(20_000)]
                    assert got == [b"%d" % self.count]
                    self.count += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._done.set()
        self.join(60)


@contextmanager
def served_and_bounded(appliance: EmbeddedAppliance, topic: str, growth_max: int = GROWTH_MAX) -> Iterator[Traffic]:
    """The block is an attack: meanwhile others are served, and the front lives and stays within `growth_max`."""
    traffic = Traffic(tcp(appliance), topic)
    traffic.start()
    wait_until(lambda: traffic.count > 3 or traffic.error is not None, "the traffic runs")
    process = front(appliance)
    before = process.memory_info().rss
    highest = [before]
    ended = threading.Event()

    def measure() -> None:
        while not ended.wait(0.005):
            highest[0] = max(highest[0], process.memory_info().rss)

    meter = threading.Thread(target=measure)
    meter.start()
    try:
        yield traffic
        seen = traffic.count
        wait_until(lambda: traffic.count > seen + 3 or traffic.error is not None, "the traffic goes on")
    finally:
        ended.set()
        meter.join()
        traffic.stop()
    assert traffic.error is None
    assert process.is_running(), "the front was restarted"
    assert highest[0] - before < growth_max, f"the front grew by {(highest[0] - before) >> 20} MiB"


def pour(peer: RawPeer, piece: bytes, limit: int = ATTACK_BYTES) -> bool:
    """Send `piece` again and again; True when the other end closed before `limit`."""
    return any(not peer.send(piece) for _ in range(limit // len(piece)))


def _endless_parts(peer: RawPeer) -> bool:
    return pour(peer, frame(bytes(MIB), more=True))


def _empty_parts(peer: RawPeer) -> bool:
    return pour(peer, frame(b"", more=True) * (MIB // 2), 64 * MIB)


def _small_parts(peer: RawPeer) -> bool:
    return pour(peer, frame(bytes(40), more=True) * 20_000, 128 * MIB)


def _many_parts_in_whole_messages(peer: RawPeer) -> bool:
    return pour(peer, message([b""] * 200_000), 64 * MIB)


def _large_frames(peer: RawPeer) -> bool:
    return pour(peer, b"\x03" + (60 * MIB).to_bytes(8, "big") + bytes(60 * MIB))


ATTACKS = [_endless_parts, _empty_parts, _small_parts, _many_parts_in_whole_messages, _large_frames]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.strip("_"))
@pytest.mark.parametrize("shaken", [False, True], ids=["before_the_handshake", "with_a_session"])
def test_messages_that_do_not_end_close_their_sender(
    appliance: EmbeddedAppliance, made: str, attack: Callable[[RawPeer], bool], shaken: bool
) -> None:
    with served_and_bounded(appliance, made), RawPeer(tcp(appliance)) as peer:
        if shaken:
            peer.shake()
        else:
            peer.shake_zmtp()
        assert attack(peer), "it was never closed"


@pytest.mark.parametrize("attack", [_endless_parts, _empty_parts], ids=lambda attack: attack.__name__.strip("_"))
def test_on_a_unix_socket_memory_that_is_short_closes_who_is_in_the_middle_of_something(
    tmp_path: object, topic: str, attack: Callable[[RawPeer], bool]
) -> None:
    running = start_embedded(listen=["tcp://127.0.0.1:0", f"ipc://{tmp_path}/t.sock"], settings={"credit_bytes": 4 << 20})
    try:
        with Admin(tcp(running)) as admin:
            admin.create_topics([NewTopic(topic, 1)])
        address = next(address for address in running.addresses if address.startswith("ipc://"))
        with served_and_bounded(running, topic, 500 * MIB), RawPeer(address) as peer:
            peer.shake_zmtp()
            assert attack(peer), "it was never closed"
    finally:
        assert running.stop() == 0
