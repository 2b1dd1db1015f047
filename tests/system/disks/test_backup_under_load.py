"""A backup while records, transactions, delayed records and offsets go on."""

from __future__ import annotations

import datetime as dt
import pathlib
import threading
from functools import partial

from tailrace import Consumer, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.backups import back_up, records_in, restore
from tests.kit.appliances.contents import committed, everything
from tests.kit.appliances.killed_directories import start
from tests.kit.appliances.topics import create
from tests.kit.processes import HANG_LIMIT_S, wait_until

SEGMENT_BYTES = 1 << 20


class Load:
    """Programs that go on until `end`: one sends, one sends in transactions, one delays, one reads
    in a group.
    """

    def __init__(self, appliance: EmbeddedAppliance, topic: str) -> None:
        self.topic, self.pairs, self.later = topic, f"{topic}-pairs", f"{topic}-later"
        self.group = f"{topic}-g"
        self.acknowledged: list[int] = []
        """Numbers below are acknowledged."""
        self.paired: list[int] = []
        """Numbers whose transaction is committed."""
        self.delayed: list[int] = []
        """Numbers below are acknowledged, to be delivered later."""
        self._address = appliance.address
        self._ended = threading.Event()
        programs = (self._send, self._send_pairs, self._send_delayed, self._consume)
        self._threads = [threading.Thread(target=program) for program in programs]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def has_gone_on(self, count: int) -> bool:
        return len(self.paired) > count + 3 and bool(self.acknowledged) and bool(self.delayed)

    def _send(self) -> None:
        with Producer(self._address) as producer:
            number = 0
            while not self._ended.is_set():
                handles = [
                    producer.send(self.topic, b"%d" % each + bytes(500), key=b"%d" % each)
                    for each in range(number, number + 100)
                ]
                for handle in handles:
                    handle.result(HANG_LIMIT_S)
                number += 100
                self.acknowledged.append(number)

    def _send_pairs(self) -> None:
        with Producer(self._address, transactional_id=self.pairs) as producer:
            number = 0
            while not self._ended.is_set():
                with producer.transaction():
                    for partition in (0, 1):
                        producer.send(self.pairs, b"%d" % number, partition=partition)
                self.paired.append(number)
                number += 1

    def _send_delayed(self) -> None:
        with Producer(self._address) as producer:
            number = 0
            while not self._ended.is_set():
                delays = [dt.timedelta(milliseconds=each % 7 * 100) for each in range(20)]
                handles = [
                    producer.send(self.later, b"%d" % each, deliver_after=delay)
                    for each, delay in enumerate(delays, number)
                ]
                for handle in handles:
                    handle.result(HANG_LIMIT_S)
                number += 20
                self.delayed.append(number)

    def _consume(self) -> None:
        with Consumer(
            self.topic, bootstrap=self._address, group_id=self.group, auto_offset_reset="earliest"
        ) as consumer:
            while not self._ended.is_set():
                if consumer.poll(timeout_ms=100):
                    consumer.commit()


def test_every_record_acknowledged_before_a_backup_under_load_is_in_its_restore(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    """Transactions write one number to both partitions: a restore has both or neither. Delayed
    records become due all the time: a restore delivers each once.
    """
    load = Load(appliance, topic)
    create(appliance, load.later, 1, delay_enabled=True)
    create(appliance, topic, 3, segment_bytes=SEGMENT_BYTES)
    create(appliance, load.pairs, 2, segment_bytes=SEGMENT_BYTES)
    load.start()
    try:
        for _ in range(4):
            wait_until(partial(load.has_gone_on, len(load.paired)), "transactions go on")
            sent, paired, due = load.acknowledged[-1], load.paired[-1], load.delayed[-1]
            back_up(appliance.data_dir, tmp_path / "target")
    finally:
        load.end()
    restore(tmp_path / "target", tmp_path / "data")
    records_in(tmp_path / "data")
    restored = start(tmp_path / "data")
    try:
        check_records(restored, load, sent)
        check_pairs(restored, load, paired)
        check_delayed(restored, load, due)
        check_offsets(restored, load)
    finally:
        assert restored.stop() == 0


def check_records(restored: EmbeddedAppliance, load: Load, sent: int) -> None:
    values = [
        int(value.rstrip(b"\0"))
        for records in everything(restored, load.topic).values()
        for _, value in records
    ]
    assert sorted(values) == sorted(set(values))
    assert set(range(sent)) <= set(values)


def check_pairs(restored: EmbeddedAppliance, load: Load, paired: int) -> None:
    def are_paired() -> bool:
        found = everything(restored, load.pairs)
        return len(found[0]) > paired and [v for _, v in found[0]] == [v for _, v in found[1]]

    # the markers of the last ones follow a moment after the start
    wait_until(are_paired, "each transaction is in both partitions, or in none")
    numbers = [int(value) for _, value in everything(restored, load.pairs)[0]]
    assert numbers == list(range(len(numbers)))


def check_delayed(restored: EmbeddedAppliance, load: Load, due: int) -> None:
    def delivered() -> list[int]:
        return [int(value) for _, value in everything(restored, load.later)[0]]

    wait_until(lambda: set(delivered()) >= set(range(due)), "delayed records are delivered")
    values = delivered()
    assert sorted(values) == sorted(set(values))


def check_offsets(restored: EmbeddedAppliance, load: Load) -> None:
    with Consumer(bootstrap=restored.address) as consumer:
        ends = consumer.end_offsets([TopicPartition(load.topic, number) for number in range(3)])
    for partition, offset in committed(restored, load.group, load.topic).items():
        assert offset <= ends[TopicPartition(load.topic, partition)]
