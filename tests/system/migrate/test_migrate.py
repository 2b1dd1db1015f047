"""`tailrace migrate --from`: what arrives, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import orjson
import pytest

from appliance.cli.commands.records.migrate import SILENT_S, state_of
from appliance.migrate.journal import Journal
from shm.crash_points import CRASH_POINTS
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tests.kit import cli
from tests.kit.processes import HANG_LIMIT_S, wait_until
from tests.system.migrate.houses import Houses, rows

pytestmark = pytest.mark.slow_because(
    "each run connects anew, and waits for the ends of its topics"
)
POINTS = [name for name in CRASH_POINTS if name.startswith("migrate.")]
OFTEN = ("migrate.after_plain", "migrate.before_commit", "migrate.after_open")
"""Points of the plain suite."""


def test_records_arrive_whole_at_the_offsets_that_they_had(houses: Houses, topic: str) -> None:
    houses.create(topic, 3, retention_ms=-1, cleanup_policy="delete", compression_type="lz4")
    houses.produce(topic, range(3_000), 3)
    assert "3,000 records" in houses.migrate("--topics", topic)
    assert houses.same(topic, 3)
    with Admin(houses.target.address) as admin:
        configs = admin.describe_topics(topic)[topic]["configs"]
        assert (configs["retention.ms"], configs["compression.type"]) == (-1, "lz4")
    houses.produce(topic, range(3_000, 3_300), 3)
    assert "300 records" in houses.migrate("--topics", topic)
    assert houses.same(topic, 3)


def test_gaps_are_mapped_and_groups_go_on_at_the_same_record(houses: Houses, topic: str) -> None:
    houses.create(topic)
    houses.transactions(topic, 9)
    source = rows(houses.source.address, topic)[0]
    read = [source[0][0], source[25][0], source[60][0] + 1, source[-1][0] + 1]
    with Admin(houses.source.address) as admin:
        for number, offset in enumerate(read):
            admin.alter_group_offsets(f"{topic}-{number}", {TopicPartition(topic, 0): offset})
    houses.migrate("--topics", topic, "--groups", f"{topic}*")
    assert houses.same_records(topic)
    target = rows(houses.target.address, topic)[0]
    with Admin(houses.target.address) as admin:
        for number, offset in enumerate(read):
            found = admin.list_group_offsets(f"{topic}-{number}")[TopicPartition(topic, 0)]
            assert found is not None
            left = [row[1:] for row in source if row[0] >= offset]
            assert [row[1:] for row in target if row[0] >= int(found)] == left
    houses.transactions(topic, 6, first=9)
    houses.migrate("--topics", topic)
    assert houses.same_records(topic)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point in OFTEN else pytest.mark.long)
        for point in POINTS
        if point != "migrate.before_switch"
    ],
)
def test_a_copy_killed_at_any_point_goes_on_exactly(houses: Houses, topic: str, point: str) -> None:
    plain, transactional = f"{topic}.plain", f"{topic}.tx"
    houses.create(plain, 2)
    houses.create(transactional)
    houses.produce(plain, range(2_000), 2)
    houses.transactions(transactional, 7)
    with Admin(houses.source.address) as admin:
        admin.alter_group_offsets(topic, {TopicPartition(plain, 0): 100})
    arguments = ("--from", houses.address, "--topics", f"{topic}.*")
    visits = (1,) if point in ("migrate.after_create", "migrate.after_begin") else (1, 2)
    if point in ("migrate.after_open", "migrate.after_groups"):
        visits = (1,)
    for visit in visits:
        houses.killed_at(f"{point}:{visit}", *arguments)
    houses.migrate("--topics", f"{topic}.*")
    assert houses.same(plain, 2)
    assert houses.same_records(transactional)
    with Admin(houses.target.address) as admin:
        assert admin.list_group_offsets(topic)[TopicPartition(plain, 0)] == 100


def test_a_compacted_source_keeps_its_records(houses: Houses, topic: str) -> None:
    houses.create(topic, cleanup_policy="compact", min_cleanable_dirty_ratio=0.01)
    with Producer(houses.source.address) as producer:
        for n in range(600):
            value = None if n % 50 == 7 else b"%d" % n
            producer.send(topic, value, key=b"%d" % (n % 70), partition=0)
    with Admin(houses.source.address) as admin:
        admin.compact_topic(topic)
    for n in range(600, 640):
        with Producer(houses.source.address) as producer:
            producer.send(topic, b"%d" % n, key=b"%d" % n, partition=0)
    houses.migrate("--topics", topic)
    assert houses.same_records(topic)
    assert len(rows(houses.target.address, topic)[0]) < 200


def test_follow_until_the_switch(houses: Houses, topic: str) -> None:
    houses.create(topic, message_timestamp_type="LogAppendTime")
    houses.produce(topic, range(500))
    command = [cli.TAILRACE, "migrate", "--from", houses.address, "--topics", topic, "--follow",
               "--name", houses.name, "--json", "--bootstrap", houses.target.address]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        wait_until(lambda: exists(houses, topic) and houses.same(topic), "the copy has caught up")
        houses.produce(topic, range(500, 900))
        wait_until(lambda: houses.same(topic), "the copy follows")
        with Consumer(
            topic,
            bootstrap=houses.source.address,
            group_id=topic,
            auto_offset_reset="earliest",
        ) as consumer:
            wait_until(lambda: consumer.poll(timeout_ms=100) != [], "the group reads")
            consumer.commit()
            sentence = houses.switch(status=1)
            assert "groups have members in the source" in sentence
            wait_until(lambda: consumer.poll(timeout_ms=100) == [], "the group has read all")
            consumer.commit()
        houses.produce(topic, range(900, 1_000))
        assert "switched: the lag is zero" in houses.switch()
        out, err = running.communicate(timeout=HANG_LIMIT_S)
        assert running.returncode == 1, err.decode()
        assert b"another `tailrace migrate`" in err
        assert orjson.loads(out.splitlines()[0])["state"] in ("copying", "caught up")
    assert houses.same(topic)
    with Admin(houses.target.address) as admin:
        assert admin.list_group_offsets(topic)[TopicPartition(topic, 0)] == 900
        settings = admin.describe_topics(topic)[topic]["configs"]
        assert settings["message.timestamp.type"] == "LogAppendTime"
    assert "switched already" in houses.migrate("--topics", topic, status=1)
    assert (
        "switched" in cli.run(houses.target, "migrate", "status", "--name", topic).stderr.decode()
    )


def exists(houses: Houses, topic: str) -> bool:
    with Admin(houses.target.address) as admin:
        return topic in admin.list_topics()


def test_a_topic_with_records_is_refused_and_can_be_appended_to(houses: Houses, topic: str) -> None:
    houses.create(topic)
    houses.produce(topic, range(100))
    with Admin(houses.target.address) as admin, Producer(houses.target.address) as producer:
        admin.create_topics([NewTopic(topic)])
        producer.send(topic, b"older").result(60)
    for arguments in (("--topics", topic, "--plan"), ("--topics", topic)):
        sentences = houses.migrate(*arguments, status=1)
        assert "has records that this migration did not bring. Delete it there" in sentences
    houses.migrate("--topics", topic, "--append")
    target = rows(houses.target.address, topic)[0]
    assert target[0][3] == b"older"
    assert [row[1:] for row in target[1:]] == [
        row[1:] for row in rows(houses.source.address, topic)[0]
    ]


def test_records_of_others_in_the_target_end_the_copy(houses: Houses, topic: str) -> None:
    houses.create(topic)
    houses.produce(topic, range(100))
    houses.migrate("--topics", topic)
    with Producer(houses.target.address) as producer:
        producer.send(topic, b"of another", partition=0).result(60)
    houses.produce(topic, range(100, 200))
    assert "somebody else has written to it" in houses.migrate("--topics", topic, status=1)


def test_a_record_over_the_limit_stops_its_partition_alone(houses: Houses, topic: str) -> None:
    houses.create(topic, 2, max_message_bytes=1_900_000)
    with Producer(houses.source.address, max_request_size=1_900_000) as producer:
        producer.send(topic, b"small", partition=0)
        producer.send(topic, bytes(1_500_000), partition=0)
        producer.send(topic, b"behind", partition=0)
        producer.send(topic, b"other", partition=1)
    with Admin(houses.target.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    sentence = houses.migrate("--topics", topic, status=1)
    assert f"the record at offset 1 of {topic}-0 has 1500000 bytes" in sentence
    assert [len(part) for part in rows(houses.target.address, topic, 2)] == [1, 1]
    with Admin(houses.target.address) as admin:
        admin.alter_topics({topic: {"max.message.bytes": 1_900_000}})
    houses.migrate("--topics", topic)
    assert houses.same(topic, 2)


def test_records_that_the_source_deletes_leave_a_gap(houses: Houses, topic: str) -> None:
    houses.create(topic)
    houses.produce(topic, range(100))
    houses.migrate("--topics", topic)
    houses.produce(topic, range(100, 300))
    with Admin(houses.source.address) as admin:
        admin.delete_records({TopicPartition(topic, 0): 150})
    houses.migrate("--topics", topic)
    target = [row[1:] for row in rows(houses.target.address, topic)[0]]
    assert target[100:] == [row[1:] for row in rows(houses.source.address, topic)[0]]
    houses.produce(topic, range(300, 350))
    with Admin(houses.source.address) as admin:
        admin.alter_group_offsets(topic, {TopicPartition(topic, 0): 330})
    houses.migrate("--topics", topic, "--groups", topic)
    there = rows(houses.target.address, topic)[0]
    assert [row[1:] for row in there[100:]] == [
        row[1:] for row in rows(houses.source.address, topic)[0]
    ]
    with Admin(houses.target.address) as admin:
        offset = admin.list_group_offsets(topic)[TopicPartition(topic, 0)]
    assert offset is not None
    assert int(offset) == there[100 + 330 - 150][0]


def test_an_open_transaction_of_the_source_refuses_the_switch(houses: Houses, topic: str) -> None:
    houses.create(topic)
    houses.produce(topic, range(30))
    with Producer(houses.source.address, transactional_id=topic) as producer:
        producer.begin_transaction()
        producer.send(topic, b"of a transaction", partition=0).result(HANG_LIMIT_S)
        houses.produce(topic, range(30, 50))
        houses.migrate("--topics", topic)
        assert f"{topic}-0 (offsets 30 to 50)" in houses.switch(status=1)
        producer.commit_transaction()
    wait_until(lambda: len(rows(houses.source.address, topic)[0]) == 51, "the commit is readable")
    assert "switched: the lag is zero" in houses.switch()
    assert houses.same_records(topic)


def test_a_source_that_is_created_again_is_refused(houses: Houses, topic: str) -> None:
    houses.create(topic)
    houses.produce(topic, range(10))
    houses.migrate("--topics", topic)
    with Admin(houses.source.address) as admin:
        admin.delete_topics(topic)
    houses.create(topic)
    houses.produce(topic, range(50))
    assert "created again in the source" in houses.migrate("--topics", topic, status=1)


def test_the_plan_names_what_is_not_carried_and_changes_nothing(houses: Houses, topic: str) -> None:
    houses.create(topic, 2, durability="memory", segment_ms=3_600_000)
    plan = json.loads(
        cli.run(
            houses.target, "migrate", "--from", houses.address, "--topics", topic, "--plan",
            "--json", "--name", topic,
        ).stdout
    )  # fmt: skip
    assert plan[0]["settings"] == {"segment.ms": "3600000"}
    assert plan[0]["notes"] == ["durability=memory is not moved"]
    assert not exists(houses, topic)


def test_no_records_and_no_such_topic(houses: Houses, topic: str) -> None:
    houses.create(topic, 2)
    assert "0 records" in houses.migrate("--topics", topic)
    assert exists(houses, topic)
    assert "has no topic" in houses.migrate("--topics", f"{topic}x*", status=1)


def test_a_group_with_members_in_the_target_is_named(houses: Houses, topic: str) -> None:
    houses.create(topic)
    houses.produce(topic, range(20))
    houses.migrate("--topics", topic)
    with Admin(houses.source.address) as admin:
        admin.alter_group_offsets(topic, {TopicPartition(topic, 0): 7})
    with Consumer(topic, bootstrap=houses.target.address, group_id=topic) as consumer:
        wait_until(
            lambda: bool(consumer.poll(timeout_ms=100) or consumer.assignment()), "it has joined"
        )
        sentence = houses.migrate("--topics", topic)
        assert f"the offsets of group {topic} were not set" in sentence


def test_the_state_tells_an_ended_run_and_a_dead_one_from_one_that_copies() -> None:
    begun, ended = (orjson.dumps({"kind": kind, "at_ms": 1}) for kind in ("session", "ended"))
    now_ms = int(time.time() * 1_000)
    assert state_of(Journal([begun]), now_ms) == "copying"
    assert state_of(Journal([begun]), now_ms - int(2_000 * SILENT_S)) == "silent"
    assert state_of(Journal([begun, ended]), now_ms) == "stopped"
    assert state_of(Journal([begun, ended, begun]), now_ms) == "copying"
    switched = orjson.dumps({"kind": "switched", "at_ms": 2})
    assert state_of(Journal([begun, switched]), 0) == "switched"


def test_no_appliance_is_a_sentence_and_status_3() -> None:
    for command in (("switch",), ("status",)):
        done = cli.run(None, "migrate", *command, status=3)
        assert b"no appliance answers" in done.stderr


def test_without_the_library_a_sentence_names_it(houses: Houses) -> None:
    code = (
        "import sys; sys.modules['confluent_kafka'] = None\n"
        "from appliance.cli.main import run\n"
        "sys.exit(run(['migrate', '--from', 'kafka:127.0.0.1:9', '--topics', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, check=False, timeout=HANG_LIMIT_S
    )
    assert done.returncode == 1
    assert b"pip install 'tailrace[kafka]'" in done.stderr
