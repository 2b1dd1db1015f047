"""Offsets of open transactions that an earlier gateway has left with the coordinator.

A consumer that asks for stable offsets must not get those before such a transaction: its producer
may still commit it. The producer may be heard of later than the consumer, so the first question
behind a restart asks the coordinator for all of them.
"""

from __future__ import annotations

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.shared_state import producers_of
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.producers.transactional_producer import TransactionalProducer
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

MS = 1_000_000


def learn_left_offsets(call: Call) -> Steps:
    """Learn them, once in the life of this gateway. Returns a KafkaError."""
    services, producers = call.services, producers_of(call.services)
    if producers.knows_left:
        return KafkaError.NONE
    asker = services.own_peer or call.peer
    following = None
    while True:
        answer = yield asker.ask_json(Api.LIST_TRANSACTIONS, {"staged": True, "next": following})
        if answer.code is not ErrorCode.OK:
            return coordinator_error(answer.code)
        page = answer.json()
        for found in page["transactions"]:
            left = TransactionalProducer(
                found["producer_id"], found["producer_epoch"], found["owner"], found["timeout_ms"]
            )
            left.restore(found["staged"], (left.producer_id, left.producer_epoch))
            left.offsets_until_ns = services.now_ns + left.timeout_ms * MS
            producers.leave(found["transactional_id"], left)
        following = page["next"]
        if following is None:
            producers.knows_left = True
            return KafkaError.NONE
