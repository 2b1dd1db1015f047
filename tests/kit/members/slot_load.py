"""Load on a topic with hash slots: producers that go on while its partitions grow in number.

Owner: the test; a load has one thread, which `end` joins.
"""

from __future__ import annotations

import threading
from typing import Any

from tailrace import Admin, NewTopic, Producer
from tests.kit.processes import HANG_LIMIT_S

KEYS = [b"key %d" % number for number in range(300)]


def create(address: str, topic: str, partitions: int, **configs: Any) -> None:
    with Admin(address) as admin:
        admin.create_topics([NewTopic(topic, partitions, {"partitioner": "hash_slots", **configs})])


def add_partitions(address: str, topic: str, count: int) -> None:
    with Admin(address) as admin:
        admin.create_partitions({topic: count})


class Load(threading.Thread):
    """A producer that sends the next value of each of its keys, again and again, until it is told
    to end; then all of it is delivered, or it says why not.
    """

    def __init__(self, address: str, topic: str, keys: list[bytes]) -> None:
        super().__init__()
        self.counts = dict.fromkeys(keys, 0)
        self._rounds = 0
        self._turned = threading.Condition()
        self._address, self._topic = address, topic
        self._ends = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with Producer(self._address, linger_ms=1, batch_size=4096) as producer:
                while not self._ends.is_set():
                    handles = [
                        producer.send(self._topic, b"%d" % count, key=key)
                        for key, count in self.counts.items()
                    ]
                    self.counts = {key: count + 1 for key, count in self.counts.items()}
                    if self._rounds % 4 == 0:
                        handles[0].result(60)
                    with self._turned:
                        self._rounds += 1
                        self._turned.notify_all()
                producer.flush()
                assert producer.metrics()["errors"] == 0
        except BaseException as error:
            self.error = error
            raise

    def wait_for_rounds(self, count: int) -> None:
        """So many whole ones that begin from now on."""
        with self._turned:
            enough = self._rounds + count + 1
            assert self._turned.wait_for(
                lambda: self._rounds >= enough or self.error is not None, 60
            )
        assert self.error is None

    def end(self) -> dict[bytes, int]:
        """Returns how many values of each key were delivered."""
        self._ends.set()
        self.join(HANG_LIMIT_S)
        assert self.error is None
        return self.counts
