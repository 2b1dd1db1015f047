"""Settings of compacted topics, and records without a key: what is refused, by whom, with which
sentence.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, NewTopic, Producer, Table
from tailrace.core.errors import InvalidRecordError, InvalidSettingError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.topics import create, read_all

FRAME = pa.table({"id": pa.array([1, 2], pa.int64()), "name": ["a", "b"], "price": [1.5, 2.5]})
COMPACT: dict[str, Any] = {"cleanup.policy": "compact"}


def test_every_setting_of_compaction_is_taken_shown_and_changed(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    given = {
        "cleanup.policy": "delete, compact", "min.cleanable.dirty.ratio": "0.25",
        "min.compaction.lag.ms": "1m", "max.compaction.lag.ms": 3_600_000,
        "delete.retention.ms": "1h",
    }  # fmt: skip
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 1, given)])
        shown = admin.describe_configs([topic])[topic]
        assert {name: shown[name] for name in given} == {
            "cleanup.policy": "compact,delete", "min.cleanable.dirty.ratio": 0.25,
            "min.compaction.lag.ms": 60_000, "max.compaction.lag.ms": 3_600_000,
            "delete.retention.ms": 3_600_000,
        }  # fmt: skip
        admin.alter_topics({topic: {"cleanup.policy": "compact", "min.compaction.lag.ms": 0}})
        shown = admin.describe_configs([topic])[topic]
        assert (shown["cleanup.policy"], shown["min.compaction.lag.ms"]) == ("compact", 0)
        with pytest.raises(InvalidSettingError, match="lower the first, or raise the second"):
            admin.alter_topics({topic: {"min.compaction.lag.ms": 3_600_001}})
        admin.alter_topics({topic: {"cleanup.policy": "delete"}})
        assert admin.describe_configs([topic])[topic]["cleanup.policy"] == "delete"


@pytest.mark.parametrize(
    ("given", "schema", "sentence"),
    [
        ({**COMPACT, "delay.enabled": True}, None, "cleanup.policy=compact or delay.enabled"),
        (COMPACT, FRAME, "of a typed topic needs key.column"),
        ({**COMPACT, "key.column": "nosuch"}, FRAME, "the topic has the columns id, name, price"),
        ({**COMPACT, "key.column": "price"}, FRAME, "a key is text, bytes, an integer"),
        ({"key.column": "key"}, None, "have keys of their own: leave it out"),
        (
            {"min.compaction.lag.ms": "1h", "max.compaction.lag.ms": "1m"},
            None,
            "min.compaction.lag.ms is 3600000 and max.compaction.lag.ms is 60000: records would",
        ),
    ],
)
def test_what_cannot_be_compacted_is_refused_with_a_sentence(
    appliance: EmbeddedAppliance, topic: str, given: dict[str, Any], schema: Any, sentence: str
) -> None:
    with Admin(appliance.address) as admin:
        with pytest.raises(InvalidSettingError, match=sentence):
            admin.create_topics([NewTopic(topic, 1, given, schema)])
        assert topic not in admin.list_topics()


def test_a_topic_that_has_had_delays_and_a_second_key_column_are_refused(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic, delay_enabled=True)
    create(appliance, f"{topic}-typed", schema=FRAME, key_column="id")
    with Admin(appliance.address) as admin:
        with pytest.raises(InvalidSettingError, match="has had delayed records"):
            admin.alter_topics({topic: {**COMPACT, "delay.enabled": False}})
        with pytest.raises(InvalidSettingError, match="can be set once"):
            admin.alter_topics({f"{topic}-typed": {"key.column": "name"}})
        admin.alter_topics({f"{topic}-typed": COMPACT})


def test_a_record_without_a_key_is_refused_alone_and_the_rest_is_stored(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic, cleanup_policy="compact")
    with Producer(appliance.address, linger_ms=50) as producer:
        stored = [producer.send(topic, b"1", b"a"), producer.send(topic, b"2", b"")]
        with pytest.raises(InvalidRecordError, match=f"{topic}' is compacted and a record has no"):
            producer.send(topic, b"3")
        with pytest.raises(InvalidRecordError, match="compacted and 2 rows have no key"):
            producer.send_arrow(topic, pa.table({"key": [b"x", None, None], "value": [b"1"] * 3}))
        with pytest.raises(InvalidRecordError, match="compacted and 3 rows have no key"):
            producer.send_arrow(topic, pa.table({"value": [b"1"] * 3}))
        assert [each.result(60).offset for each in stored] == [0, 1]
    assert [record.key for record in read_all(appliance, topic, 2)] == [b"a", b""]


def test_a_row_without_its_key_column_is_refused(appliance: EmbeddedAppliance, topic: str) -> None:
    create(appliance, topic, schema=FRAME, cleanup_policy="compact", key_column="id")
    with Producer(appliance.address) as producer:
        with pytest.raises(InvalidRecordError, match="has no key: give each one a value in col"):
            producer.send(topic, {"name": "x"})
        producer.send(topic, {"id": 7, "name": None}).result(60)
        producer.send_arrow(topic, FRAME).result(60)
    latest = tailrace.scan(topic, appliance.address, latest=True).read_all()
    assert latest.column("id").to_pylist() == [7, 1, 2], "its key column is the topic's"
    with Table(topic, appliance.address) as table:
        assert table[1]["name"] == "a"


def test_a_producer_that_knew_the_topic_before_learns_of_its_policy(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """The worker refuses what the producer has sent in good faith; then the producer does."""
    create(appliance, topic)
    with Producer(appliance.address, linger_ms=0) as producer, Admin(appliance.address) as admin:
        producer.send(topic, b"1").result(60)
        admin.alter_topics({topic: COMPACT})
        with pytest.raises(InvalidRecordError, match="each record of a compacted topic needs"):
            producer.send(topic, b"2").result(60)
        producer.send(topic, b"3", b"k").result(60)
        admin.alter_topics({topic: {"cleanup.policy": "delete"}})
        producer.send(topic, b"4").result(60)
    assert [record.value for record in read_all(appliance, topic, 3)] == [b"1", b"3", b"4"]


def test_a_dead_letter_topic_is_not_compacted_as_its_origin_is(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    create(appliance, topic, cleanup_policy="compact", group_share_delivery_count_limit=1)
    with Producer(appliance.address) as producer:
        producer.send(topic, b"1", b"k").result(60)
    with tailrace.ShareConsumer(
        topic, bootstrap=appliance.address, group_id=topic, auto_offset_reset="earliest"
    ) as consumer:
        (record,) = consumer.poll(60_000)
        consumer.acknowledge(record, "reject")
        consumer.commit()
    with Admin(appliance.address) as admin:
        shown = admin.describe_configs([f"{topic}.dlq"])[f"{topic}.dlq"]
    assert shown["cleanup.policy"] == "delete"
    assert [record.key for record in read_all(appliance, f"{topic}.dlq", 1)] == [b"k"]
