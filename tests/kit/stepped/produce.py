"""Batches that say which they are, and what a front answers to PRODUCE requests of version 2."""

from __future__ import annotations

from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import produce_messages
from tests.kit.stepped.fronts import message_of

TIMED_OUT = produce_messages.ProducedEntry(ErrorCode.TIMED_OUT, 0, -1, -1, -1)


def batch(number: int, size: int = 200) -> bytes:
    """Bytes that say which batch it is; a front does not look into them."""
    return number.to_bytes(4, "little") * (size // 4)


def number_of(data: bytes) -> int:
    return int.from_bytes(data[:4], "little")


def produced(answer: tuple[ErrorCode, list[bytes]]) -> list[produce_messages.ProducedEntry]:
    """Results of the batches of a request that was not refused as a whole."""
    assert answer[0] is ErrorCode.OK, message_of(answer)
    return produce_messages.decode_produced_batches(answer[1][0])


def codes(answer: tuple[ErrorCode, list[bytes]]) -> list[ErrorCode]:
    return [ErrorCode(entry.error) for entry in produced(answer)]
