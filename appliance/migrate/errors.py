"""Errors of a migration: one sentence that says what is wrong and what to do."""

from __future__ import annotations


class MigrationError(Exception):
    """The migration cannot go on."""


class TakenOverError(MigrationError):
    """Another `tailrace migrate` of the same name has begun."""


class InterruptedSessionError(Exception):
    """The connection of a side was lost, or records were appended by an earlier attempt: look up
    where the copy ends, and go on from there.
    """


class NoClientError(MigrationError):
    """The library that speaks to Kafka is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "confluent-kafka, which speaks to Kafka, is not installed; "
            "`pip install 'tailrace[kafka]'` brings it."
        )
