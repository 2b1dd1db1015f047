"""Hash slots: keys keep their order while partitions are added under load, whoever is killed, and
whoever has slept through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from appliance.cli.main import tailrace
from shm.crash_points import CRASH_POINT_VARIABLE
from tailrace import Admin, Consumer, NewTopic, Producer, embedded
from tailrace.aio import AsyncAdmin, AsyncProducer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRecordError,
    InvalidSettingError,
    PartitionOutOfRangeError,
    TailraceError,
)
from tailrace.core.hash_slots import births, owners_after, slot_of
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.directory.data_dir import CATALOG_FILE
from tailrace.protocol.frame import Api
from tailrace.protocol.produce_messages import ProduceRequest, encode_produce
from tests.kit.batches import make_batch
from tests.kit.matrices import short
from tests.kit.members.slot_load import KEYS, Load, add_partitions, create
from tests.kit.members.slots import check_order, described, logs_of
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import HANG_LIMIT_S, kill_and_wait_for_successor, wait_until


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    """An appliance of this test's own."""
    running = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    yield running
    assert running.stop() == 0


def test_adding_partitions_under_load_keeps_the_order_of_every_key(own: EmbeddedAppliance) -> None:
    create(own.address, "orders", 3)
    loads = [Load(own.address, "orders", KEYS[start::3]) for start in range(3)]
    for partitions in (5, 6, 9):
        for load in loads:
            load.wait_for_rounds(5)
        add_partitions(own.address, "orders", partitions)
        if partitions == 6:
            kill_and_wait_for_successor(own, "tr-worker-0")
    for load in loads:
        load.wait_for_rounds(5)
    counts = {key: count for load in loads for key, count in load.end().items()}
    places = check_order(own.address, "orders", counts)
    info = described(own.address, "orders")
    assert info.slot_map_version == 4
    assert info.owners == owners_after((3, 5, 6, 9))
    assert all(info.owners[slot_of(key)] in found for key, found in places.items())
    assert sum(len(found) > 1 for found in places.values()) > 50  # they did move


@pytest.mark.parametrize("point", short(["controller.after_decision", "controller.after_apply"]))
def test_a_controller_killed_in_any_phase_of_the_change_finishes_it(
    tmp_path: pathlib.Path, point: str
) -> None:
    address = f"ipc://{tmp_path}/s"
    running = subprocess.Popen(
        [sys.executable, "-P", "-m", "appliance.supervise.supervisor", "--data-dir",
        str(tmp_path / "data"), "--listen", address, "--set", "ring_bytes=16777216"],
        env={**os.environ, CRASH_POINT_VARIABLE: f"{point}:2"}, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        create(address, "orders", 2)  # the first visit
        load = Load(address, "orders", KEYS)
        try:
            load.wait_for_rounds(3)
            with contextlib.suppress(
                TailraceError
            ):  # killed before it could answer: the decision is carried out all the same
                add_partitions(address, "orders", 5)
            wait_until(
                lambda: len(described(address, "orders").partitions) == 5,
                "the change is carried out",
            )
            load.wait_for_rounds(3)
        finally:
            counts = load.end()
        check_order(address, "orders", counts)
        with Admin(address) as admin:
            assert any(
                p["name"] == "controller" and p["restarts"]
                for p in admin.describe_cluster()["processes"]
            )
        info = described(address, "orders")
        assert (info.slot_map_version, info.owners) == (2, owners_after((2, 5)))
        assert {
            partition: tuple(source for source, _ in found)
            for partition, found in info.hand_overs.items()
        } == {partition: birth.sources for partition, birth in births((2, 5)).items()}
        running.terminate()
        assert running.wait(HANG_LIMIT_S) == 0
    finally:
        running.kill()
        running.wait()


def test_a_producer_that_slept_through_two_changes_routes_anew_by_the_last_map(
    appliance: EmbeddedAppliance,
    topic: str,
) -> None:
    create(appliance.address, topic, 1)
    with Producer(appliance.address) as asleep, Producer(appliance.address) as awake:
        for producer in (asleep, awake):
            producer.send(topic, b"0", key=b"of %d" % id(producer)).result(60)
        for partitions in (2, 4):
            add_partitions(appliance.address, topic, partitions)
        handles = [(key, asleep.send(topic, b"0", key=key)) for key in KEYS]
        owners = owners_after((1, 2, 4))
        assert [handle.result(60).partition for _, handle in handles] == [
            owners[slot_of(key)] for key, _ in handles
        ]
        assert asleep.metrics()["errors"] == 0
        assert (
            awake.send(topic, b"1", key=b"of %d" % id(awake)).result(60).partition
            == owners[slot_of(b"of %d" % id(awake))]
        )
        assert asleep.partitions_for(topic) == [0, 1, 2, 3]
    logs = logs_of(appliance.address, topic)
    assert sum(len(log) for log in logs.values()) == len(KEYS) + 3  # nothing twice


def test_what_a_user_has_placed_and_what_has_no_key_stays_where_it_is(
    appliance: EmbeddedAppliance,
    topic: str,
) -> None:
    create(appliance.address, topic, 2)
    called: list[tuple[int, int | None]] = []
    with Producer(appliance.address) as producer:
        producer.send(topic, b"first").result(60)
        add_partitions(appliance.address, topic, 4)
        moving = next(
            key
            for key in KEYS
            if owners_after((2,))[slot_of(key)] == 1 and owners_after((2, 4))[slot_of(key)] != 1
        )
        placed = producer.send(topic, b"placed", key=moving, partition=1)
        routed = producer.send(topic, b"routed", key=moving, headers=[("h", b"v")], timestamp=77,
        on_delivery=lambda metadata, _: called.append(
            (metadata.partition, metadata.offset) if metadata is not None else (-1,
            -1)))  # fmt: skip
        delivered = routed.result(60)
        assert (placed.result(60).partition, delivered.partition) == (
            1,
            owners_after((2, 4))[slot_of(moving)],
        )
        assert delivered.timestamp == 77
        with pytest.raises(PartitionOutOfRangeError):
            producer.send(topic, b"v", partition=4)
    assert called == [(delivered.partition, delivered.offset)]
    record = logs_of(appliance.address, topic)[delivered.partition][-1]
    assert (record.key, record.value, record.headers, record.timestamp) == (
        moving,
        b"routed",
        [("h", b"v")],
        77,
    )


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_frames_go_where_records_of_the_same_key_go_also_when_they_are_cut_by_an_old_map(
    own: EmbeddedAppliance, compression: str
) -> None:
    create(own.address, "orders", 2, **{"compression.type": compression})
    frame = pa.table(
        {
            "key": pa.array(KEYS, pa.binary()),
            "value": [b"%d" % number for number in range(len(KEYS))],
        }
    )
    with Admin(own.address) as admin:
        admin.create_topics(
            [
                NewTopic(
                    "typed",
                    2,
                    {"partitioner": "hash_slots"},
                    schema=pa.schema([("name", pa.utf8()), ("n", pa.int64())]),
                )
            ]
        )
    typed = pa.table({"name": [key.decode() for key in KEYS], "n": list(range(len(KEYS)))})
    with Producer(own.address) as producer:
        for counts in ((2,), (2, 3)):
            if len(counts) > 1:
                for topic in ("orders", "typed"):
                    add_partitions(own.address, topic, counts[-1])
            owners = owners_after(counts)
            producer.send_arrow("orders", frame, key_column="key").result(60)
            producer.send_arrow("typed", typed, key_column="name").result(60)
            for number, key in enumerate(KEYS[:20]):
                row = {"name": key.decode(), "n": number}
                assert (
                    producer.send("typed", row, key=key).result(60).partition
                    == owners[slot_of(key)]
                )
                assert (
                    producer.send("orders", b"0", key=key).result(60).partition
                    == owners[slot_of(key)]
                )
    places: dict[bytes, list[int]] = {}
    for log in logs_of(own.address, "orders").values():
        for record in log:
            places.setdefault(record.key or b"", []).append(record.partition)
    both = [owners_after((2,)), owners_after((2, 3))]
    assert all(
        set(found) == {owners[slot_of(key)] for owners in both} for key, found in places.items()
    )
    with Consumer("typed", bootstrap=own.address, auto_offset_reset="earliest") as consumer:
        seen: list[tuple[int, str]] = []
        while len(seen) < 2 * (len(KEYS) + 20):
            for batch in consumer.poll_arrow(timeout_ms=60_000):
                seen += [(batch.partition, name) for name in batch.batch.column("name").to_pylist()]
    assert Counter(seen) == Counter(
        (owners[slot_of(key)], key.decode())
        for owners in both
        for keys in (KEYS, KEYS[:20])
        for key in keys
    )


def test_who_does_not_know_slots_is_told_so_and_who_knows_an_old_map_is_told_that(
    appliance: EmbeddedAppliance,
    topic: str,
) -> None:
    create(appliance.address, topic, 2)
    info = described(appliance.address, topic)
    batch = bytes(make_batch(seed=info.seeds[0], schema_id=info.schema_id))
    with RawClient(appliance.address) as client:
        for version, acks in ((0, 1), (0, -1), (1 << 24, 1)):
            request = ProduceRequest(info.topic_id, 0, acks, 5_000, version)
            code, body = client.answer(
                client.send(Api.PRODUCE, encode_produce(request), batch, version=1)
            )
            assert code is ErrorCode.INVALID_REQUEST
            assert b"partitioner=hash_slots" in body[0]
        for version, expected in (
            (2, ErrorCode.STALE_SLOT_MAP),
            (1, ErrorCode.OK),
            (7, ErrorCode.STALE_SLOT_MAP),
        ):
            request = ProduceRequest(info.topic_id, 0, -1, 5_000, version)
            assert (
                client.answer(client.send(Api.PRODUCE, encode_produce(request), batch, version=1))[
                    0
                ]
                is expected
            )
    create(appliance.address, f"plain-{topic}", 2, partitioner="producer")
    plain = described(appliance.address, f"plain-{topic}")
    with RawClient(
        appliance.address
    ) as client:  # what an older client has in the reserved field is nobody's business
        request = ProduceRequest(plain.topic_id, 0, -1, 5_000, 99)
        assert (
            client.answer(
                client.send(
                    Api.PRODUCE,
                    encode_produce(request),
                    bytes(make_batch(seed=plain.seeds[0], schema_id=plain.schema_id)),
                    version=1,
                )
            )[0]
            is ErrorCode.OK
        )


def test_settings_that_would_break_the_order_are_refused_with_what_to_do(
    own: EmbeddedAppliance,
) -> None:
    create(own.address, "orders", 2)
    create(own.address, "plain", 2, partitioner="producer")
    refused: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"partitioner": "murmur2"}, "orders", "leave partitioner out"),
        ({"partitioner": lambda _topic, _key, _count: 0}, "orders", "leave partitioner out"),
        ({"acks": 0}, "orders", "acks"),
        ({"partitioner": "hash_slots"}, "plain", "no hash slots"),
    )
    for settings, topic, sentence in refused:
        with (
            Producer(own.address, **settings) as producer,
            pytest.raises(InvalidSettingError, match=sentence),
        ):
            producer.send(topic, b"v", key=b"k")
    with Producer(own.address, partitioner="hash_slots") as producer:
        assert (
            producer.send("orders", b"v", key=b"k").result(60).partition
            == owners_after((2,))[slot_of(b"k")]
        )
    with Admin(own.address) as admin:
        for topic, value in (("orders", "producer"), ("plain", "hash_slots")):
            with pytest.raises(InvalidSettingError, match="partitioner can be set only when"):
                admin.alter_topics({topic: {"partitioner": value}})
        admin.alter_topics({"orders": {"partitioner": "hash_slots", "segment.ms": 1_000_000}})
        assert admin.describe_topics("orders")["orders"]["slot_map_version"] == 1
        with pytest.raises(InvalidSettingError, match="partitioner"):
            admin.create_topics([NewTopic("other", 1, {"partitioner": "murmur3"})])


def test_named_partitioners_send_where_they_say(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance.address, topic, 3, partitioner="producer")
    with Producer(appliance.address, partitioner="modulo") as producer:
        assert [
            producer.send(topic, b"v", key=key).result(60).partition for key in (7, "8", b"9", -1)
        ] == [1, 2, 0, 2]
        with pytest.raises(InvalidRecordError, match="modulo"):
            producer.send(topic, b"v", key="seven")
        with pytest.raises(InvalidRecordError, match="key"):
            producer.send(topic, b"v", key=True)
        frame = pa.table({"key": [b"7", b"8"], "value": [b"a", b"b"]})
        assert sorted(
            part.partition
            for part in producer.send_arrow(topic, frame, key_column="key").result(60)
        ) == [1, 2]
    with Producer(appliance.address, partitioner="round_robin") as producer:
        assert [producer.send(topic, b"v", key=b"k").result(60).partition for _ in range(6)] == [
            0,
            1,
            2,
            0,
            1,
            2,
        ]
    with Producer(appliance.address, partitioner="sticky") as producer:
        places = [producer.send(topic, b"v", key=b"k").result(60).partition for _ in range(20)]
        assert all(one != other for one, other in pairwise(places))  # each was a batch
        together = [producer.send(topic, b"v", key=b"k") for _ in range(20)]
        producer.flush()
        assert len({handle.result(60).partition for handle in together}) <= 2
    logs = logs_of(appliance.address, topic)
    assert {record.key for log in logs.values() for record in log} >= {b"7", b"8", b"9", b"-1"}


def test_a_catalog_that_is_lost_is_made_again_with_map_and_hand_overs(
    tmp_path: pathlib.Path,
) -> None:
    directory = tmp_path / "data"
    with embedded(data_dir=str(directory)) as running:
        create(running.address, "orders", 2)
        with Producer(running.address) as producer:
            for partitions in (2, 3, 6):
                if partitions > 2:
                    add_partitions(running.address, "orders", partitions)
                for key in KEYS:
                    producer.send("orders", b"%d" % (partitions // 3), key=key)
                producer.flush()
        before = described(running.address, "orders")
        check_order(running.address, "orders", dict.fromkeys(KEYS, 3))
    assert {
        partition: tuple(source for source, _ in found)
        for partition, found in before.hand_overs.items()
    } == {partition: birth.sources for partition, birth in births((2, 3, 6)).items()}
    for path in directory.glob(f"{CATALOG_FILE}*"):
        path.unlink()
    with embedded(data_dir=str(directory)) as running:
        after = described(running.address, "orders")
        assert (after.slot_map_version, after.owners, after.hand_overs) == (
            3,
            before.owners,
            before.hand_overs,
        )
        with Producer(running.address) as producer:
            assert (
                producer.send("orders", b"3", key=KEYS[0]).result(60).partition
                == before.owners[slot_of(KEYS[0])]  # type: ignore[index]
            )
        check_order(running.address, "orders", {**dict.fromkeys(KEYS, 3), KEYS[0]: 4})
        add_partitions(running.address, "orders", 7)
        assert described(running.address, "orders").owners == owners_after((2, 3, 6, 7))


def test_an_async_producer_keeps_the_order_too(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance.address, topic, 2)
    rounds = 30

    async def main() -> None:
        async with (
            AsyncProducer(appliance.address, linger_ms=0) as producer,
            AsyncAdmin(appliance.address) as admin,
        ):
            for number in range(rounds):
                handles = [await producer.send(topic, b"%d" % number, key=key) for key in KEYS[:50]]
                if number in (10, 20):
                    change = asyncio.create_task(admin.create_partitions({topic: 2 + number // 5}))
                if number in (15, 25):
                    await change
                if number % 7 == 0:
                    await handles[0]
            await producer.flush()

    asyncio.run(main())
    check_order(appliance.address, topic, dict.fromkeys(KEYS[:50], rounds))
    assert described(appliance.address, topic).slot_map_version == 3


def test_operators_see_the_map_and_delayed_records_go_where_the_slot_was(
    own: EmbeddedAppliance,
) -> None:
    create(own.address, "orders", 2, **{"delay.enabled": True})
    moving = next(
        key
        for key in KEYS
        if owners_after((2,))[slot_of(key)] == 0 and owners_after((2, 3))[slot_of(key)] == 2
    )
    with Producer(own.address) as producer:
        producer.send("orders", b"before", key=moving).result(60)
        handles = [
            producer.send(
                "orders", b"late", key=moving, deliver_after=dt.timedelta(seconds=seconds)
            )
            for seconds in (0, 4)
        ]
        assert [handle.result(60).partition for handle in handles] == [0, 0]
        add_partitions(own.address, "orders", 3)
        assert producer.send("orders", b"after", key=moving).result(60).partition == 2
        assert (
            producer.send("orders", b"late", key=moving, deliver_after=dt.timedelta(0))
            .result(60)
            .partition
            == 2
        )
        wait_until(
            lambda: (
                sorted(
                    record.partition
                    for log in logs_of(own.address, "orders").values()
                    for record in log
                    if record.value == b"late"
                )
                == [0, 0, 2]
            ),
            "each is delivered where its key was when it was sent",
        )
    with Admin(own.address) as admin:
        topic = admin.describe_topics("orders")["orders"]
    assert topic["slot_map_version"] == 2
    assert topic["partitions"][0]["slots"] == "0-5461"
    (ends,) = [p["hand_over"] for p in topic["partitions"] if p["hand_over"]]
    assert set(ends) == {0, 1}
    shown = CliRunner().invoke(
        tailrace, ["topic", "describe", "orders", "--bootstrap", own.address]
    )
    assert shown.exit_code == 0
    assert "HASH SLOTS" in shown.output
    assert f"0:{ends[0]} 1:{ends[1]}" in shown.output
