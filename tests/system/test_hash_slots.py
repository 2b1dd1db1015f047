"""Hash slots: keys keep their order while partitions are added under load, whoever is killed, and whoever has slept through it."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator

import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.hash_slots import owners_after, slot_of
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import kill_and_wait_for_successor
from tests.kit.slots import check_order, described

KEYS = [b"key %d" % number for number in range(300)]


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    """An appliance of this test's own."""
    running = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    yield running
    assert running.stop() == 0


def create(appliance: EmbeddedAppliance, topic: str, partitions: int, **configs: object) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, partitions, {"partitioner": "hash_slots", **configs})])


def add_partitions(appliance: EmbeddedAppliance, topic: str, count: int) -> None:
    with Admin(appliance.address) as admin:
        admin.create_partitions({topic: count})


class Load(threading.Thread):
    """A producer that sends the next value of each of its keys, again and again, until it is told to end; then all of it is delivered, or it says why not."""

    def __init__(self, appliance: EmbeddedAppliance, topic: str, keys: list[bytes]) -> None:
        super().__init__()
        self.counts = dict.fromkeys(keys, 0)
        self.rounds = threading.Semaphore(0)
        self._address, self._topic = appliance.address, topic
        self._ends = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with Producer(self._address, linger_ms=1, batch_size=4096) as producer:
                while not self._ends.is_set():
                    handles = [producer.send(self._topic, b"%d" % count, key=key) for key, count in self.counts.items()]
                    self.counts = {key: count + 1 for key, count in self.counts.items()}
                    if self.rounds._value % 4 == 0:
                        handles[0].result(60)
                    self.rounds.release()
                producer.flush()
                assert producer.metrics()["errors"] == 0
        except BaseException as error:
            self.error = error
            raise

    def wait_for_rounds(self, count: int) -> None:
        for _ in range(count):
            assert self.rounds.acquire(timeout=60), self.error

    def end(self) -> dict[bytes, int]:
        self._ends.set()
        self.join(120)
        assert self.error is None
        return self.counts


def test_adding_partitions_under_load_keeps_the_order_of_every_key(own: EmbeddedAppliance) -> None:
    create(own, "orders", 3)
    loads = [Load(own, "orders", KEYS[start::3]) for start in range(3)]
    for partitions in (5, 6, 9):
        for load in loads:
            load.wait_for_rounds(5)
        add_partitions(own, "orders", partitions)
        if partitions == 6:
            kill_and_wait_for_successor(own, "tr-worker-0")
    for load in loads:
        load.wait_for_rounds(5)
    counts = {key: count for load in loads for key, count in load.end().items()}
    places = check_order(own, "orders", counts)
    info = described(own, "orders")
    assert info.slot_map_version == 4
    assert info.owners == owners_after((3, 5, 6, 9))
    assert all(info.owners[slot_of(key)] in found for key, found in places.items())
    assert sum(len(found) > 1 for found in places.values()) > 50  # they did move
