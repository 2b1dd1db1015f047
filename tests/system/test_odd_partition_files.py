"""A partition one of whose files is no file: it alone is out of service, the log names the file, and nothing is lost when the file is back. An index is made
again from its segment at once.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from datetime import timedelta

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.errors import StorageError, TailraceError
from tailrace.private_appliance import start_embedded
from tests.kit.processes import wait_until

RECORDS = 20
SEGMENT = f"{0:020}.arrows"
INDEX = f"{0:020}.index"


def a_link(path: pathlib.Path) -> None:
    path.symlink_to("/etc/hostname")


def produce(address: str, topic: str, first: int, delivery_timeout_ms: int = 60_000) -> None:
    with Producer(address, acks="all", delivery_timeout_ms=delivery_timeout_ms) as producer:
        for handle in [producer.send(topic, b"%d" % number) for number in range(first, first + RECORDS)]:
            handle.result(60)


def read(address: str, topic: str, count: int) -> list[int]:
    found: list[int] = []
    with Consumer(topic, bootstrap=address, auto_offset_reset="earliest") as consumer:
        while len(found) < count:
            found += [int(record.value) for record in consumer.poll(60_000)]
    return found


@pytest.mark.parametrize("replace", [os.mkdir, os.mkfifo, a_link])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_an_index_that_is_no_file_is_put_aside_and_made_again(
    tmp_path: pathlib.Path, is_sealed: bool, replace: Callable[[pathlib.Path], None]
) -> None:
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("odd", 1, {"segment.bytes": 65536})])
    produce(running.address, "odd", 0)
    if is_sealed:
        with Producer(running.address, acks="all") as producer:
            producer.send("odd", b"%d" % RECORDS, headers=[("large", os.urandom(70 << 10))]).result(60)
    assert running.stop() == 0
    count = RECORDS + is_sealed

    odd = tmp_path / "odd-0" / INDEX
    was = odd.read_bytes()
    odd.unlink()
    replace(odd)
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        assert read(running.address, "odd", count) == list(range(count))
        produce(running.address, "odd", count)
        assert read(running.address, "odd", count + RECORDS) == list(range(count + RECORDS))
        wait_until(lambda: odd.is_file() and not odd.is_symlink() and odd.read_bytes()[: len(was)] == was, "the index is made again")
        assert f"index_put_aside path={odd} " in (tmp_path / "tailrace.log").read_text()
        with Admin(running.address) as admin:
            admin.delete_topics(["odd"])
        wait_until(lambda: not odd.parent.exists(), "what was put aside goes with its topic")
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("name", "replace"),
    [
        (SEGMENT, os.mkdir), (SEGMENT, os.mkfifo), (SEGMENT, a_link),
        ("partition.json", os.mkdir), ("partition.json", os.mkfifo),  # a link there is damage: the file is made again in its place
    ],
)  # fmt: skip
def test_a_file_that_is_none_stops_its_partition_alone_until_it_is_back(
    tmp_path: pathlib.Path, name: str, replace: Callable[[pathlib.Path], None]
) -> None:
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("odd", 1), NewTopic("sound", 1)])
    for topic in ("odd", "sound"):
        produce(running.address, topic, 0)
    assert running.stop() == 0

    odd = tmp_path / "odd-0" / name
    odd.rename(tmp_path / "kept")
    replace(odd)
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        assert read(running.address, "sound", RECORDS) == list(range(RECORDS))
        produce(running.address, "sound", RECORDS)
        with pytest.raises(TailraceError):
            produce(running.address, "odd", RECORDS, delivery_timeout_ms=3_000)
        lines = [line for line in (tmp_path / "tailrace.log").read_text().splitlines() if "log_open_failed" in line]
        assert any(str(odd) in line and "tailrace topic online odd" in line for line in lines), lines

        if odd.is_dir() and not odd.is_symlink():
            odd.rmdir()
        else:
            odd.unlink()
        (tmp_path / "kept").rename(odd)
        with Admin(running.address) as admin:
            admin.bring_online("odd")
        produce(running.address, "odd", RECORDS)
        assert read(running.address, "odd", 2 * RECORDS) == list(range(2 * RECORDS))
    finally:
        assert running.stop() == 0


def test_pending_records_whose_log_cannot_be_opened_are_not_listed_as_none(tmp_path: pathlib.Path) -> None:
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    with Admin(running.address) as admin, Producer(running.address, acks="all") as producer:
        admin.create_topics([NewTopic("later", 1, {"delay.enabled": True})])
        producer.send("later", b"x", deliver_after=timedelta(days=1)).result(60)
    assert running.stop() == 0

    odd = tmp_path / "later@delay-0" / "partition.json"
    odd.rename(tmp_path / "kept")
    odd.mkdir()
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        with Admin(running.address) as admin:
            with pytest.raises(StorageError, match="pending"):
                list(admin.list_delays("later"))
            odd.rmdir()
            (tmp_path / "kept").rename(odd)
            admin.bring_online("later")
            assert [delay.topic for delay in admin.list_delays("later")] == ["later"]
    finally:
        assert running.stop() == 0
