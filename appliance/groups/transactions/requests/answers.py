"""Bodies of answers about transactions.

Owner: none; pure functions.
"""

from __future__ import annotations

import orjson

from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.transactions.ids.ends import OUTCOME_NAMES
from appliance.groups.transactions.requests.prepared import described
from shm.messages.transaction_messages import Outcome, ProducerEpoch


def following(row: TransactionalIdRow) -> dict[str, int]:
    """The identity that follows: what the owner uses from now on."""
    return {"producer_id": row.producer_id, "producer_epoch": row.epoch}


def ended(row: TransactionalIdRow, outcome: Outcome) -> bytes:
    """The answer to the owner of a transaction with this outcome."""
    return orjson.dumps({"outcome": OUTCOME_NAMES[outcome], **following(row)})


def joined(branch: ProducerEpoch) -> bytes:
    """The answer to the writer of a branch."""
    return orjson.dumps({"producer_id": branch.producer_id, "producer_epoch": branch.epoch})


def initialized(row: TransactionalIdRow, idle_ms: int) -> bytes:
    """The answer to a new owner. It asks DESCRIBE_TRANSACTION before its next batch, once it had no
    answer for `idle_ms`.
    """
    body = {
        **following(row), "owner": row.owner, "prepared": described(row), "idle_ms": idle_ms,
        "metadata": row.metadata,
    }  # fmt: skip
    return orjson.dumps(body)
