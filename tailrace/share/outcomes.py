"""What becomes of a record of a queue: Kafka's AcknowledgeType (KIP-932; RENEW: KIP-1222). The
plain words are taken as well.
"""

from __future__ import annotations

from enum import StrEnum


class AcknowledgeType(StrEnum):
    """For `ShareConsumer.acknowledge`."""

    ACCEPT = "accept"
    """It is done."""
    RELEASE = "release"
    """This consumer or another one gets it again."""
    REJECT = "reject"
    """It goes to the dead-letter topic."""
    RENEW = "renew"
    """Its lock begins anew, it stays with this consumer."""
