"""ShareGroupHeartbeat: join, stay in and leave a share group."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.groups.classic_groups import check_group_name
from netfront.kafka.apis.share_groups.sessions import (
    member_key,
    share_error,
    share_member,
    share_members,
)
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

SESSION_TIMEOUT_MS = 45_000
HEARTBEAT_INTERVAL_MS = 3_000


def heartbeat(call: Call) -> Steps:
    """Join, stay in or leave a share group."""
    request = call.request
    name, epoch = request["group_id"], request["member_epoch"]
    check_group_name(name)
    asked: dict[str, Any] = {
        "group": name, "kind": "share", "member_id": request["member_id"], "member_epoch": epoch,
    }  # fmt: skip
    topics = request["subscribed_topic_names"]
    if topics is not None:
        asked["topics"] = topics
    if epoch == 0:
        asked |= {
            "session_timeout_ms": SESSION_TIMEOUT_MS, "client_id": call.client_id,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS, "offset_reset": "latest",
        }  # fmt: skip
    answer = yield call.ask(Api.GROUP_HEARTBEAT, asked)
    if answer.code is not ErrorCode.OK:
        raise RefusedError(share_error(answer.code), answer.sentence)
    found = answer.json()
    if epoch < 0:
        share_members(call.services).pop(member_key(call), None)
    else:
        share_member(call).epoch = found["member_epoch"]
    names = found.get("topic_names")
    assignment = None
    if names is not None:
        routes = call.services.routes
        assignment = {
            "topic_partitions": [
                {
                    "topic_id": bytes.fromhex(topic_id),
                    "partitions": list(range(routes.partition_count(topic))),
                }
                for topic_id, topic in names.items()
            ]
        }
    return {
        "error_code": KafkaError.NONE, "member_id": found["member_id"],
        "member_epoch": found["member_epoch"], "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
        "assignment": assignment,
    }  # fmt: skip
