"""Requests of every Kafka API in which one field at a time has a value at a boundary.

The request around the field makes sense: it names a topic, a group and a producer that exist. So
the value reaches the code behind the first checks, which random requests seldom do. A finding is a
request without an answer, an answer that is not of its API and version, an internal error, an
error UNKNOWN_SERVER_ERROR, or a gateway that ended.

`make fuzz FUZZ=kafka-fields SECONDS=600`: all versions, in the order of SEED, as far as the time
goes.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from netfront.kafka.apis.table import APIS
from netfront.kafka.wire.definitions import definitions
from netfront.kafka.wire.encoding import request_writer
from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, NewTopic
from tailrace.core.errors import TopicExistsError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.fuzz.gateway.kafka_fuzzer import internal_errors, plain_gateway
from tests.kit.peers.kafka_batches import kafka_batch
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import HANG_LIMIT_S, children

TOPIC, GROUP, TRANSACTION = "fields", "g-fields", "t-fields"
PRODUCE, METADATA, INIT_PRODUCER_ID = 0, 3, 22
BEFORE_LOGIN = {17, 36}
OF_MEMBERS = {11, 68, 76}
"""A join waits for the members that are in its group, so each one has a group of its own."""
LONG_TEXT = 40_000
WAIT_MAX_MS = 1_000
SETTLED_MS = 5
"""Time that a response may wait for: rebalances and fetches."""
SENSIBLE: dict[str, Any] = {
    "acks": -1, "timeout_ms": 1_000, "replica_id": -1, "max_wait_ms": SETTLED_MS, "min_bytes": 1,
    "max_bytes": 1 << 20, "partition_max_bytes": 1 << 20, "session_epoch": -1, "max_records": 500,
    "batch_size": 500, "current_leader_epoch": -1, "last_fetched_epoch": -1, "leader_epoch": -1,
    "generation_id_or_member_epoch": -1, "generation_id": -1, "committed_leader_epoch": -1,
    "session_timeout_ms": 6_000, "rebalance_timeout_ms": SETTLED_MS, "protocol_type": "consumer",
    "num_partitions": 1, "replication_factor": 1, "transaction_timeout_ms": 60_000, "count": 2,
    "response_partition_limit": 10, "pattern_type_filter": 3, "resource_pattern_type": 3,
    "resource_type": 2, "resource_type_filter": 2, "operation": 3, "permission_type": 3,
    "principal": "User:fuzz", "host": "*", "entity_type": "user", "key": "consumer_byte_rate",
    "mechanism": 1, "iterations": 4096, "retention_time_ms": -1, "member_epoch": 0,
    "validate_only": True, "broker_ids": [0], "replicas": [0], "max_version_level": 1,
    "transactional_id": None, "group_id": GROUP, "coordinator_keys": [GROUP], "timestamp": -1,
    "transactional_ids": [TRANSACTION], "v3_and_below_transactional_id": TRANSACTION,
    "groups_names": ["absent"], "group_ids": [GROUP], "groups": [GROUP], "topic": TOPIC,
    "topic_name": TOPIC, "topic_names": ["absent"], "subscribed_topic_names": [TOPIC],
    "resource_types": [2], "first_offset": 0, "last_offset": 0, "acknowledge_types": [1],
}  # fmt: skip
USUAL: dict[str, Any] = {
    "string": "", "bytes": b"", "bool": False, "uuid": bytes(16), "float64": 1.0,
    "[]string": [TOPIC], "[]int8": [0], "[]int32": [0], "[]int64": [0],
}  # fmt: skip
NUMBERS = (0, 1, -1, -2, -3, 2, 99, 0x7FFF)
BATCH = kafka_batch(b"v")


class Known:
    """Ids that requests name, as the appliance has given them."""

    def __init__(self, topic_id: bytes, producer_id: int, producer_epoch: int) -> None:
        self.topic_id = topic_id
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch


def present(fields: list[dict[str, Any]], version: int) -> Iterator[dict[str, Any]]:
    for field in fields:
        if field["low"] <= version <= field["high"]:
            yield field


def sensible(api: int, field: dict[str, Any], version: int, known: Known) -> Any:
    """A value that fits."""
    kind, name = field["type"], field["name"]
    if kind == "[]struct":
        return [message(api, field["fields"], version, known)]
    if kind == "struct":
        if version >= field.get("null", version + 1):
            return None
        return message(api, field["fields"], version, known)
    if name == "transactional_id" and api not in (PRODUCE, INIT_PRODUCER_ID):
        return TRANSACTION
    if name == "topic_id":
        return bytes(16) if api == METADATA else known.topic_id
    if name.endswith("producer_id"):
        return known.producer_id
    if name.endswith("producer_epoch"):
        return known.producer_epoch
    if kind == "records":
        return BATCH
    if name in ("resource_type", "mechanism") and kind == "string":
        return "PLAIN"
    if name in SENSIBLE and not (name == "key" and api == 10):
        return copy.deepcopy(SENSIBLE[name])
    if name == "name":
        return TOPIC
    return copy.copy(USUAL.get(kind, 0))


def message(api: int, fields: list[dict[str, Any]], version: int, known: Known) -> dict[str, Any]:
    return {
        field["name"]: sensible(api, field, version, known) for field in present(fields, version)
    }


def boundaries(kind: str, value: Any) -> Iterator[Any]:
    """Values of a type that are at the end of what may be."""
    yield None
    if kind.startswith("[]"):
        one = value[:1] if value else []
        yield from ([], one * 2, one * 700)
        if kind[2:] not in ("struct",):
            for each in boundaries(kind[2:], one[0] if one else None):
                if each is not None:
                    yield [each]
    elif kind == "string":
        yield from ("", "absent", "\0", "\U0010ffff", "a/b", ".", "x" * 250, "y" * 32_767)
    elif kind in ("bytes", "records"):
        yield from (b"", b"\0", b"\xff" * 61, bytes(LONG_TEXT), BATCH + BATCH, BATCH[:-1])
    elif kind == "uuid":
        yield from (bytes(16), bytes(15) + b"\1", b"\xff" * 16)
    elif kind == "bool":
        yield from (False, True)
    elif kind == "float64":
        yield from (0.0, -1.0, float("nan"), float("inf"), 1e308)
    elif kind != "struct":
        bits = int(kind.strip("uint"))
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        if kind.startswith("uint"):
            low, high = 0, (1 << bits) - 1
        yield from sorted(
            {max(low, min(high, n)) for n in (*NUMBERS, low, low + 1, high, high - 1)}
        )


def variants(
    fields: list[dict[str, Any]], version: int, base: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(The field that differs, the message)."""
    for field in present(fields, version):
        name, kind = field["name"], field["type"]
        value = base[name]
        for other in boundaries(kind, value):
            if other is None and version < field.get("null", version + 1):
                continue
            yield f"{name}={other!r:.60}", {**base, name: other}
        if kind == "struct" and value:
            for place, inner in variants(field["fields"], version, value):
                yield f"{name}.{place}", {**base, name: inner}
        if kind == "[]struct" and value:
            for place, inner in variants(field["fields"], version, value[0]):
                yield f"{name}.{place}", {**base, name: [inner]}


def codes(answer: Any) -> Iterator[int]:
    """All error codes of an answer."""
    if isinstance(answer, dict):
        for name, value in answer.items():
            if name.endswith("error_code"):
                yield value
            elif isinstance(value, (dict, list)):
                yield from codes(value)
    elif isinstance(answer, list):
        for each in answer:
            yield from codes(each)


class Sweep:
    """The requests, and what was found."""

    def __init__(self, appliance: EmbeddedAppliance) -> None:
        self._appliance = appliance
        self._client: RawKafka | None = None
        self.count = 0
        self.findings: list[str] = []

    def known(self) -> Known:
        """Make what requests name, where earlier ones have removed it."""
        with Admin(self._appliance.address) as admin:
            try:
                admin.create_topics([NewTopic(TOPIC, 2)])
            except TopicExistsError:
                pass
            topic_id = bytes.fromhex(str(admin.describe_topics(TOPIC)[TOPIC]["topic_id"]))
        client = self._connected()
        given = {"transactional_id": TRANSACTION, "transaction_timeout_ms": 60_000}
        producer = client.ask(INIT_PRODUCER_ID, 4, {**given, "producer_id": -1,
                                                    "producer_epoch": -1})  # fmt: skip
        records = {"index": 0, "records": BATCH}
        topics = [{"name": TOPIC, "partition_data": [records]}]
        client.ask(PRODUCE, 9, {"acks": -1, "timeout_ms": 1_000, "topic_data": topics})
        return Known(topic_id, producer["producer_id"], producer["producer_epoch"])

    def _connected(self) -> RawKafka:
        self._client = self._client or RawKafka(self._appliance.kafka_addresses[0])
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def api(self, api: int, version: int, until: float) -> None:
        """All requests of one version."""
        fields = definitions()[str(api)]["request"]
        known = self.known()
        base = message(api, fields, version, known)
        for place, request in [("nothing", base), *variants(fields, version, base)]:
            if time.monotonic() > until:
                return
            self._send(api, version, place, request)

    def _send(self, api: int, version: int, place: str, request: dict[str, Any]) -> None:
        if api in OF_MEMBERS and request["group_id"] == GROUP:
            request = {**request, "group_id": f"{GROUP}-{self.count}"}
        if request.get("max_wait_ms", 0) > WAIT_MAX_MS:
            return  # it may be answered so late
        what = f"API {api} version {version}: {place}"
        body = bytearray()
        try:
            request_writer(api, version)(body, request)
        except Exception as error:
            self.findings.append(f"{what}: not encoded: {error!r}")
            return
        self.count += 1
        client = self._connected()
        client.set_timeout(HANG_LIMIT_S)
        try:
            sent = client.send_body(api, version, bytes(body))
            if api == PRODUCE and not request["acks"]:
                return  # it has no answer
            number, answer = client.receive(api, version)
        except TimeoutError:
            self.findings.append(f"{what}: no answer")
            self.close()
            return
        except AssertionError as error:
            if "closed" not in str(error):
                self.findings.append(f"{what}: {error!r}")
            self.close()
            return
        except OSError:
            self.close()
            return
        if number != sent:
            self.findings.append(f"{what}: the answer {number} came to the request {sent}")
            self.close()
        if int(KafkaError.UNKNOWN_SERVER_ERROR) in set(codes(answer)):
            self.findings.append(f"{what}: UNKNOWN_SERVER_ERROR {answer!r:.300}")


def sweep(
    appliance: EmbeddedAppliance, versions: Sequence[tuple[int, int]], seconds: float
) -> tuple[int, list[str]]:
    """Number of requests, and findings."""
    pid = children(appliance)["tr-kafka-0"]
    run, until = Sweep(appliance), time.monotonic() + seconds
    logged = 0
    for api, version in versions:
        run.api(api, version, until)
        errors = internal_errors(appliance)
        run.findings += [f"API {api} version {version}: {line.strip()}" for line in errors[logged:]]
        logged = len(errors)
        if children(appliance).get("tr-kafka-0") != pid:
            run.findings.append(f"API {api} version {version}: the gateway ended")
            break
    run.close()
    return run.count, run.findings


def every_version() -> list[tuple[int, int]]:
    return [
        (api, version)
        for api, row in sorted(APIS.items())
        for version in range(row.low, row.high + 1)
        if api not in BEFORE_LOGIN
    ]


def newest_versions() -> list[tuple[int, int]]:
    return [(api, row.high) for api, row in sorted(APIS.items()) if api not in BEFORE_LOGIN]


def main(arguments: Sequence[str] | None = None) -> int:
    """Send as much as there is time for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float, nargs="?", default=600)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    given = parser.parse_args(arguments)
    versions = every_version()
    random.Random(given.seed).shuffle(versions)
    with plain_gateway() as (appliance, _):
        count, findings = sweep(appliance, versions, given.seconds)
    print(*findings, f"{count} requests, {len(findings)} findings", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
