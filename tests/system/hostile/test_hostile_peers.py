"""Peers that send what no library would, read nothing, come in numbers or go: the front's memory
stays bounded, and others are served throughout.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import pytest

from netfront.limits import MEMORY_SLACK_BYTES, UNSENT_MAX_BYTES
from shm.memory.layout import ProcessWord, RegionKind, Role
from shm.memory.region import Region
from shm.tables.control import Control
from tailrace.admin.admin import Admin, NewTopic
from tailrace.consumer.consumer import Consumer
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.producer.producer import Producer
from tailrace.protocol import fetch_messages, produce_messages
from tailrace.protocol import json_messages as requests
from tailrace.protocol.fetch_messages import FetchEntry, FetchRequest
from tailrace.protocol.frame import Api
from tests.kit.peers.raw_zmtp import RawPeer, crowd, frame, message
from tests.kit.processes import HANG_LIMIT_S, children, shared_memory, wait_until

MIB = 1 << 20
ATTACK_BYTES = 600 * MIB
"""Bytes that an attacker sends at most, where nothing stops it."""
GROWTH_MAX = 300 * MIB
"""Growth of the front's resident memory, below half of what an attack sends."""


@pytest.fixture(scope="module")
def appliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAppliance]:
    path = tmp_path_factory.mktemp("sockets")
    running = start_embedded(
        auto_create_topics=False, listen=["tcp://127.0.0.1:0", f"ipc://{path}/t.sock"]
    )
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
            with (
                Producer(self._address, linger_ms=0) as producer,
                Consumer(bootstrap=self._address) as consumer,
            ):
                consumer.assign([TopicPartition(self._topic, 0)])
                consumer.seek_to_beginning()
                while not self._done.is_set():
                    producer.send(self._topic, b"%d" % self.count, partition=0).result(60)
                    got: list[bytes] = []
                    while not got:
                        got = [record.value for record in consumer.poll(60_000)]
                    assert got == [b"%d" % self.count]
                    self.count += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._done.set()
        self.join(HANG_LIMIT_S)


@contextmanager
def served_and_bounded(
    appliance: EmbeddedAppliance, topic: str, growth_max: int = GROWTH_MAX
) -> Iterator[Traffic]:
    """The block is an attack: meanwhile others are served, and the front lives and stays within
    `growth_max`.
    """
    traffic = Traffic(tcp(appliance), topic)
    process = front(appliance)
    ended = threading.Event()
    traffic.start()
    try:
        wait_until(lambda: traffic.count > 3 or traffic.error is not None, "the traffic runs")
    except BaseException:
        traffic.stop()
        raise
    before = process.memory_info().rss
    highest = [before]

    def measure() -> None:
        while not ended.wait(0.005):
            highest[0] = max(highest[0], process.memory_info().rss)

    meter = threading.Thread(target=measure)
    meter.start()
    try:
        yield traffic
        seen = traffic.count
        wait_until(
            lambda: traffic.count > seen + 3 or traffic.error is not None, "the traffic goes on"
        )
    finally:
        ended.set()
        meter.join()
        traffic.stop()
    assert traffic.error is None
    assert process.is_running(), "the front was restarted"
    assert highest[0] - before < growth_max, f"the front grew by {(highest[0] - before) >> 20} MiB"


def pour(peer: RawPeer, piece: bytes, limit: int = ATTACK_BYTES) -> bool:
    """Send `piece` again and again, at most `limit` bytes; True when the other end has closed. A
    front without a processor does so later.
    """
    return any(not peer.send(piece) for _ in range(limit // len(piece))) or peer.is_closed()


def _endless_parts(peer: RawPeer) -> bool:
    return pour(peer, frame(bytes(MIB), more=True), 128 * MIB)


def _empty_parts(peer: RawPeer) -> bool:
    return pour(peer, frame(b"", more=True) * (MIB // 2), 8 * MIB)


def _small_parts(peer: RawPeer) -> bool:
    return pour(peer, frame(bytes(40), more=True) * 20_000, 64 * MIB)


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


def _endless_parts_that_fill_memory(peer: RawPeer) -> bool:
    return pour(peer, frame(bytes(MIB), more=True))


def _empty_parts_that_fill_memory(peer: RawPeer) -> bool:
    return pour(peer, frame(b"", more=True) * (MIB // 2), 16 * MIB)  # 65 bytes of memory for each


@pytest.mark.parametrize(
    "attack",
    [_endless_parts_that_fill_memory, _empty_parts_that_fill_memory],
    ids=lambda attack: attack.__name__.strip("_"),
)
def test_on_a_unix_socket_memory_that_is_short_closes_who_is_in_the_middle_of_something(
    tmp_path: object, topic: str, attack: Callable[[RawPeer], bool]
) -> None:
    running = start_embedded(
        listen=["tcp://127.0.0.1:0", f"ipc://{tmp_path}/t.sock"], settings={"credit_bytes": 4 << 20}
    )
    try:
        with Admin(tcp(running)) as admin:
            admin.create_topics([NewTopic(topic, 1)])
        address = next(address for address in running.addresses if address.startswith("ipc://"))
        with served_and_bounded(running, topic, 800 * MIB), RawPeer(address) as peer:
            peer.shake_zmtp()
            assert attack(peer), "it was never closed"
    finally:
        assert running.stop() == 0


# ---- readers that do not read --------------------------------------------------------------------

LARGE_BYTES = 24 * MIB


def fill(address: str, topic: str) -> bytes:
    """Partition 1 gets LARGE_BYTES that no codec makes smaller; returns the topic's id."""
    with Producer(address, linger_ms=0, max_request_size=MIB) as producer:
        handles = [
            producer.send(topic, os.urandom(900_000), partition=1)
            for _ in range(LARGE_BYTES // 900_000)
        ]
        for handle in handles:
            handle.result(HANG_LIMIT_S)
    with Admin(address) as admin:
        return bytes(admin.topic_info([topic])[topic].topic_id)


def fetch_all(topic_id: bytes, received: int) -> bytes:
    return fetch_messages.encode_fetch(
        FetchRequest(0, 1, 16 * MIB, received, [FetchEntry(topic_id, 1, -1, 0, 16 * MIB)])
    )


def test_a_reader_that_claims_to_have_read_and_does_not_costs_its_window(
    appliance: EmbeddedAppliance, made: str
) -> None:
    topic_id = fill(tcp(appliance), made)
    with (
        served_and_bounded(appliance, made, 150 * MIB) as traffic,
        RawPeer(tcp(appliance), receive_buffer_bytes=4096) as peer,
    ):
        peer.shake()
        for number in range(100):
            peer.request(Api.FETCH, [fetch_all(topic_id, 2**64 - 1)], 10 + number)
        seen = traffic.count
        wait_until(
            lambda: traffic.count > seen + 100 or traffic.error is not None, "the traffic goes on"
        )


def test_frozen_readers_do_not_keep_the_buffers_of_others(
    appliance: EmbeddedAppliance, made: str
) -> None:
    topic_id = fill(tcp(appliance), made)
    with (
        served_and_bounded(appliance, made, 300 * MIB),
        RawPeer(tcp(appliance), receive_buffer_bytes=4096) as frozen,
        RawPeer(tcp(appliance)) as reader,
    ):
        frozen.shake()
        frozen.request(Api.FETCH, [fetch_all(topic_id, 0)], 10)
        reader.shake()
        received = 0
        for number in range(50):
            reader.request(Api.FETCH, [fetch_all(topic_id, received)], 10 + number)
            received += sum(
                len(data) for _, data in fetch_messages.decode_fetched(reader.receive_message()[1:])
            )
        assert received > 600 * MIB


def test_answers_that_are_not_read_are_bounded_also_when_they_are_no_batches(
    appliance: EmbeddedAppliance, made: str
) -> None:
    question = requests.encode_json({"topics": [made] * 3000})
    with (
        served_and_bounded(appliance, made, 150 * MIB) as traffic,
        RawPeer(tcp(appliance), receive_buffer_bytes=4096) as peer,
    ):
        peer.shake()
        seen = traffic.count
        for number in range(400):
            if not peer.request(Api.METADATA, [question], 10 + number):
                break
        # Each of its requests is read in turn with those of the others.
        wait_until(
            lambda: traffic.count > seen + 150 or traffic.error is not None,
            "the traffic goes on",
            60,
        )


# ---- many connections ----------------------------------------------------------------------------


def end_offset(address: str, topic: str, partition: int) -> int:
    with Consumer(bootstrap=address) as consumer:
        where = TopicPartition(topic, partition)
        return consumer.end_offsets([where])[where]


def open_sessions(appliance: EmbeddedAppliance) -> int:
    """As the front counts them in shared memory."""
    name = next(name for name in shared_memory(appliance) if name.endswith("-control"))
    region = Region.attach(f"/{name}", RegionKind.CONTROL)
    try:
        return Control(region).process(Role.FRONT, 0).load(ProcessWord.SESSIONS)
    finally:
        region.close()


def test_a_session_ends_with_its_connection(appliance: EmbeddedAppliance) -> None:
    wait_until(lambda: open_sessions(appliance) == 0, "sessions of other tests end")
    with crowd([address for address in appliance.addresses for _ in range(50)]) as peers:
        for peer in peers:
            peer.shake()
        assert open_sessions(appliance) == 100
        for peer in peers[::2]:
            peer.close()
        wait_until(lambda: open_sessions(appliance) == 50, "every second session ends")
    wait_until(lambda: open_sessions(appliance) == 0, "all sessions end")


def test_what_was_sent_before_a_connection_ended_is_taken(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """A session ends when what it had sent was read, not before."""
    for _ in range(20):
        with Producer(tcp(appliance), acks=0, linger_ms=0) as producer:
            for _ in range(50):
                producer.send(made, b"x" * 1000, partition=0)
    wait_until(lambda: end_offset(tcp(appliance), made, 0) == 1000, "all records arrive")


def test_however_many_connections_send_what_is_held_is_bounded(topic: str) -> None:
    """They send 690 MiB. Beside the credit there is what libzmq may have read before the front
    looks (docs/limits.md).
    """
    credit = 8 * MIB
    running = start_embedded(settings={"credit_bytes": credit}, auto_create_topics=False)
    peers: list[RawPeer] = []
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic, 1)])
            topic_id = bytes(admin.topic_info([topic])[topic].topic_id)
        process = front(running)
        workers = [pid for name, pid in children(running).items() if name.startswith("tr-worker")]
        for _ in range(400):
            peers.append(peer := RawPeer(running.address))
            peer.shake()
        before = process.memory_info().rss
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            body = [
                produce_messages.encode_produce(
                    produce_messages.ProduceRequest(topic_id, 0, 1, 60_000)
                ),
                bytes(900_000),
            ]

            def send(peer: RawPeer) -> None:
                with suppress(ConnectionError):  # it may be closed for what all of them send
                    peer.request(Api.PRODUCE, body, 10, 1)
                    peer.request(Api.PRODUCE, body, 11, 1)

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(send, peers))
            peers.append(last := RawPeer(running.address))
            last.shake()
            wait_until(
                lambda: process.num_ctx_switches().voluntary > 0 and is_quiet(process),
                "the front has read everything",
            )
            grown = process.memory_info().rss - before
            assert grown < 2 * credit + UNSENT_MAX_BYTES + MEMORY_SLACK_BYTES, (
                f"the front grew by {grown >> 20} MiB"
            )
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
        with Producer(running.address) as producer:
            assert producer.send(topic, b"after").result(HANG_LIMIT_S).offset == 0
    finally:
        for peer in peers:
            peer.close()
        assert running.stop() == 0


def is_quiet(process: psutil.Process) -> bool:
    """True if the process sleeps, as far as one look tells."""
    return process.status() == psutil.STATUS_SLEEPING


def test_two_hundred_producers_share_a_small_credit(topic: str) -> None:
    running = start_embedded(
        settings={"credit_bytes": MIB, "lane_bytes": 256 << 10}, auto_create_topics=False
    )
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic, 4)])

        def produce(number: int) -> int:
            with Producer(running.address, linger_ms=0, client_id=f"p{number}") as producer:
                handles = [producer.send(topic, os.urandom(20_000)) for _ in range(8)]
                return len([handle.result(60) for handle in handles])

        with ThreadPoolExecutor(200) as pool:
            assert sum(pool.map(produce, range(200))) == 1600
        assert sum(end_offset(running.address, topic, partition) for partition in range(4)) == 1600
    finally:
        assert running.stop() == 0


def test_connections_beyond_the_bound_are_closed_and_those_that_are_served_stay(topic: str) -> None:
    running = start_embedded(settings={"connections.max": 40}, auto_create_topics=False)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic, 2)])
        with served_and_bounded(running, topic) as traffic:
            process = front(running)
            with crowd([running.address] * 100):
                wait_until(lambda: connection_count(process) <= 40, "what is too much is closed")
                seen = traffic.count
                wait_until(
                    lambda: traffic.count > seen + 20 or traffic.error is not None,
                    "the traffic goes on",
                )
            with Producer(running.address) as producer:
                producer.send(topic, b"there is room again", partition=1).result(HANG_LIMIT_S)
    finally:
        assert running.stop() == 0


def connection_count(process: psutil.Process) -> int:
    return sum(
        connection.status == psutil.CONN_ESTABLISHED
        for connection in process.net_connections("tcp")
    )


def test_without_descriptors_connected_clients_read_on_and_new_ones_come_when_there_are_some(
    topic: str,
) -> None:
    running = start_embedded(auto_create_topics=False)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic, 8)])
        with Producer(running.address) as producer:
            for partition in range(8):
                producer.send(topic, b"%d" % partition, partition=partition).result(HANG_LIMIT_S)
        process = front(running)
        limit = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        with Consumer(bootstrap=running.address) as consumer:
            consumer.assign([TopicPartition(topic, 0)])
            consumer.seek_to_beginning()
            assert [record.value for record in poll(consumer, 1)] == [b"0"]
            allowed = process.num_fds() + 2
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (allowed, limit[1]))
            with crowd([running.address] * 20):
                wait_until(
                    lambda: (
                        process.is_running()
                        and (process.num_fds() >= allowed or "accept_failed" in log_of(running))
                    ),
                    "descriptors are used up",
                )
                consumer.assign([TopicPartition(topic, partition) for partition in range(8)])
                consumer.seek_to_beginning()
                assert sorted(record.value for record in poll(consumer, 8)) == [
                    b"%d" % partition for partition in range(8)
                ]
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limit)
            with Producer(running.address) as producer:
                producer.send(topic, b"new", partition=0).result(HANG_LIMIT_S)
        text = log_of(running)
        assert "read_failed" not in text
        assert text.count("accept_failed") < 200, "it does not try without a pause"
        assert process.is_running()
    finally:
        assert running.stop() == 0


def log_of(running: EmbeddedAppliance) -> str:
    with open(running.log_path, encoding="utf-8") as log:
        return log.read()


def poll(consumer: Consumer, count: int) -> list[Record]:
    """Exactly `count` records."""
    records: list[Record] = []

    def have_come() -> bool:
        records.extend(consumer.poll(1000))
        return len(records) >= count

    wait_until(have_come, f"{count} records come")
    return records
