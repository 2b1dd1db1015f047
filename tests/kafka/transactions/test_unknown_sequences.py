"""Producers of transaction version 1 whose next sequence no process knows any more, because the
gateway died twice: none is fenced.
"""

from __future__ import annotations

from collections.abc import Iterator

import confluent_kafka
import pytest

from netfront.kafka.wire.errors import KafkaError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kafka.conftest import SETTINGS
from tests.kit.peers.kafka_owners import committed, make, owner
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import HANG_LIMIT_S
from tests.kit.transactional.visibility import await_visible


@pytest.fixture
def fresh() -> Iterator[EmbeddedAppliance]:
    """An appliance whose gateway has not died yet, so that it comes back at once."""
    running = start_embedded(settings=SETTINGS)
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("is_decided", [True, False])
def test_an_older_producer_whose_next_sequence_is_unknown_goes_on(
    fresh: EmbeddedAppliance, is_decided: bool
) -> None:
    """The first restart interrupts a transaction, which then ends without another batch."""
    gateway = fresh.kafka_addresses[0]
    topic = f"unknown-{is_decided}"
    topic_id = make(fresh, topic)
    with owner(gateway, topic, 1) as one, owner(gateway, f"{topic}-other", 1) as other:
        assert one.write(topic, topic_id, b"a") == 0
        assert one.end(True) == 0
        assert one.write(topic, topic_id, b"b") == 0
        kill_gateway(fresh)
        with RawKafka(gateway) as one.client:
            assert one.end(True) == 0
        await_visible(fresh.address, topic)
        kill_gateway(fresh)
        with RawKafka(gateway) as one.client, RawKafka(gateway) as other.client:
            if not is_decided:
                assert other.write(topic, topic_id, b"open") == 0
                assert one.write(topic, topic_id, b"c") == KafkaError.UNKNOWN_PRODUCER_ID
                assert one.end(False) == 0
                one.sequence = 2
            assert one.write(topic, topic_id, b"c") == 0
            assert one.write(topic, topic_id, b"c", sequence=2) == 0, "sent again"
            assert one.write(topic, topic_id, b"d") == 0
            assert one.end(True) == 0
            if not is_decided:
                assert other.end(False) == 0
    assert committed(fresh, topic, 4) == [b"a", b"b", b"c", b"d"]


def test_librdkafka_aborts_where_the_next_sequence_is_unknown_and_goes_on(
    fresh: EmbeddedAppliance,
) -> None:
    gateway = fresh.kafka_addresses[0]
    topic = "rdkafka-unknown"
    topic_id = make(fresh, topic)
    producer = confluent_kafka.Producer({"bootstrap.servers": gateway, "transactional.id": topic})
    producer.init_transactions(HANG_LIMIT_S)

    def write(value: bytes) -> None:
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        producer.flush(HANG_LIMIT_S)

    write(b"a")
    producer.commit_transaction(HANG_LIMIT_S)
    write(b"b")
    kill_gateway(fresh)
    producer.commit_transaction(HANG_LIMIT_S)
    kill_gateway(fresh)
    with owner(gateway, f"{topic}-other", 1) as other:
        assert other.write(topic, topic_id, b"open") == 0
        write(b"lost")
        with pytest.raises(confluent_kafka.KafkaException) as refused:
            producer.commit_transaction(HANG_LIMIT_S)
        assert refused.value.args[0].txn_requires_abort()
        producer.abort_transaction(HANG_LIMIT_S)
        write(b"c")
        producer.commit_transaction(HANG_LIMIT_S)
        assert other.end(False) == 0
    assert committed(fresh, topic, 3) == [b"a", b"b", b"c"]
