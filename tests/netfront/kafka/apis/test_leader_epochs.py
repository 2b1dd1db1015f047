"""Leader epochs of Kafka's clients."""

from __future__ import annotations

from dataclasses import replace

from netfront.kafka.apis.cluster.leader_epochs import (
    OF_DELETED,
    OLDEST,
    epoch_error,
    from_kafka,
    to_kafka,
)
from netfront.kafka.wire.errors import KafkaError
from tests.kit.log_files.logs import assignment

OLD = replace(assignment(0), created_us=1_795_000_000_000_000)
NEW = replace(OLD, created_us=OLD.created_us + 1_000_000)


def test_epochs_are_translated_in_both_directions() -> None:
    for epoch in (0, 1, 70_000):
        assert from_kafka(OLD, to_kafka(OLD, epoch)) == epoch
    assert (to_kafka(OLD, -1), from_kafka(OLD, -1)) == (-1, -1)


def test_an_epoch_of_the_topic_before_is_known_as_such() -> None:
    assert to_kafka(NEW, 0) > to_kafka(OLD, 0)
    assert from_kafka(NEW, to_kafka(OLD, 0)) == OF_DELETED


def test_an_epoch_that_an_earlier_version_has_told_is_ours() -> None:
    assert from_kafka(OLD, 0) == 0
    assert from_kafka(OLD, OLDEST - 1) == OLDEST - 1


def test_an_epoch_that_our_client_has_made_up_fits_the_protocol() -> None:
    assert to_kafka(OLD, 1 << 62) == 2**31 - 1


def test_a_client_that_knows_another_epoch_is_told() -> None:
    current = 3
    expected = {
        -1: KafkaError.NONE, 3: KafkaError.NONE, 2: KafkaError.FENCED_LEADER_EPOCH,
        to_kafka(NEW, 3): KafkaError.NONE, to_kafka(NEW, 2): KafkaError.FENCED_LEADER_EPOCH,
        to_kafka(NEW, 4): KafkaError.UNKNOWN_LEADER_EPOCH,
        to_kafka(replace(OLD, created_us=0), 900): KafkaError.FENCED_LEADER_EPOCH,
    }  # fmt: skip
    assert {known: epoch_error(NEW, current, known) for known in expected} == expected


def test_a_topic_without_a_time_has_epochs_above_those_of_earlier_versions() -> None:
    route = replace(OLD, created_us=0)
    assert from_kafka(route, to_kafka(route, 3)) == 3
    assert to_kafka(route, 0) == OLDEST
