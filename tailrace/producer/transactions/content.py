"""Content of a transaction beside its records: offsets, acknowledgements and branches. It goes with
END_TRANSACTION.

Owner: one Producer. The state is changed in sections of its lock.
Invariants: content is sent once, by the request that commits or prepares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tailrace.client.connections.steps import Steps
from tailrace.client.topics.offsets import offsets_of
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.producer.transactions.acknowledgements import (
    attach_of,
    check_size,
    members_json,
    outcome_of,
    records_of,
)
from tailrace.producer.transactions.branches.arguments import named_json
from tailrace.producer.transactions.coordinator_requests import PREPARE
from tailrace.producer.transactions.offsets import groups_json, metadata_of
from tailrace.producer.transactions.state import Call, TransactionState
from tailrace.protocol.json_messages import encode_json

if TYPE_CHECKING:
    from tailrace.core.records import ConsumerGroupMetadata, OffsetAndMetadata
    from tailrace.core.topic_partition import TopicPartition


def add_offsets(
    sender_thread: SenderThread,
    state: TransactionState,
    offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
    group_metadata: ConsumerGroupMetadata | str,
) -> Steps[None]:
    """Have the offsets go with the commit."""
    found, metadata = offsets_of(offsets), metadata_of(group_metadata)

    def add() -> None:
        sender_thread.check_usable()
        state.check(Call.OFFSETS)
        state.add_offsets(metadata, found)

    sender_thread.do(add)
    yield from ()


def add_acknowledgements(
    sender_thread: SenderThread,
    state: TransactionState,
    share_consumer: Any,
    records: Any,
    outcome: Any,
) -> Steps[None]:
    """Have the acknowledgements go with the commit."""
    attach, word, found = attach_of(share_consumer), outcome_of(outcome), records_of(records)

    def add() -> None:
        sender_thread.check_usable()
        state.check(Call.ACKNOWLEDGEMENTS)
        if not found:
            return
        attached = attach(found, word)
        try:
            check_size([*state.attached, attached])
        except BaseException:
            attached.ended_by = "abort"
            raise
        state.attached.append(attached)

    sender_thread.do(add)
    yield from ()


def end_body(state: TransactionState, outcome: str) -> bytes:
    """The body of END_TRANSACTION: `outcome` is "commit", "abort" or "prepare"."""
    request: dict[str, Any] = {
        "transactional_id": state.transactional_id,
        "owner": state.owner,
        "producer_id": state.producer_id,
        "producer_epoch": state.epoch,
        "outcome": outcome,
        "offsets": [],
    }
    if outcome == PREPARE and state.prepared is not None:
        request["tag"] = state.prepared.tag
    if outcome == PREPARE or (outcome == "commit" and state.prepared is None):
        request["offsets"] = groups_json(state.offsets.values())
        request.update(named_json(state.branches))
        if state.attached:
            request["acknowledgements"] = members_json(state.attached)
    return encode_json(request)
