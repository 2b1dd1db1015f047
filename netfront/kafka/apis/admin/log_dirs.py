"""DescribeLogDirs, AlterReplicaLogDirs."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, kafka_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api


def describe_log_dirs(call: Call) -> Steps:
    """List the data directories with the size of each partition there."""
    routes, asked = call.services.routes, call.request["topics"]
    answer = yield call.ask(Api.DESCRIBE_CLUSTER, {})
    if answer.code is not ErrorCode.OK:
        return {"error_code": kafka_error(answer.code), "results": []}
    directories = answer.json()["data_dirs"]
    wished = None
    if asked is not None:
        wished = {topic["topic"]: set(topic["partitions"]) for topic in asked}
    sizes: list[dict[str, list[dict[str, Any]]]] = [{} for _ in directories]
    for name in routes.names() if wished is None else sorted(wished):
        found = [
            route
            for partition in range(routes.partition_count(name))
            if (route := routes.find_by_name(name, partition)) is not None
            and (wished is None or not wished[name] or partition in wished[name])
        ]
        partitions = [
            {"topic": name, "partition": route.partition, "at": "latest"} for route in found
        ]
        offsets = yield call.ask(Api.LIST_OFFSETS, {"partitions": partitions})
        known = offsets.json()["offsets"] if offsets.code is ErrorCode.OK else []
        for route, offset in zip(found, known, strict=False):
            sizes[route.data_dir].setdefault(name, []).append(
                {"partition_index": route.partition, "is_future_key": False, "offset_lag": 0,
                 "partition_size": offset.get("size_bytes", 0)}
            )  # fmt: skip
    results = [
        {
            "error_code": KafkaError.NONE,
            "log_dir": str(directory.get("path", number)),
            "topics": [
                {"name": name, "partitions": entries} for name, entries in sizes[number].items()
            ],
            "total_bytes": directory.get("total_bytes", -1),
            "usable_bytes": directory.get("free_bytes", -1),
        }
        for number, directory in enumerate(directories)
    ]
    return {"error_code": KafkaError.NONE, "results": results}


def alter_replica_log_dirs(call: Call) -> Steps:
    """Answer that a partition is where it shall be. Partitions do not move between directories."""
    yield from ()
    services = call.services
    results: dict[str, list[dict[str, Any]]] = {}
    for directory in call.request["dirs"]:
        for topic in directory["topics"]:
            for partition in topic["partitions"]:
                route = services.routes.find_by_name(topic["name"], partition)
                code = KafkaError.NONE
                if route is None:
                    code = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
                elif directory["path"] not in services.data_dirs:
                    code = KafkaError.LOG_DIR_NOT_FOUND
                elif services.data_dirs[route.data_dir] != directory["path"]:
                    code = KafkaError.INVALID_REQUEST
                results.setdefault(topic["name"], []).append(
                    {"partition_index": partition, "error_code": code}
                )
    return {
        "results": [{"topic_name": name, "partitions": found} for name, found in results.items()]
    }
