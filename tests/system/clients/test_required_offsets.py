"""Records that a producer positions: appended at their offset, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import (
    NotSupportedError,
    OffsetConflictError,
    TailraceError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.producer.positioned import PositionedProducer
from tailrace.protocol.session import ClientSession
from tests.kit.processes import wait_until


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    running = start_embedded()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def topic(appliance: EmbeddedAppliance, request: pytest.FixtureRequest) -> TopicPartition:
    name = str(request.node.name).replace("[", "-").replace("]", "")
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name)])
    return TopicPartition(name, 0)


def values(appliance: EmbeddedAppliance, topic: TopicPartition) -> list[bytes | None]:
    found: list[bytes | None] = []
    with Consumer(bootstrap=appliance.address) as consumer:
        consumer.assign([topic])
        consumer.seek_to_beginning(topic)
        end = consumer.end_offsets([topic])[topic]
        while consumer.position(topic) < end:
            found += [record.value for record in consumer.poll(timeout_ms=1_000)]
    return found


def test_records_are_appended_at_their_position(
    appliance: EmbeddedAppliance, topic: TopicPartition
) -> None:
    with PositionedProducer(appliance.address, batch_size=2_000) as producer:
        producer.set_position(topic, 0)
        futures = [producer.send(topic.topic, b"%d" % n, partition=0) for n in range(500)]
        producer.flush()
        assert [future.result(60).offset for future in futures] == list(range(500))


def test_a_second_copy_appends_nothing(appliance: EmbeddedAppliance, topic: TopicPartition) -> None:
    with (
        PositionedProducer(appliance.address) as first,
        PositionedProducer(appliance.address) as second,
    ):
        first.set_position(topic, 0)
        second.set_position(topic, 0)
        first.send(topic.topic, b"one", partition=0).result(60)
        late = second.send(topic.topic, b"one", partition=0)
        with pytest.raises(OffsetConflictError):
            late.result(60)
        behind = second.send(topic.topic, b"two", partition=0)
        with pytest.raises(TailraceError):
            behind.result(60)
        second.set_position(topic, 1)
        assert second.send(topic.topic, b"two", partition=0).result(60).offset == 1
    assert values(appliance, topic) == [b"one", b"two"]


def test_a_partition_without_a_position_takes_nothing(
    appliance: EmbeddedAppliance, topic: TopicPartition
) -> None:
    with PositionedProducer(appliance.address) as producer, pytest.raises(OffsetConflictError):
        producer.send(topic.topic, b"one", partition=0).result(60)


def test_positions_in_transactions(appliance: EmbeddedAppliance, topic: TopicPartition) -> None:
    with Producer(appliance.address) as other:
        other.send(topic.topic, b"before", partition=0).result(60)
    with PositionedProducer(appliance.address, transactional_id="positions") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.set_position(topic, 1)
        sent = producer.send(topic.topic, b"inside", partition=0)
        producer.commit_transaction()
        assert sent.result(60).offset == 1
        producer.begin_transaction()
        producer.set_position(topic, 2)  # the marker is there
        with pytest.raises(OffsetConflictError):
            producer.send(topic.topic, b"wrong", partition=0).result(60)
        producer.abort_transaction()
        producer.begin_transaction()
        producer.set_position(topic, 3)
        sent = producer.send(topic.topic, b"right", partition=0)
        producer.commit_transaction()
        assert sent.result(60).offset == 3
    wait_until(
        lambda: values(appliance, topic) == [b"before", b"inside", b"right"], "the commit is seen"
    )


def test_an_older_appliance_is_refused(
    appliance: EmbeddedAppliance, topic: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PositionedProducer(appliance.address) as producer:
        monkeypatch.setattr(ClientSession, "version", lambda _self, _api: 3)
        with pytest.raises(NotSupportedError, match="older version"):
            producer.set_position(topic, 0)
