"""A front that starts while a topic changes: its clients are never told that the topic is gone."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import orjson
import pytest

from shm.memory.layout import ProcessWord, Role
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.protocol.frame import Api
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import (
    children,
    commits_of,
    kill_and_wait_for_successor,
    stopped,
    wait_until,
    word_of,
)


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start_embedded(data_dir=str(tmp_path / "data"))
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize(
    "is_fed_meanwhile",
    [
        pytest.param(False, id="waits"),
        pytest.param(True, id="loses-patience", marks=pytest.mark.long),
    ],
)
def test_a_front_that_starts_while_a_topic_changes_does_not_take_it_for_deleted(
    own: EmbeddedAppliance, is_fed_meanwhile: bool
) -> None:
    with Admin(own.address) as admin, Producer(own.address, acks="all") as producer:
        admin.create_topics([NewTopic("orders")])
        producer.send("orders", b"first").result(30)
        with Consumer(bootstrap=own.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition("orders", 0)])
            wait_until(lambda: bool(consumer.poll(100)), "the first record")
            decided = commits_of(own, Role.CONTROLLER)
            flusher = children(own)["tr-flusher-0"]
            with stopped(flusher):
                with RawClient(own.address) as client:
                    entry = {"name": "orders", "configs": {"retention.ms": 86_400_000}}
                    client.send(Api.ALTER_TOPICS, orjson.dumps({"topics": [entry]}))
                    wait_until(lambda: commits_of(own, Role.CONTROLLER) > decided, "the decision")
                awaited = (
                    ProcessWord.FED_GENERATION if is_fed_meanwhile else ProcessWord.FEED_REQUESTED
                )
                front = (own, Role.FRONT, 0, awaited)
                before = word_of(*front)
                kill_and_wait_for_successor(own, "tr-front-0")
                wait_until(lambda: word_of(*front) != before, awaited.name)
                sent = producer.send("orders", b"second")
                assert consumer.poll(500) == [], "its acknowledgement needs the flusher"
            assert sent.result(30).offset == 1
            wait_until(lambda: [r.value for r in consumer.poll(100)] == [b"second"], "the second")
        assert admin.describe_topics(["orders"])["orders"]["configs"]["retention.ms"] == 86_400_000
