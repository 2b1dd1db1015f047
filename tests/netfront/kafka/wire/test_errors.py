"""Each of our error codes has one of Kafka's."""

from __future__ import annotations

from kio.schema.errors import ErrorCode as KioErrorCode

from netfront.kafka.wire.errors import KAFKA_ERRORS, KafkaError, coordinator_error, kafka_error
from tailrace.core.error_codes import ErrorCode


def test_every_code_of_ours_has_one_of_kafkas() -> None:
    assert set(KAFKA_ERRORS) == set(ErrorCode)
    assert kafka_error(9_999) is KafkaError.UNKNOWN_SERVER_ERROR
    assert coordinator_error(9_999) is KafkaError.UNKNOWN_SERVER_ERROR


def test_the_numbers_are_kafkas() -> None:
    theirs = {code.name.upper(): code.value for code in KioErrorCode}
    assert {error.name: error.value for error in KafkaError}.items() <= theirs.items()
