"""A partition one of whose files is no file: it alone is out of service, the log names the file,
and nothing is lost when the file is back. An index is made again from its segment at once.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from datetime import timedelta

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import StorageError, TailraceError
from tailrace.embedded_appliance import start_embedded
from tests.kit.processes import wait_until

RECORDS = 20
SEGMENT = f"{0:020}.arrows"
INDEX = f"{0:020}.index"


def a_link(path: pathlib.Path) -> None:
    path.symlink_to("/etc/hostname")


def produce(address: str, topic: str, first: int, delivery_timeout_ms: int = 60_000) -> None:
    with Producer(address, acks="all", delivery_timeout_ms=delivery_timeout_ms) as producer:
        for handle in [
            producer.send(topic, b"%d" % number) for number in range(first, first + RECORDS)
        ]:
            handle.result(60)


def read(address: str, topic: str, count: int) -> list[int]:
    found: list[int] = []
    with Consumer(topic, bootstrap=address, auto_offset_reset="earliest") as consumer:
        while len(found) < count:
            found += [int(record.value) for record in consumer.poll(60_000)]
    return found


REPLACEMENTS: dict[str, Callable[[pathlib.Path], None]] = {
    "directory": os.mkdir,
    "fifo": os.mkfifo,
    "link": a_link,
}


def test_an_index_that_is_no_file_is_put_aside_and_made_again(tmp_path: pathlib.Path) -> None:
    """The index of a segment that is written to, and of a sealed one: each topic's is replaced in
    another way.
    """
    cases = {
        f"{kind}-{state}": (replace, state == "sealed")
        for kind, replace in REPLACEMENTS.items()
        for state in ("open", "sealed")
    }
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(topic, 1, {"segment.bytes": 65536}) for topic in cases])
    for topic, (_, is_sealed) in cases.items():
        produce(running.address, topic, 0)
        if is_sealed:
            with Producer(running.address, acks="all") as producer:
                producer.send(
                    topic, b"%d" % RECORDS, headers=[("large", os.urandom(70 << 10))]
                ).result(60)
    assert running.stop() == 0

    indexes = {topic: tmp_path / f"{topic}-0" / INDEX for topic in cases}
    before = {topic: index.read_bytes() for topic, index in indexes.items()}
    for topic, (replace, _) in cases.items():
        indexes[topic].unlink()
        replace(indexes[topic])
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        for topic, (_, is_sealed) in cases.items():
            count, index, was = RECORDS + is_sealed, indexes[topic], before[topic]
            assert read(running.address, topic, count) == list(range(count)), topic
            produce(running.address, topic, count)
            assert read(running.address, topic, count + RECORDS) == list(range(count + RECORDS)), (
                topic
            )
            wait_until(
                lambda index=index, was=was: (
                    index.is_file()
                    and not index.is_symlink()
                    and index.read_bytes()[: len(was)] == was
                ),  # type: ignore[misc]
                f"the index of {topic} is made again",
            )
            assert f"index_put_aside path={index} " in (tmp_path / "tailrace.log").read_text()
        with Admin(running.address) as admin:
            admin.delete_topics(list(cases))
        for topic, index in indexes.items():
            wait_until(
                lambda index=index: not index.parent.exists(),  # type: ignore[misc]
                f"what was put aside goes with {topic}",
            )
    finally:
        assert running.stop() == 0


def test_a_file_that_is_none_stops_its_partition_alone_until_it_is_back(
    tmp_path: pathlib.Path,
) -> None:
    """A link in place of a partition.json is no case: it is damage, and the file is made again in
    its place.
    """
    cases = {
        **{f"segment-{kind}": (SEGMENT, replace) for kind, replace in REPLACEMENTS.items()},
        **{
            f"partition-{kind}": ("partition.json", REPLACEMENTS[kind])
            for kind in ("directory", "fifo")
        },
    }
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(topic, 1) for topic in ("sound", *cases)])
    for topic in ("sound", *cases):
        produce(running.address, topic, 0)
    assert running.stop() == 0

    odd = {topic: tmp_path / f"{topic}-0" / name for topic, (name, _) in cases.items()}
    for topic, (_, replace) in cases.items():
        odd[topic].rename(tmp_path / f"kept-{topic}")
        replace(odd[topic])
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        assert read(running.address, "sound", RECORDS) == list(range(RECORDS))
        produce(running.address, "sound", RECORDS)
        for topic in cases:
            with pytest.raises(TailraceError):
                produce(running.address, topic, RECORDS, delivery_timeout_ms=1_000)
        lines = [
            line
            for line in (tmp_path / "tailrace.log").read_text().splitlines()
            if "log_open_failed" in line
        ]
        for topic, path in odd.items():
            assert any(
                str(path) in line and f"tailrace topic online {topic}" in line for line in lines
            ), lines
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
            (tmp_path / f"kept-{topic}").rename(path)
            with Admin(running.address) as admin:
                admin.bring_online(topic)
            produce(running.address, topic, RECORDS)
            assert read(running.address, topic, 2 * RECORDS) == list(range(2 * RECORDS)), topic
    finally:
        assert running.stop() == 0


def test_pending_records_whose_log_cannot_be_opened_are_not_listed_as_none(
    tmp_path: pathlib.Path,
) -> None:
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
