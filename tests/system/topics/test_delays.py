"""Delayed delivery through the real processes: when it is due, in due order, exactly once, never
early.
"""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import signal
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from shm.crash_points import CRASH_POINT_VARIABLE
from tailrace import Admin, Consumer, NewTopic, Producer, Record, Recurrence
from tailrace.core.errors import (
    DelayNotEnabledError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidSettingError,
    StorageError,
    UnknownDelayError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import HANG_LIMIT_S, children, wait_until


def in_ms(milliseconds: float) -> dt.datetime:
    return dt.datetime.now(dt.UTC) + dt.timedelta(milliseconds=milliseconds)


def create(
    appliance: EmbeddedAppliance,
    name: str,
    partitions: int = 1,
    schema: object = None,
    **configs: object,
) -> None:
    settings = {"delay.enabled": "true", **{k.replace("_", "."): v for k, v in configs.items()}}
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name, partitions, settings, schema)])


def take(consumer: Consumer, count: int) -> list[tuple[Record, float]]:
    """Records, each with when it was seen, seconds since 1970."""
    found: list[tuple[Record, float]] = []
    while len(found) < count:
        some = consumer.poll(timeout_ms=60_000)
        assert some, f"only {len(found)} of {count} came"
        found += [(record, time.time()) for record in some]
    assert len(found) == count
    return found


def test_records_come_when_they_are_due_in_due_order_and_never_early(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic)
    dues = {}
    with (
        Producer(appliance.address, acks="all") as producer,
        Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
    ):
        producer.send(topic, b"earlier", deliver_after=dt.timedelta(0)).result(
            60
        )  # everything is loaded
        take(consumer, 1)
        begin = in_ms(1000)
        # sent together: on a busy machine the first is due before the last of five would be sent
        # one after the other
        handles = []
        for number, delay_ms in enumerate((900, 300, 600, 0, 450)):
            dues[b"%d" % number] = due = begin + dt.timedelta(milliseconds=delay_ms)
            handles.append(
                producer.send(
                    topic, b"%d" % number, b"k", [("h", b"1")], timestamp=1234, deliver_at=due
                )
            )
        for metadata in [handle.result(60) for handle in handles]:
            assert metadata.offset is None
            assert metadata.delay_id
        undelayed = producer.send(topic, b"now").result(60)
        assert undelayed.offset is not None
        found = take(consumer, 6)
        assert consumer.poll(timeout_ms=300) == []
    delayed = [(record, seen) for record, seen in found if record.value != b"now"]
    assert [record.value for record, _ in delayed] == [b"3", b"1", b"4", b"2", b"0"]
    for record, seen in delayed:
        assert seen >= dues[record.value].timestamp()
        assert (record.key, record.headers, record.timestamp) == (b"k", [("h", b"1")], 1234)


def test_keys_keep_their_partition_and_typed_rows_their_columns(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic, 3, pa.schema([("n", pa.int64()), ("words", pa.list_(pa.utf8()))]))
    with (
        Producer(appliance.address) as producer,
        Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
    ):
        expected = {}
        for number in range(30):
            row = {"n": number, "words": ["a"] * (number % 3)}
            later = producer.send(
                topic, row, b"k%d" % (number % 5), deliver_after=dt.timedelta(milliseconds=100)
            ).result(60)
            expected[number] = later.partition
            assert (
                producer.send(topic, row, b"k%d" % (number % 5)).result(60).partition
                == later.partition
            )
        found = take(consumer, 60)
    assert all(expected[record.value["n"]] == record.partition for record, _ in found)
    assert sorted(record.value["n"] for record, _ in found) == sorted([*range(30), *range(30)])
    assert all(record.value["words"] == ["a"] * (record.value["n"] % 3) for record, _ in found)


def test_a_frame_with_a_delay_column_comes_row_by_row(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic)
    count = 3000
    with (
        Producer(appliance.address) as producer,
        Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
    ):
        after = pa.array([(number * 7919) % 500 for number in range(count)], pa.duration("ms"))
        begun = time.time()
        frame = pa.table({"value": pa.array([b"%d" % n for n in range(count)]), "after": after})
        (metadata,) = producer.send_arrow(topic, frame, delay_column="after").result(60)
        assert metadata.base_offset is None
        assert len(metadata.delay_ids) == count
        assert len(set(metadata.delay_ids)) == count
        found = take(consumer, count)
    numbers = [int(record.value) for record, _ in found]
    assert sorted(numbers) == list(range(count))
    ticks = [(number * 7919) % 500 for number in numbers]
    assert all(later >= earlier - 9 for earlier, later in pairwise(ticks)), (
        "in due order, to a tick"
    )
    assert all(seen >= begun + tick / 1000 for (_, seen), tick in zip(found, ticks, strict=True))


def test_cancel_reschedule_and_list_from_another_client(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic, 2)
    with Producer(appliance.address) as producer, Admin(appliance.address) as admin:
        ids: list[str] = []
        for number in range(10):
            metadata = producer.send(
                topic, b"%d" % number, b"k%d" % number, deliver_after=dt.timedelta(hours=1 + number)
            ).result(60)
            assert metadata.delay_id is not None
            ids.append(metadata.delay_id)
        listed = list(admin.list_delays(topic))
        assert {delay.delay_id for delay in listed} == set(ids)
        assert [d.due for d in listed if d.partition == 0] == sorted(
            d.due for d in listed if d.partition == 0
        )
        assert [d.delay_id for d in admin.list_delays(topic, key=b"k3")] == [ids[3]]
        soon = dt.datetime.now(dt.UTC) + dt.timedelta(hours=3.5)
        assert {d.delay_id for d in admin.list_delays(topic, due_to=soon)} == set(ids[:3])
        assert {d.delay_id for d in admin.list_delays(topic, due_from=soon)} == set(ids[3:])
        assert admin.cancel_delays(ids[:4], topic=topic) == dict.fromkeys(ids[:4])
        assert all(
            isinstance(error, UnknownDelayError) for error in admin.cancel_delays(ids[:4]).values()
        )
        moved = admin.reschedule_delays({ids[4]: in_ms(50), ids[5]: in_ms(2 * 3_600_000)})
        assert isinstance(moved[ids[4]], str)
        assert isinstance(moved[ids[5]], str)
        with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
            ((record, _),) = take(consumer, 1)
            assert (record.value, record.key) == (b"4", b"k4")
            assert consumer.poll(timeout_ms=200) == []
        late = admin.cancel_delays([str(moved[ids[4]])])
        assert isinstance(next(iter(late.values())), UnknownDelayError)
        assert {d.delay_id for d in admin.list_delays(topic)} == {moved[ids[5]], *ids[6:]}
        state = [d for d in admin.describe_delays() if d["topic"] == topic]
        assert sum(d["pending"] for d in state) == 5
        assert sum(d["due_within"]["1d"] for d in state) == 5


def test_recurring_records_come_again_and_again_until_cancelled(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic)
    with Producer(appliance.address) as producer, Admin(appliance.address) as admin:
        every = Recurrence.every(dt.timedelta(milliseconds=120))
        begun_s = time.time()
        metadata = producer.send(
            topic, b"tick", deliver_after=dt.timedelta(0), repeat=every
        ).result(60)
        assert metadata.delay_id is not None
        cron = producer.send(
            topic, b"yearly", repeat=Recurrence.cron("0 9 1 1 *", zone="Europe/Berlin")
        ).result(60)
        with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
            seen_s: list[float] = []
            while len(seen_s) < 7:  # a machine that is busy may deliver several together, and late
                seen_s += [time.time() for _ in consumer.poll(timeout_ms=60_000)]
            assert all(seen >= begun_s + 0.12 * number for number, seen in enumerate(seen_s)), (
                "none comes before its time"
            )
            listed = {delay.repeat: delay for delay in admin.list_delays(topic)}
            assert every in listed
            (yearly,) = [
                delay
                for repeat, delay in listed.items()
                if repeat is not None and repeat.expression
            ]
            assert (yearly.due.month, yearly.due.day, yearly.due.hour, yearly.due.minute) == (
                1,
                1,
                8,
                0,
            )
            assert admin.cancel_delays([listed[every].delay_id, str(cron.delay_id)]) == {
                listed[every].delay_id: None,
                str(cron.delay_id): None,
            }
            consumer.poll(timeout_ms=100)
            assert consumer.poll(timeout_ms=300) == []


def test_what_cannot_be_a_delay_is_refused_with_a_sentence(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic, delay_levels="1s 1m")
    with Producer(appliance.address) as producer, Admin(appliance.address) as admin:
        bad: list[tuple[dict[str, Any], str]] = [
            ({"deliver_at": dt.datetime(2030, 1, 1)}, "no time zone"),
            ({"deliver_at": 12.5}, "must be a datetime"),
            ({"deliver_at": float("nan")}, "must be a datetime"),
            ({"deliver_after": dt.timedelta(seconds=-1)}, "cannot be negative"),
            ({"deliver_after": 5}, "must be a timedelta"),
            ({"deliver_after": dt.timedelta(minutes=2)}, "last level"),
            ({"deliver_at": in_ms(5), "deliver_after": dt.timedelta(1)}, "both given"),
            ({"repeat": "daily"}, "must be a tailrace.Recurrence"),
        ]
        for arguments, words in bad:
            with pytest.raises(InvalidRecordError, match=words):
                producer.send(topic, b"x", **arguments)
        before = dt.datetime.now(dt.UTC)
        metadata = producer.send(topic, b"x", deliver_after=dt.timedelta(seconds=2)).result(60)
        after = dt.datetime.now(dt.UTC)
        (listed,) = admin.list_delays(topic)
        assert listed.delay_id == metadata.delay_id
        level = dt.timedelta(minutes=1)
        assert before + level <= listed.due <= after + level + dt.timedelta(milliseconds=1), (
            "rounded up to the level, and to a tick"
        )
        plain = f"{topic}-plain"
        admin.create_topics([NewTopic(plain)])
        with pytest.raises(DelayNotEnabledError):
            producer.send(plain, b"x", deliver_after=dt.timedelta(seconds=1))
        with pytest.raises(DelayNotEnabledError):
            list(admin.list_delays(plain))
        with pytest.raises(UnknownTopicError):
            list(admin.list_delays(f"{topic}-none"))
        other = admin.cancel_delays([str(metadata.delay_id)], topic=plain)[str(metadata.delay_id)]
        assert "belongs to topic" in str(other)
        wrong = admin.cancel_delays(["nonsense"])["nonsense"]
        assert isinstance(wrong, InvalidRequestError)
        with pytest.raises(InvalidSettingError, match=r"delay\.levels"):
            admin.alter_topics({topic: {"delay.levels": "1m 1s"}})
        admin.alter_topics({plain: {"delay.enabled": "true"}})
        beyond = dt.timedelta(days=21 * 366)
        with pytest.raises(InvalidRecordError, match="longest delay"):
            producer.send(plain, b"x", deliver_after=beyond)
        assert producer.send(plain, b"x", deliver_after=dt.timedelta(days=3650)).result(60).delay_id
        assert (
            producer.send(plain, b"past", deliver_at=dt.datetime(1999, 1, 1, tzinfo=dt.UTC))
            .result(60)
            .delay_id
        )
        with Consumer(plain, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
            assert [record.value for record, _ in take(consumer, 1)] == [b"past"]
        admin.alter_topics({plain: {"delay.enabled": "false"}})
        with Producer(appliance.address) as another, pytest.raises(DelayNotEnabledError):
            another.send(plain, b"x", deliver_after=dt.timedelta(seconds=1))
        with pytest.raises(DelayNotEnabledError):
            producer.send(plain, b"x", deliver_after=dt.timedelta(seconds=1)).result(60)
        assert plain in admin.list_topics()
        assert not [name for name in admin.list_topics() if "@" in name]
        with pytest.raises(UnknownTopicError):
            admin.delete_topics([f"{plain}@delay"])
        admin.delete_topics([plain])
        with pytest.raises(UnknownTopicError):
            list(admin.list_delays(plain))


def test_a_scheduler_killed_behind_its_first_batch_is_followed_by_one_that_repeats_nothing(
    tmp_path: pathlib.Path, topic: str
) -> None:
    address = f"ipc://{tmp_path}/s"
    running = subprocess.Popen(
        [sys.executable, "-P", "-m", "appliance.supervise.supervisor", "--data-dir", str(tmp_path),
        "--listen", address, "--set", "ring_bytes=16777216"],
        env={**os.environ, CRASH_POINT_VARIABLE: "scheduler.after_publish:2"},
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        with Admin(address) as admin:
            admin.create_topics([NewTopic(topic, 1, {"delay.enabled": True})])
        found: list[int] = []
        with (
            Admin(address) as admin,
            Producer(address) as producer,
            Consumer(topic, bootstrap=address, auto_offset_reset="earliest") as consumer,
        ):

            def restarts_after_twenty_more() -> int:
                """On a busy machine all that is due together is delivered in one batch, and the
                kill comes with the second.
                """
                for number in range(len(found), len(found) + 20):
                    producer.send(
                        topic,
                        b"%d" % number,
                        deliver_after=dt.timedelta(milliseconds=5 * (number % 20)),
                    )
                producer.flush()
                found.extend(int(record.value) for record, _ in take(consumer, 20))
                return next(
                    int(p["restarts"])
                    for p in admin.describe_cluster()["processes"]
                    if p["name"] == "scheduler-0"
                )

            wait_until(lambda: restarts_after_twenty_more() > 0, "the scheduler is killed")
            assert restarts_after_twenty_more() == 1
            assert sorted(found) == list(range(len(found)))
            assert consumer.poll(timeout_ms=500) == []
        running.terminate()
        assert running.wait(HANG_LIMIT_S) == 0
    finally:
        running.kill()
        running.wait()


def test_what_fell_due_while_the_appliance_was_down_is_delivered_at_the_next_start(
    tmp_path: pathlib.Path, topic: str
) -> None:
    first = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    create(first, topic)
    wait_until(lambda: "tr-scheduler-0" in children(first), "the scheduler is started")
    os.kill(
        children(first)["tr-scheduler-0"], signal.SIGSTOP
    )  # however long sending takes, nothing is delivered before the kill
    with Producer(first.address, acks="all") as producer:
        due = in_ms(300)
        for number in range(500):
            producer.send(
                topic, b"%d" % number, deliver_at=due - dt.timedelta(milliseconds=number % 100)
            )
        far = producer.send(topic, b"far", deliver_after=dt.timedelta(days=400)).result(60)
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    wait_until(lambda: dt.datetime.now(dt.UTC) > due, "everything is due")
    second = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    with (
        Consumer(topic, bootstrap=second.address, auto_offset_reset="earliest") as consumer,
        Admin(second.address) as admin,
    ):
        found = [int(record.value) for record, _ in take(consumer, 500)]
        assert sorted(found) == list(range(500))
        assert all((later % 100) <= (earlier % 100) + 10 for earlier, later in pairwise(found)), (
            "in due order"
        )
        assert [delay.delay_id for delay in admin.list_delays(topic)] == [far.delay_id]
        assert admin.cancel_delays([str(far.delay_id)]) == {far.delay_id: None}
    assert second.stop() == 0


@pytest.mark.slow_because(
    "a partition that could not be opened is tried again at growing intervals"
)
def test_a_damaged_manifest_is_said_to_whoever_asks_and_mended_while_the_appliance_runs(
    tmp_path: pathlib.Path,
) -> None:
    running = start_embedded(data_dir=str(tmp_path))
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("later", 1, {"delay.enabled": True})])
    with Producer(running.address) as producer:
        waiting = producer.send("later", b"x", deliver_after=dt.timedelta(hours=1)).result(60)
    assert waiting.delay_id is not None
    running.stop()
    manifest = tmp_path / "later@delay-0" / "pending.json"
    manifest.write_bytes(b"{}")
    running = start_embedded(data_dir=str(tmp_path))
    try:
        with Admin(running.address) as admin:
            with pytest.raises(
                StorageError, match="cannot be opened; the appliance's log says why"
            ):
                list(admin.list_delays("later"))
            refused = admin.cancel_delays([waiting.delay_id])[waiting.delay_id]
            assert isinstance(refused, StorageError), "nobody knows whether it waits"
            manifest.unlink()
            assert [delay.delay_id for delay in admin.list_delays("later")] == [waiting.delay_id]
    finally:
        assert running.stop() == 0


def test_each_occurrence_has_its_own_time_also_when_it_was_missed(tmp_path: pathlib.Path) -> None:
    """Occurrences of a default topic and a typed one; others delivered between them keep their
    timestamps.
    """
    first = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    create(first, "plain")
    create(
        first,
        "typed",
        schema=pa.schema([("n", pa.int64()), ("timestamp", pa.timestamp("us", "UTC"))]),
    )
    created = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    every, long = (
        Recurrence.every(dt.timedelta(milliseconds=50)),
        Recurrence.every(dt.timedelta(hours=1)),
    )
    asked_ms = int((in_ms(0) - dt.timedelta(hours=5)).timestamp() * 1000)
    with Producer(first.address, acks="all") as producer:
        past = dt.datetime.fromtimestamp(asked_ms / 1000, dt.UTC)
        producer.send("plain", b"long", timestamp=1234, deliver_at=past, repeat=long).result(
            HANG_LIMIT_S
        )
        producer.send(
            "plain", b"often", timestamp=1234, deliver_after=dt.timedelta(0), repeat=every
        ).result(HANG_LIMIT_S)
        producer.send(
            "plain", b"once", timestamp=1234, deliver_after=dt.timedelta(milliseconds=200)
        ).result(HANG_LIMIT_S)
        producer.send(
            "typed", {"n": 7, "timestamp": created}, deliver_after=dt.timedelta(0), repeat=every
        ).result(HANG_LIMIT_S)
    stamps: dict[str, list[int]] = {"long": [], "often": [], "once": [], "typed": []}

    def read(address: str, requested: int) -> None:
        for name in stamps:
            stamps[name].clear()
        with Consumer(
            "plain", "typed", bootstrap=address, auto_offset_reset="earliest"
        ) as consumer:
            while min(len(stamps["often"]), len(stamps["typed"])) < requested:
                for record in consumer.poll(timeout_ms=20_000):
                    if record.topic == "typed":
                        assert record.value == {"n": 7, "timestamp": created}, (
                            "columns of a typed topic are the producer's"
                        )
                    stamps[
                        "typed" if record.topic == "typed" else (record.value or b"").decode()
                    ].append(record.timestamp)

    read(first.address, 5)
    taken = {name: list(found) for name, found in stamps.items()}
    assert first.stop() == 0
    second = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        read(second.address, 5 + max(len(taken["often"]), len(taken["typed"])))
        for name in ("often", "typed"):
            assert {later - earlier for earlier, later in pairwise(stamps[name])} == {50}, (
                f"{name}: none is missing, each has its own time"
            )
            assert stamps[name][: len(taken[name])] == taken[name]
        assert stamps["long"] == [asked_ms + 3_600_000 * number for number in range(6)]
        assert stamps["once"] in ([], [1234])
        with Consumer("typed", bootstrap=second.address) as consumer:
            key = consumer.assignment()[0]
            for offset, stamp in enumerate(stamps["typed"]):
                assert consumer.offsets_for_times({key: stamp})[key] == (offset, stamp), (
                    "found by the time that the record shows"
                )
    finally:
        assert second.stop() == 0
