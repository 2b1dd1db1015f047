"""`tailrace migrate --to`: from the appliance into a Kafka cluster, here another appliance."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pyarrow as pa
import pytest

from shm.crash_points import CRASH_POINTS
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tests.kit import cli
from tests.kit.processes import HANG_LIMIT_S, wait_until
from tests.system.migrate.houses import Houses, rows

pytestmark = pytest.mark.slow_because(
    "each run connects anew, and waits for the ends of its topics"
)
POINTS = [
    name
    for name in CRASH_POINTS
    if name.startswith("migrate.")
    and name not in ("migrate.after_plain", "migrate.after_open", "migrate.before_switch")
]
OFTEN = ("migrate.before_commit",)


@pytest.fixture
def back(houses: Houses) -> Houses:
    """The appliance that Kafka's clients can read is the target."""
    return Houses(houses.target, houses.source, houses.name)


def migrate(back: Houses, *arguments: str, status: int = 0) -> str:
    to = f"kafka:{back.target.kafka_addresses[0]}"
    done = cli.run(
        back.source, "migrate", *arguments[:1], "--to", to, "--name", back.name, *arguments[1:],
        status=status,
    )  # fmt: skip
    return done.stderr.decode()


def test_records_and_groups_go_back(back: Houses, topic: str) -> None:
    plain, transactional = f"{topic}.plain", f"{topic}.tx"
    back.create(plain, 3, retention_ms=-1, delay_enabled="true")
    back.create(transactional)
    back.produce(plain, range(900), 3)
    back.transactions(transactional, 7)
    source = rows(back.source.address, transactional)[0]
    with Admin(back.source.address) as admin:
        admin.alter_group_offsets(
            topic,
            {TopicPartition(plain, 1): 60, TopicPartition(transactional, 0): source[30][0]},
        )
    sentences = migrate(back, "run", "--topics", f"{topic}.*", "--groups", topic)
    assert "delay.enabled=true is not moved; Kafka does not have it" in sentences
    assert back.same_records(plain, 3)
    assert back.same_records(transactional)
    back.produce(plain, range(900, 1_200), 3)
    switched = migrate(back, "switch")
    assert "switched: the lag is zero, 1 group has its offsets" in switched
    assert "caught up" not in switched
    assert back.same_records(plain, 3)
    with Admin(back.target.address) as admin:
        assert admin.describe_topics(plain)[plain]["configs"]["retention.ms"] == -1
        found = admin.list_group_offsets(topic)
    for name, number, offset in ((plain, 1, 60), (transactional, 0, source[30][0])):
        there = found[TopicPartition(name, number)]
        assert there is not None
        left, right = (
            [row[1:] for row in rows(address, name, number + 1)[number] if row[0] >= at]
            for address, at in ((back.source.address, offset), (back.target.address, int(there)))
        )
        assert left == right
    assert "switched" in migrate(back, "status")


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=() if point in OFTEN else pytest.mark.long) for point in POINTS],
)
def test_a_copy_back_killed_at_any_point_goes_on_exactly(
    back: Houses, topic: str, point: str
) -> None:
    back.create(topic, 2)
    back.produce(topic, range(1_000), 2)
    with Admin(back.source.address) as admin:
        admin.alter_group_offsets(topic, {TopicPartition(topic, 0): 100})
    to = f"kafka:{back.target.kafka_addresses[0]}"
    environment = {
        **os.environ,
        "TAILRACE_BOOTSTRAP": back.source.address,
        "TAILRACE_CRASH_POINT": point,
    }
    done = subprocess.run(
        [cli.TAILRACE, "migrate", "--to", to, "--topics", topic, "--name", back.name],
        env=environment, capture_output=True, timeout=HANG_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    migrate(back, "run", "--topics", topic)
    assert back.same_records(topic, 2)


def test_an_open_transaction_refuses_the_switch_back(back: Houses, topic: str) -> None:
    back.create(topic)
    back.produce(topic, range(30))
    with Producer(back.source.address, transactional_id=topic) as producer:
        producer.begin_transaction()
        producer.send(topic, b"of a transaction", partition=0).result(HANG_LIMIT_S)
        back.produce(topic, range(30, 50))
        migrate(back, "run", "--topics", topic)
        refusal = migrate(back, "switch", status=1)
        assert f"{topic}-0 (offsets 30 to 50)" in refusal
        assert "A copy with --follow has ended with this attempt: start it again" in refusal
        status = migrate(back, "status")
        assert ": stopped; 30 records" in status
        assert "lag unknown" in status
        assert "no run copies now" in status
        producer.commit_transaction()
    wait_until(lambda: len(rows(back.source.address, topic)[0]) == 51, "the commit is readable")
    assert "switched: the lag is zero" in migrate(back, "switch")
    assert back.same_records(topic)


def test_the_old_topic_in_kafka_is_refused_by_the_plan(back: Houses, topic: str) -> None:
    back.create(topic)
    back.produce(topic, range(5))
    with Admin(back.target.address) as admin, Producer(back.target.address) as producer:
        admin.create_topics([NewTopic(topic)])
        producer.send(topic, b"older").result(60)
    for arguments in ((), ("--plan",)):
        sentences = migrate(back, "run", "--topics", topic, *arguments, status=1)
        assert "did not bring. Delete it in Kafka first; --append would write" in sentences


def test_the_plan_has_the_settings_as_kafka_takes_them(back: Houses, topic: str) -> None:
    back.create(topic, cleanup_policy="compact")
    done = cli.run(
        back.source, "migrate", "--to", f"kafka:{back.target.kafka_addresses[0]}", "--topics",
        topic, "--name", back.name, "--plan", "--json",
    )  # fmt: skip
    (row,) = json.loads(done.stdout)
    assert row["settings"] == {"cleanup.policy": "compact"}
    assert (row["refused"], row["notes"]) == ([], [])


def test_a_typed_topic_is_refused(back: Houses, topic: str) -> None:
    with Admin(back.source.address) as admin:
        admin.create_topics([NewTopic(topic, schema=pa.schema([("n", pa.int64())]))])
    assert "is typed" in migrate(back, "run", "--topics", topic, status=1)
