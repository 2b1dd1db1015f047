"""Kafka's messages: every API and version against kio's codec, and bytes that are none."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from netfront.kafka.wire.decoding import (
    ENTRIES_MAX,
    MalformedError,
    Reader,
    decode,
    request_reader,
    response_reader,
)
from netfront.kafka.wire.definitions import default_of, definitions
from netfront.kafka.wire.encoding import request_writer, response_writer, write_varint
from tests.kit.matrices import case

APIS = sorted(int(key) for key in definitions() if key.isdigit())


def some(field: dict[str, Any], version: int, rng: random.Random) -> Any:
    kind: str = field["type"]
    if version >= field.get("null", version + 1) and rng.random() < 0.2:
        return None
    if kind.startswith("[]"):
        element = {**field, "type": kind[2:]}
        element.pop("null", None)
        return [some(element, version, rng) for _ in range(rng.randrange(3))]
    if kind == "struct":
        return {
            inner["name"]: some(inner, version, rng)
            for inner in field["fields"]
            if inner["low"] <= version <= inner["high"]
        }
    if kind == "string":
        return "é" * rng.randrange(5)
    if kind in ("bytes", "records"):
        return rng.randbytes(rng.randrange(5))
    if kind == "uuid":
        return rng.randbytes(16)
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "float64":
        return 0.5
    if field["name"].endswith("error_code"):
        return rng.randrange(20)
    if field["name"].endswith("_ms"):
        return rng.randrange(1, 1000)
    return rng.randrange(100)


def same(value: Any) -> Any:
    """A message with views as bytes."""
    if isinstance(value, dict):
        return {name: same(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [same(inner) for inner in value]
    return bytes(value) if isinstance(value, memoryview) else value


@pytest.mark.parametrize("part", ["request", "response"])
def test_messages_of_every_version_are_kios(part: str) -> None:
    for api in APIS:
        with case(api):
            check_every_version(api, part)


def check_every_version(api: int, part: str) -> None:
    found = definitions()[str(api)]
    write, read = (
        (request_writer, request_reader)
        if part == "request"
        else (response_writer, response_reader)
    )
    load = load_request_schema if part == "request" else load_response_schema
    rng = random.Random(api)
    for version in range(found["low"], found["high"] + 1):
        message = some({"type": "struct", "fields": found[part], "name": ""}, version, rng)
        out = bytearray()
        write(api, version)(out, message)
        reader = Reader(bytes(out))
        assert same(decode(read(api, version), reader)) == message
        assert reader.position == len(out)
        try:
            schema: Any = load(api, version)
        except Exception:
            continue  # kio has no such version
        entity, size = entity_reader(schema)(bytes(out), 0)
        assert size == len(out)
        again = io.BytesIO()
        entity_writer(schema)(again, entity)
        reader = Reader(again.getvalue())
        assert same(decode(read(api, version), reader)) == message


def test_a_missing_field_has_its_default() -> None:
    out = bytearray()
    response_writer(3, 12)(out, {"topics": [{"name": "t", "partitions": []}]})
    found = decode(response_reader(3, 12), Reader(bytes(out)))
    assert found["controller_id"] == -1
    assert found["topics"][0]["topic_authorized_operations"] == -(1 << 31)
    assert default_of({"type": "[]int32"}) == []


@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_are_a_message_or_malformed(seed: int) -> None:
    rng = random.Random(seed)
    for api in APIS:
        found = definitions()[str(api)]
        for version in range(found["low"], found["high"] + 1):
            message = some({"type": "struct", "fields": found["request"], "name": ""}, version, rng)
            out = bytearray()
            request_writer(api, version)(out, message)
            for _ in range(8):
                bent = bytearray(out)
                for _ in range(rng.randrange(1, 4)):
                    if bent:
                        bent[rng.randrange(len(bent))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
                if rng.random() < 0.3:
                    del bent[rng.randrange(len(bent) + 1) :]
                with contextlib.suppress(MalformedError):
                    decode(request_reader(api, version), Reader(bytes(bent)))


@pytest.mark.parametrize("count", [0x7FFFFFFF, 0x0FFFFFFF])
def test_a_claimed_count_takes_no_memory(count: int) -> None:
    body = count.to_bytes(4, "big", signed=True) + b"\0\3abc"
    with pytest.raises(MalformedError):
        decode(request_reader(3, 1), Reader(body))


def test_a_message_has_a_bounded_number_of_values() -> None:
    body = bytearray()
    write_varint(body, ENTRIES_MAX + 2)
    body += bytes(ENTRIES_MAX + 2)
    with pytest.raises(MalformedError, match=f"more than {ENTRIES_MAX}"):
        decode(request_reader(75, 0), Reader(bytes(body)))


@pytest.mark.parametrize("body", [b"\xff" * 11, b"\x80", b"", b"\xff\xff\xff\x7f", b"\x02\xff"])
def test_variable_lengths_without_an_end_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(request_reader(3, 12), Reader(body))
