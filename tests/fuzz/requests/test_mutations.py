"""The fuzzer's own parts: what it makes is the same for the same seed, comes to every API, and gets
past the first checks.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections import Counter

import pyarrow as pa
import pytest

from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import BatchFormatError, verify_batch
from tailrace.format.schema import DEFAULT_SCHEMA, delay_schema, to_message
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import Api, WireError, check_body, decode_request_header
from tailrace.protocol.json_messages import decode_json
from tests.fuzz.requests.conversations import REQUESTS, SCHEMAS, world_of
from tests.fuzz.requests.mutations import mutate_batch, mutate_body, mutate_json
from tests.fuzz.requests.peer import message
from tests.fuzz.requests.scripts import make_script
from tests.fuzz.requests.world import World

START_US = 1_700_000_000_000_000


def described(
    name: str, schema: pa.Schema | None, partitions: int, *, delayed: bool = False
) -> TopicInfo:
    def id_of(text: str) -> str:
        return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()

    def encoded(one: pa.Schema) -> str:
        return base64.b64encode(to_message(one)).decode()

    own = DEFAULT_SCHEMA if schema is None else schema
    log = (
        {"topic_id": id_of(f"{name}@delay"), "schema_id": 1, "schema": encoded(delay_schema(own))}
        if delayed
        else None
    )
    return TopicInfo(
        {"name": name, "topic_id": id_of(name), "version": 1, "typed": schema is not None,
        "schema_id": 1, "schema": encoded(own), "settings": {},
         "partitions": [{"front": 0}] * partitions, "delay_log": log}
    )  # fmt: skip


@pytest.fixture(scope="module")
def world() -> World:
    topics = [
        described("plain", None, 2), described("nested", SCHEMAS[4], 1),
        described("later", None, 2, delayed=True),
        described("laterTyped", SCHEMAS[0], 1, delayed=True), described("gone", None, 1),
    ]  # fmt: skip
    return world_of({topic.name: topic for topic in topics}, random.Random(1), START_US)


def test_the_same_seed_makes_the_same_messages_and_another_seed_makes_others(world: World) -> None:
    def digest(seed: int) -> str:
        found = hashlib.sha256()
        for number in range(150):
            script = make_script(seed, number, world)
            found.update(script.garbage + b"".join(message(m.frames) for m in script.messages))
        return found.hexdigest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_valid_and_bent_requests_of_every_api_are_made(world: World) -> None:
    assert set(REQUESTS) == set(Api)
    seen: Counter[tuple[int, bool]] = Counter()
    for number in range(1500):
        for made in make_script(3, number, world).messages:
            assert len(str(made)) < 5_000, "a line of a report"
            seen[made.api, bool(made.what)] += 1
    assert all(seen[api, bent] >= 10 for api in Api for bent in (False, True)), seen


def batches_of(version: int, body: list[bytes]) -> list[tuple[bytes, int, Readable]]:
    """(topic id, partition, batch) of a PRODUCE request."""
    if version == 1:
        single = produce_messages.decode_produce(body[0])
        return [(single.topic_id, single.partition, body[1])]
    entries = produce_messages.decode_produce_batches(body[0], version).entries
    return [
        (entry[0], entry[1], batch)
        for entry, batch in zip(
            entries, produce_messages.cut_batches(entries, body[1:]), strict=True
        )
    ]


def test_what_is_said_to_be_valid_is(world: World) -> None:
    versions = set()
    for number in range(400):
        for made in make_script(4, number, world).messages:
            if made.what:
                continue
            header = decode_request_header(made.frames[0])
            check_body(header.body_length, made.frames[1:])
            if header.api == Api.PRODUCE:
                versions.add(header.version)
                for topic_id, partition, batch in batches_of(header.version, made.frames[1:]):
                    target = next(
                        t
                        for t in world.targets + world.delayed
                        if t.info.topic_id == topic_id and t.partition == partition
                    )
                    verify_batch(memoryview(batch), target.seed)
            elif header.api not in (Api.FETCH, Api.CREDIT, Api.PING):
                decode_json(made.frames[1])
    assert versions == {1, 2, 3}


def test_most_bent_requests_of_many_batches_get_past_their_entries(world: World) -> None:
    rng = random.Random(7)
    passed = 0
    for _ in range(300):
        request = REQUESTS[Api.PRODUCE][0](rng, world)
        if request.version > 1:
            mutate_body(rng, request, world)
            try:
                batches_of(request.version, request.body)
                passed += 1
            except WireError:
                passed -= 1
    assert passed > 60


def test_most_bent_batches_have_right_checksums(world: World) -> None:
    rng = random.Random(5)
    passed = 0
    for _ in range(500):
        target = world.any_target(rng)
        bent, _ = mutate_batch(rng, rng.choice(target.batches), target.seed, world)
        try:
            verify_batch(memoryview(bent), target.seed)
            passed += 1
        except BatchFormatError:
            pass
    assert passed > 250, "what fails at its checksum tests the checksum only"


def test_most_bent_documents_are_still_documents(world: World) -> None:
    rng = random.Random(6)
    passed = 0
    for _ in range(500):
        text = REQUESTS[Api.CREATE_TOPICS][0](rng, world).body[0]
        bent, _ = mutate_json(rng, text, world)
        try:
            decode_json(bent)
            passed += 1
        except WireError:
            pass
    assert passed > 300
