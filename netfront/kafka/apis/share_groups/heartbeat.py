"""ShareGroupHeartbeat: join, stay in and leave a share group.

Invariants:
- A member is told all partitions of its topics, with the next heartbeat after one has come.
- A member whose topics are not known here, because the gateway was restarted, joins again.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.cluster.group_settings import session_timeout_ms, setting_of
from netfront.kafka.apis.groups.classic_groups import check_group_name
from netfront.kafka.apis.share_groups.sessions import (
    ShareMember,
    member_key,
    share_error,
    share_members,
)
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api


def heartbeat(call: Call) -> Steps:
    """Join, stay in or leave a share group."""
    request = call.request
    name, epoch = request["group_id"], request["member_epoch"]
    check_group_name(name)
    asked: dict[str, Any] = {
        "group": name, "kind": "share", "member_id": request["member_id"], "member_epoch": epoch,
    }  # fmt: skip
    topics = request["subscribed_topic_names"]
    services = call.services
    interval_ms = setting_of(services, name, "share.heartbeat.interval.ms")
    known = share_members(call.services).get(member_key(call))
    if topics is not None:
        asked["topics"] = topics
    elif epoch > 0 and (known is None or known.topics is None):
        raise RefusedError(KafkaError.UNKNOWN_MEMBER_ID, "the gateway was restarted: join again")
    if epoch == 0:
        asked |= {
            "session_timeout_ms": session_timeout_ms(services, name, "share.session.timeout.ms"),
            "heartbeat_interval_ms": interval_ms, "client_id": call.client_id,
            "offset_reset": setting_of(services, name, "share.auto.offset.reset"),
        }  # fmt: skip
    answer = yield call.ask(Api.GROUP_HEARTBEAT, asked)
    if answer.code is not ErrorCode.OK:
        raise RefusedError(share_error(answer.code), answer.sentence)
    found = answer.json()
    assignment = None
    if epoch < 0:
        share_members(call.services).forget(member_key(call))
    else:
        member = share_members(call.services).note(member_key(call))
        member.epoch = found["member_epoch"]
        if topics is not None:
            member.topics, member.assigned = list(dict.fromkeys(topics)), None
        assignment = _assignment(call, member)
    return {
        "error_code": KafkaError.NONE, "member_id": found["member_id"],
        "member_epoch": found["member_epoch"], "heartbeat_interval_ms": interval_ms,
        "assignment": assignment,
    }  # fmt: skip


def _assignment(call: Call, member: ShareMember) -> dict[str, Any] | None:
    """All partitions of the member's topics; None: it knows them."""
    routes = call.services.routes
    found = {
        route.topic_id: route.partition_count
        for name in member.topics or ()
        if (route := routes.find_by_name(name, 0)) is not None
    }
    if found == member.assigned:
        return None
    member.assigned = found
    return {
        "topic_partitions": [
            {"topic_id": topic_id, "partitions": list(range(count))}
            for topic_id, count in found.items()
        ]
    }
