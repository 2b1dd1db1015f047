"""Outcomes of an acknowledgement: Kafka's AcknowledgeType (KIP-932; RENEW: KIP-1222).

`ShareConsumer.acknowledge` takes an AcknowledgeType or its plain word.
"""

from __future__ import annotations

from enum import StrEnum

from tailrace.core.errors import InvalidRequestError

OUTCOMES = ("accept", "release", "reject", "renew")


class AcknowledgeType(StrEnum):
    """For `ShareConsumer.acknowledge`."""

    ACCEPT = "accept"
    """The record is processed."""
    RELEASE = "release"
    """The record is delivered again, to this consumer or another one."""
    REJECT = "reject"
    """The record goes to the dead-letter topic."""
    RENEW = "renew"
    """The lock begins again, and the record stays with this consumer."""


def checked_outcome(outcome: object) -> str:
    """Return the outcome as a plain word. Raises InvalidRequestError."""
    word = str(outcome).lower() if isinstance(outcome, str) else ""
    if word not in OUTCOMES:
        raise InvalidRequestError(
            f"the outcome is {outcome!r:.100}; allowed are {', '.join(OUTCOMES)}"
        )
    return word


def check_reason(reason: object, outcome: str) -> None:
    """Raise InvalidRequestError unless `reason` is text and the outcome is "reject"."""
    if not isinstance(reason, str):
        raise InvalidRequestError(
            f"reason is {reason!r:.100}; it takes a sentence, as text: write reason=str(...)"
        )
    if outcome != "reject":
        raise InvalidRequestError(
            f'reason is given with the outcome "{outcome}"; it becomes the header dlq.reason of a '
            'dead letter: leave it out, or write "reject"'
        )
