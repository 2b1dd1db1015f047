"""Rules of records and transactions: Produce, Fetch, offsets, producers, transactional ids."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, DisconnectError, RefusedError
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.rights.checks import (
    ON_CLUSTER,
    AnsweredError,
    Entry,
    Merge,
    denied_topics,
    failed,
    is_allowed,
    require,
    sentence,
    separated,
)
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError
from shm.rights.acl import (
    ALTER,
    CLUSTER,
    DESCRIBE,
    GROUP,
    IDEMPOTENT_WRITE,
    READ,
    TOPIC,
    TRANSACTIONAL_ID,
    WRITE,
)

# ---- Produce -------------------------------------------------------------------------------------


def produce(call: Call) -> Merge | None:
    """Write of the topics, and of the transactional id."""
    request, acks = call.request, call.request["acks"]
    name = request.get("transactional_id")
    if name is not None and not is_allowed(call, WRITE, TRANSACTIONAL_ID, name):
        error = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        _disconnect_if_unanswered(call, acks)
        raise AnsweredError({"responses": [_produced(t, error) for t in request["topic_data"]]})
    denied = denied_topics(call, request, "topic_data", WRITE)
    if not denied:
        return None
    _disconnect_if_unanswered(call, acks)

    def merge(response: Entry) -> None:
        response["responses"] += [_produced(topic, error) for topic, error in denied]

    return merge


def _disconnect_if_unanswered(call: Call, acks: int) -> None:
    """A producer without acknowledgements learns of its refusal by the end of its connection."""
    if not acks:
        assert call.principal is not None
        raise DisconnectError(f"{call.principal.names[0]} may not write, and acks is 0")


def _produced(topic: Entry, error: KafkaError) -> Entry:
    return {
        "name": topic.get("name"), "topic_id": topic.get("topic_id", ZERO_UUID),
        "partition_responses": [
            {"index": data["index"], "error_code": error, "base_offset": -1,
             "log_append_time_ms": -1, "log_start_offset": -1}
            for data in topic["partition_data"]
        ],
    }  # fmt: skip


# ---- Fetch, ListOffsets, OffsetForLeaderEpoch, DeleteRecords: see the table ----------------------

fetched = failed(
    "partition", high_watermark=-1, last_stable_offset=-1, log_start_offset=-1,
    aborted_transactions=[], preferred_read_replica=-1, records=b"",
)  # fmt: skip
listed_offsets = failed("partition_index", timestamp=-1, offset=-1, leader_epoch=-1)
deleted_records = failed("partition_index", low_watermark=-1)


def ended_epochs(topic: Entry, error: KafkaError) -> list[Entry]:
    """The entries of OffsetForLeaderEpoch for a topic that is denied."""
    return [
        {"partition": each["partition"], "error_code": error, "leader_epoch": -1, "end_offset": -1}
        for each in topic["partitions"]
    ]


# ---- producers and transactions ------------------------------------------------------------------


def init_producer_id(call: Call) -> None:
    """Write of the transactional id; of some topic, or idempotent writing, without one."""
    name = call.request["transactional_id"]
    if name is not None:
        require(call, WRITE, TRANSACTIONAL_ID, name)
        return
    assert call.principal is not None
    if not (
        call.principal.may_any(WRITE, TOPIC) or is_allowed(call, IDEMPOTENT_WRITE, *ON_CLUSTER)
    ):  # fmt: skip
        raise RefusedError(
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
            sentence(call, IDEMPOTENT_WRITE, CLUSTER, ""),
        )


def add_partitions(call: Call) -> None:
    """Write of the transactional id, and of all topics: of one alone nothing is added."""
    request = call.request
    topics = request["v3_and_below_topics"]
    if not is_allowed(call, WRITE, TRANSACTIONAL_ID, request["v3_and_below_transactional_id"]):
        error = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        raise AnsweredError(_added([(topic, error) for topic in topics]))
    names = (topic["name"] for topic in topics)
    denied = {name for name in names if not is_allowed(call, WRITE, TOPIC, name)}
    if denied:
        raise AnsweredError(
            _added(
                [
                    (topic, KafkaError.TOPIC_AUTHORIZATION_FAILED if topic["name"] in denied
                     else KafkaError.OPERATION_NOT_ATTEMPTED)
                    for topic in topics
                ]
            )
        )  # fmt: skip


def _added(topics: list[tuple[Entry, KafkaError]]) -> dict[str, Any]:
    return {
        "results_by_topic_v3_and_below": [
            {
                "name": topic["name"],
                "results_by_partition": [
                    {"partition_index": partition, "partition_error_code": error}
                    for partition in topic["partitions"]
                ],
            }
            for topic, error in topics
        ]
    }


def add_offsets(call: Call) -> None:
    """Write of the transactional id, read of the group."""
    require(call, WRITE, TRANSACTIONAL_ID, call.request["transactional_id"])
    require(call, READ, GROUP, call.request["group_id"])


def end_transaction(call: Call) -> None:
    """Write of the transactional id."""
    require(call, WRITE, TRANSACTIONAL_ID, call.request["transactional_id"])


def commit_offsets(call: Call) -> Merge | None:
    """Write of the transactional id, read of the group and of the topics."""
    request = call.request
    error = KafkaError.NONE
    if not is_allowed(call, WRITE, TRANSACTIONAL_ID, request["transactional_id"]):
        error = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    elif not is_allowed(call, READ, GROUP, request["group_id"]):
        error = KafkaError.GROUP_AUTHORIZATION_FAILED
    if error is not KafkaError.NONE:
        raise AnsweredError({"topics": [_committed(topic, error) for topic in request["topics"]]})
    denied = denied_topics(call, request, "topics", READ)

    def merge(response: Entry) -> None:
        response["topics"] += [_committed(topic, error) for topic, error in denied]

    return merge if denied else None


_codes = failed("partition_index")


def _committed(topic: Entry, error: KafkaError) -> Entry:
    return {"name": topic["name"], "partitions": _codes(topic, error)}


def write_markers(call: Call) -> None:
    """Alter of the cluster."""
    if is_allowed(call, ALTER, *ON_CLUSTER):
        return
    error = KafkaError.CLUSTER_AUTHORIZATION_FAILED
    raise AnsweredError(
        {
            "markers": [
                {
                    "producer_id": marker["producer_id"],
                    "topics": [
                        {"name": topic["name"],
                         "partitions": [{"partition_index": index, "error_code": error}
                                        for index in topic["partition_indexes"]]}
                        for topic in marker["topics"]
                    ],
                }
                for marker in call.request["markers"]
            ]
        }
    )  # fmt: skip


def producers(topic: Entry, error: KafkaError) -> list[Entry]:
    """The entries of DescribeProducers for a topic that is denied."""
    return [
        {"partition_index": index, "error_code": error, "error_message": None,
         "active_producers": []}
        for index in topic["partition_indexes"]
    ]  # fmt: skip


def describe_transactions(call: Call) -> Steps:
    """Describe of each transactional id."""
    request = call.request
    request["transactional_ids"], denied = yield from separated(
        call,
        request["transactional_ids"],
        lambda name: is_allowed(call, DESCRIBE, TRANSACTIONAL_ID, name),
    )

    def merge(response: Entry) -> None:
        response["transaction_states"] += [
            {"error_code": KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
             "transactional_id": name}
            for name in denied
        ]  # fmt: skip

    return merge if denied else None


def list_transactions(call: Call) -> Merge:
    """Nothing; those that the user may describe are listed."""

    def merge(response: Entry) -> None:
        response["transaction_states"] = [
            row
            for row in response["transaction_states"]
            if call.may(DESCRIBE, TRANSACTIONAL_ID, row["transactional_id"])
        ]

    return merge
