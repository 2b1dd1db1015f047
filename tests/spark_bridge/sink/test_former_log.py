"""Queries that the former sink has written: their decision logs, as that sink wrote them
(golden/former_logs.json), and what this sink makes of them.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from spark_bridge.sink.commit import commit_tasks
from spark_bridge.sink.former_log import log_topic, read_mark
from spark_bridge.sink.messages import Mark
from spark_bridge.sink.writer import forget_query
from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_partition import TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.lakes.sink import ROWS, make, options_of, values_in, write
from tests.kit.processes import HANG_LIMIT_S

GOLDEN = Path(__file__).parent / "golden" / "former_logs.json"
CONFIGS = {"retention.ms": -1, "durability": "disk", "segment.bytes": 8 << 20}


def restore(appliance: EmbeddedAppliance, name: str, identity: str) -> None:
    """A former log, with the offsets that it had."""
    topic = log_topic(identity)
    records = json.loads(GOLDEN.read_text())[name]
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 1, CONFIGS))
        with Producer(appliance.address) as producer:
            first = records[0][0]
            for _ in range(first):
                producer.send(topic, b"deleted")
            for offset, value in records:
                sent = producer.send(topic, base64.b64decode(value)).result(HANG_LIMIT_S)
                assert sent.offset == offset
        if first:
            admin.delete_records({TopicPartition(topic, 0): first})


@pytest.mark.parametrize(("name", "published"), [("published", 1), ("trimmed", 39)])
def test_a_batch_that_the_former_sink_published_is_not_written_again(
    appliance: EmbeddedAppliance, topic: str, name: str, published: int
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    restore(appliance, name, sink)
    assert read_mark(sink, options) == Mark(published, ROWS)
    with pytest.raises(InvalidRequestError, match=r"batch 0 .* an older copy"):
        commit_tasks(options, write(options, 0, sink), 0)
    assert not commit_tasks(options, write(options, published, sink), published)
    assert values_in(appliance, topic) == []
    assert commit_tasks(options, write(options, published + 1, sink), published + 1)
    assert not commit_tasks(options, write(options, published + 1, sink), published + 1)
    assert len(values_in(appliance, topic)) == ROWS


def test_a_batch_that_the_former_sink_began_and_did_not_finish_is_refused_with_what_to_do(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    restore(appliance, "open", sink)
    with pytest.raises(InvalidRequestError, match=r"batch 1 of this query .* did not finish"):
        commit_tasks(options, write(options, 1, sink), 1)
    assert values_in(appliance, topic) == []
    forget_query(topic, appliance.address)
    assert commit_tasks(options, write(options, 1, sink, "run-2"), 1)
    assert len(values_in(appliance, topic)) == ROWS


def test_records_of_others_in_a_former_log_are_passed_over(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    restore(appliance, "published", sink)
    with Producer(appliance.address) as producer:
        for value in (b"x", None, b"{}"):
            producer.send(log_topic(sink), value).result(HANG_LIMIT_S)
    assert read_mark(sink, options) == Mark(1, ROWS)


def test_a_query_without_a_former_log_has_no_mark(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic)
    assert read_mark(f"query:{topic}", options_of(appliance, topic)) is None
