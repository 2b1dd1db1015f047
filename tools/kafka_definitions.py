"""Distils Apache Kafka's message definitions into `netfront/kafka/wire/definitions.json`.

Run `python -m tools.kafka_definitions` after an update of kafka-python or kio, both development
dependencies. kafka-python carries Kafka's own JSON files (Apache License 2.0). Messages that it
lacks are read from kio's classes.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.resources
import json
import pathlib
import re
import types
import typing
from typing import Any

TARGET = pathlib.Path(__file__).parents[1] / "netfront/kafka/wire/definitions.json"
FROM_JSON = [
    "Produce",
    "Fetch",
    "ListOffsets",
    "Metadata",
    "OffsetCommit",
    "OffsetFetch",
    "FindCoordinator",
    "JoinGroup",
    "Heartbeat",
    "LeaveGroup",
    "SyncGroup",
    "DescribeGroups",
    "ListGroups",
    "ApiVersions",
    "CreateTopics",
    "DeleteTopics",
    "DeleteRecords",
    "InitProducerId",
    "OffsetForLeaderEpoch",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "EndTxn",
    "TxnOffsetCommit",
    "DescribeConfigs",
    "AlterConfigs",
    "DescribeLogDirs",
    "AlterReplicaLogDirs",
    "AlterPartitionReassignments",
    "CreatePartitions",
    "DeleteGroups",
    "IncrementalAlterConfigs",
    "OffsetDelete",
    "DescribeCluster",
    "DescribeProducers",
    "DescribeTransactions",
    "ListTransactions",
    "ListPartitionReassignments",
    "ListConfigResources",
    "DescribeTopicPartitions",
    "ElectLeaders",
    "DescribeQuorum",
    "UpdateFeatures",
    "WriteTxnMarkers",
    "SaslHandshake",
    "SaslAuthenticate",
    "DescribeAcls",
    "CreateAcls",
    "DeleteAcls",
    "DescribeClientQuotas",
    "AlterClientQuotas",
    "DescribeUserScramCredentials",
    "AlterUserScramCredentials",
]
FROM_KIO = {
    68: "consumer_group_heartbeat", 69: "consumer_group_describe", 76: "share_group_heartbeat",
    77: "share_group_describe", 78: "share_fetch", 79: "share_acknowledge",
    90: "describe_share_group_offsets", 91: "alter_share_group_offsets",
    92: "delete_share_group_offsets",
}  # fmt: skip
STRUCTURES = ("ConsumerProtocolSubscription", "ConsumerProtocolAssignment")
NEVER = 32_767
Field = dict[str, Any]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def version_range(text: str) -> tuple[int, int]:
    if text == "none":
        return NEVER, NEVER
    low, _, high = text.partition("-")
    if text.endswith("+"):
        return int(text[:-1]), NEVER
    return int(low), int(high or low)


def read_json(name: str) -> dict[str, Any]:
    folder = importlib.resources.files("kafka.protocol.schemas.resources")
    text = folder.joinpath(f"{name}.json").read_text()
    found: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return found


def fields_of(listed: list[dict[str, Any]], common: dict[str, list[dict[str, Any]]]) -> list[Field]:
    return [field_of(field, common) for field in listed]


def field_of(field: dict[str, Any], common: dict[str, list[dict[str, Any]]]) -> Field:
    kind: str = field["type"]
    element = kind.removeprefix("[]")
    low, high = version_range(field["versions"])
    made: Field = {"name": snake(field["name"]), "type": kind, "low": low, "high": high}
    if "nullableVersions" in field:
        made["null"] = version_range(field["nullableVersions"])[0]
    if "tag" in field:
        made["tag"] = field["tag"]
        made["tag_low"] = version_range(field.get("taggedVersions", field["versions"]))[0]
    if "default" in field:
        made["default"] = default_of(element, field["default"], kind != element)
    inner = field.get("fields") or common.get(element)
    if inner is not None:
        made["type"] = "[]struct" if kind != element else "struct"
        made["fields"] = fields_of(inner, common)
    return made


def default_of(element: str, text: Any, is_array: bool) -> Any:
    if text == "null":
        return None
    if is_array:
        return []
    if element == "bool":
        return text in (True, "true")
    if element in ("string", "bytes", "uuid"):
        return text
    if element == "float64":
        return float(text)
    return int(str(text), 0)


def message(name: str) -> dict[str, Any]:
    request, response = read_json(f"{name}Request"), read_json(f"{name}Response")
    low, high = version_range(request["validVersions"])
    made: dict[str, Any] = {
        "name": name, "low": low, "high": high,
        "flexible": version_range(request["flexibleVersions"])[0],
    }  # fmt: skip
    for part, read in (("request", request), ("response", response)):
        common = {c["name"]: c["fields"] for c in read.get("commonStructs", [])}
        made[part] = fields_of(read["fields"], common)
    return made


def structure(name: str) -> dict[str, Any]:
    read = read_json(name)
    low, high = version_range(read["validVersions"])
    return {
        "name": name, "low": low, "high": high, "flexible": NEVER,
        "fields": fields_of(read["fields"], {}),
    }  # fmt: skip


# ---- kio -----------------------------------------------------------------------------------------

KIO_TYPES = {
    "error_code": "int16", "timedelta_i32": "int32", "timedelta_i64": "int64",
    "datetime_i64": "int64",
}  # fmt: skip


def kio_message(api: int, name: str) -> dict[str, Any]:
    package = importlib.import_module(f"kio.schema.{name}")
    versions = sorted(
        int(path.name[1:])
        for path in pathlib.Path(str(package.__file__)).parent.iterdir()
        if re.fullmatch(r"v\d+", path.name)
    )
    title = "".join(word.title() for word in name.split("_"))
    made: dict[str, Any] = {"name": title, "low": versions[0], "high": versions[-1], "flexible": 0}
    for part in ("request", "response"):
        merged: list[Field] = []
        for version in reversed(versions):
            module = importlib.import_module(f"kio.schema.{name}.v{version}.{part}")
            merge(merged, kio_fields(getattr(module, title + part.title()), version), version)
        made[part] = merged
    return made


def merge(into: list[Field], found: list[Field], version: int) -> None:
    """Add the fields of an earlier version, each behind the one that it follows there."""
    at = 0
    for field in found:
        known = next((f for f in into if f["name"] == field["name"]), None)
        if known is None:
            into.insert(at, field)
        else:
            at = into.index(known)
            known["low"] = version
            if "fields" in field:
                merge(known["fields"], field["fields"], version)
        at += 1


def kio_fields(kind: Any, version: int) -> list[Field]:
    hints = typing.get_type_hints(kind)
    return [kio_field(field, hints[field.name], version) for field in dataclasses.fields(kind)]


def kio_field(field: Any, hint: Any, version: int) -> Field:
    kafka = field.metadata.get("kafka_type")
    inner = hint
    nullable = False
    if typing.get_origin(inner) in (types.UnionType, typing.Union):
        (inner,) = [a for a in typing.get_args(inner) if a is not type(None)]
        nullable = kafka != "uuid"
    is_array = typing.get_origin(inner) is tuple
    if is_array:
        inner = typing.get_args(inner)[0]
    name = field.name + ("_ms" if kafka and kafka.startswith("timedelta") else "")
    kind = KIO_TYPES.get(kafka, kafka) or "struct"
    made: Field = {
        "name": name, "type": f"[]{kind}" if is_array else kind, "low": version, "high": version,
    }  # fmt: skip
    if nullable:
        made["null"] = 0
    if "tag" in field.metadata:
        made["tag"], made["tag_low"] = field.metadata["tag"], 0
    if field.default is not dataclasses.MISSING and kind != "struct" and not is_array:
        default = field.default
        if hasattr(default, "total_seconds"):
            default = int(default.total_seconds() * 1000)
        if default is None or isinstance(default, (bool, int, str)):
            made["default"] = default
    elif nullable:
        made["default"] = None
    if kind == "struct":
        made["fields"] = kio_fields(inner, version)
    return made


def main() -> None:
    """Write the file."""
    apis = {str(read_json(f"{name}Request")["apiKey"]): message(name) for name in FROM_JSON}
    apis |= {str(api): kio_message(api, name) for api, name in FROM_KIO.items()}
    ordered = dict(sorted(apis.items(), key=lambda item: int(item[0])))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in ordered.items()]
    lines += [f"{json.dumps(name)}: {json.dumps(structure(name))}" for name in STRUCTURES]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
