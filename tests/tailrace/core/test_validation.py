"""Senseless arguments are refused with a sentence by the call that they are given to, closed
clients say that they are closed, and what other clients call otherwise is named. No appliance is
needed for any of this.
"""

from __future__ import annotations

import copy
import datetime as dt
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.client.config import kafka_names as other_names
from tailrace.client.config.setting_fields import build
from tailrace.client.config.settings import AdminSettings, ConsumerSettings, ProducerSettings
from tailrace.core.errors import (
    ClientClosedError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidSettingError,
    NotSupportedError,
)
from tailrace.core.validation import (
    by_partition,
    optional_text_bytes,
    partition_list,
    partition_number,
    partitions_named,
    timeout_ms_of,
    timeout_s_of,
    whole,
)
from tailrace.producer.record_validation import bytes_of, checked_headers, timestamp_us_of

NOWHERE = "localhost:1"
KEY = TopicPartition("t", 0)
NOW = dt.datetime.now(dt.UTC)

CALLS: dict[type, dict[str, tuple[Any, ...]]] = {
    Producer: {
        "__enter__": (), "flush": (), "partitions_for": ("t",), "send": ("t", b"x"),
        "send_arrow": ("t", pa.table({"value": [b"x"]})),
        "init_transactions": (), "begin_transaction": (), "commit_transaction": (),
        "abort_transaction": (), "send_offsets_to_transaction": ({}, "g"), "transaction": (),
        "send_acknowledgements_to_transaction": (None, []), "create_transaction_branches": (1,),
        "finish_branch": (), "prepare_transaction": (), "complete_transaction": (None,),
        "cancel_delays": ("x",), "reschedule_delays": ({},),
    },
    Consumer: {
        "__enter__": (), "__iter__": (), "assign": ([],), "assignment": (),
        "beginning_offsets": ([],), "consume": (1, 1.0), "end_offsets": ([],),
        "highwater": (KEY,), "lag": (KEY,), "offsets_for_times": ({},), "partitions_for": ("t",),
        "pause": (), "paused": (), "poll": (), "poll_arrow": (),
        "position": (KEY,), "positions": (), "resume": (), "seek": (KEY, 0),
        "seek_to_beginning": (), "seek_to_end": (), "topics": (),
        "commit": (), "commit_async": (), "committed": ([],), "consumer_group_metadata": (),
        "group_metadata": (),
        "memberid": (), "subscribe": (["t"],), "subscription": (),
        "unsubscribe": (), "retry_later": (None, 1),
    },
    Admin: {
        "__enter__": (), "abort_transaction": ("t",), "alter_group_offsets": ("g", {}),
        "commit_transaction": ("t",),
        "alter_topics": ({},), "alter_configs": ({},), "alter_quotas": ({},),
        "describe_quotas": (), "quota_usage": (), "config_state": (), "reload_config": (),
        "bring_online": ("t",), "cancel_delays": ([],),
        "create_partitions": ({},), "move_partition": ("t", 0, "/d"), "create_topics": ([],),
        "delete_groups": ([],), "delete_records": ({},), "delete_topics": ([],),
        "derived_topics": ([],), "describe_cluster": (), "describe_configs": ([],), "describe_delays": (),  # noqa: E501
        "describe_groups": ([],), "describe_topics": (), "describe_transactions": (["t"],),
        "find_hanging_transactions": (), "list_transactions": (), "transaction_totals": (),
        "lease_offsets": ("l", {}, 1),
        "list_delays": ("t",), "list_group_offsets": ("g",),
        "list_groups": (), "list_topics": (), "offsets": ({},), "partition_counts": (),
        "reschedule_delays": ({},),
        "topic_info": ([],),
        "describe_schemas": ("t",),
        "list_users": (), "add_user": ("u",), "alter_user": ("u",), "delete_user": ("u",),
        "disable_user": ("u",), "enable_user": ("u",), "add_user_key": ("u", "k", "x"),
        "remove_user_key": ("u", "k"), "list_acls": (), "add_acls": ([],), "remove_acls": ([],),
        "test_acl": ("User:u", "read", "topic", "t"),
        "list_deleted_topics": (), "undelete_topic": ("t",), "purge_topic": ("t",),
        "compact_topic": ("t",),
    },
}  # fmt: skip
"""Every method of each client that needs it to be open, with arguments that make sense or are
empty.
"""
WHENEVER = {"close", "metrics", "after_fork", "from_context"}
LATER = {
    Producer: {"poll", "produce"},
    Consumer: set(),
    Admin: set(),
}  # fmt: skip
"""Methods that Kafka has and this version has not."""


def share_consumer(bootstrap: str) -> ShareConsumer:
    """One that reads nothing yet."""
    return ShareConsumer(bootstrap=bootstrap, group_id="g")


@pytest.fixture(params=list(CALLS), ids=lambda kind: kind.__name__)
def closed(request: pytest.FixtureRequest) -> Any:
    client = request.param(bootstrap=NOWHERE)
    client.close()
    client.close()
    return client


def test_every_method_of_a_closed_client_says_that_it_is_closed(closed: Any) -> None:
    for name, arguments in CALLS[type(closed)].items():
        with pytest.raises(ClientClosedError, match="is closed"):
            getattr(closed, name)(*arguments)


@pytest.mark.parametrize("kind", list(CALLS), ids=lambda kind: kind.__name__)
def test_no_public_method_is_left_out_of_these_tests_and_each_has_a_docstring(kind: type) -> None:
    public = {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}
    assert (
        public
        == {name for name in CALLS[kind] if not name.startswith("_")}
        | (WHENEVER & public)
        | LATER[kind]
    )
    assert not [name for name in public if not inspect.getdoc(getattr(kind, name))]


@pytest.mark.parametrize("kind", list(LATER), ids=lambda kind: kind.__name__)
def test_what_comes_with_a_later_version_says_so_in_one_sentence(kind: type) -> None:
    client = kind(bootstrap=NOWHERE)
    try:
        for name in LATER[kind]:
            with pytest.raises(NotSupportedError, match=r"not part of this version|has no p"):
                getattr(client, name)("anything", at=all)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [(Consumer, "get_watermark_offsets", r"end_offsets\("),
    (Consumer, "store_offsets", r"commit\("),
     (Admin, "incremental_alter_configs", r"alter_configs\("),
     (Consumer, "member_id", r"memberid\("), (Admin, "list_share_groups", r"list_groups\("),
     (Admin, "delete_consumer_group_offsets", r"0\): None"),
     (Admin, "list_consumer_groups", r"list_groups\("),
     (Admin, "list_consumer_group_offsets", r"list_group_offsets\("),
     (share_consumer, "committed", "tailrace group describe"),
     (share_consumer, "consume", r"poll\(timeout_ms"),
     (share_consumer, "end_offsets", r"Consumer\(.*end_offsets\("),
     (share_consumer, "paused", "delivery.paused=true"),
     (share_consumer, "resume", "delivery.paused=false"),
     (share_consumer, "retry_later", "release"),
     (share_consumer, "seek_to_beginning", "group reset-offsets"),
     (share_consumer, "store_offsets", r"acknowledge\("),
     (share_consumer, "unassign", r"unsubscribe\(")],
)  # fmt: skip
def test_another_clients_method_is_not_there_and_the_error_names_ours(
    kind: Callable[..., Any], name: str, hint: str
) -> None:
    client = kind(bootstrap=NOWHERE)
    try:
        assert not hasattr(client, name)
        with pytest.raises(AttributeError, match=hint):
            getattr(client, name)
        with pytest.raises(AttributeError, match=r"no attribute 'nothing_like_it'$"):
            _ = client.nothing_like_it
    finally:
        client.close()


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[Producer, Consumer, Admin]]:
    """Open, and nothing answers them: what is refused here is refused before anything is asked."""
    with (
        Producer(NOWHERE, max_block_ms=1) as producer,
        Consumer(bootstrap=NOWHERE) as consumer,
        Admin(NOWHERE) as admin,
    ):
        yield producer, consumer, admin


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p, c, a: p.send(None, b"x"), "topic is None"),
        (lambda p, c, a: p.send(["t"], b"x"), r"topic is \['t'\]"),
        (lambda p, c, a: p.send({}, b"x", key=b"k", deliver_after=dt.timedelta(1)), "topic is {}"),
        (lambda p, c, a: p.flush("soon"), "timeout is 'soon'"),
        (lambda p, c, a: p.close("soon"), "timeout is 'soon'"),
        (lambda p, c, a: p.flush(float("nan")), "timeout is nan"),
        (lambda p, c, a: p.partitions_for(["t"]), "give a name"),
        (lambda p, c, a: p.send_arrow(3, pa.table({"value": [b"x"]})), "topic is 3"),
        (lambda p, c, a: c.poll("5"), "timeout_ms is '5'"),
        (lambda p, c, a: c.poll(-1), "timeout_ms is -1"),
        (lambda p, c, a: c.poll(None), "milliseconds"),
        (lambda p, c, a: c.poll(True), "timeout_ms is True"),
        (lambda p, c, a: c.poll(1, "1"), "max_records is '1'"),
        (lambda p, c, a: c.poll(1, 0), "from 1 on"),
        (lambda p, c, a: c.poll_arrow([]), r"timeout_ms is \[\]"),
        (lambda p, c, a: c.consume("3"), "num_messages"),
        (lambda p, c, a: c.consume(1, "x"), "seconds"),
        (lambda p, c, a: c.seek(KEY, "5"), "not assigned"),
        (lambda p, c, a: c.pause("t"), "TopicPartition"),
        (lambda p, c, a: c.pause([3]), "TopicPartition"),
        (lambda p, c, a: c.offsets_for_times([KEY]), "give a dict"),
        (lambda p, c, a: c.offsets_for_times({KEY: "noon"}), "datetime or int milliseconds"),
        (lambda p, c, a: c.partitions_for(3), "give a name"),
        (lambda p, c, a: a.create_topics(None), r"NewTopic\("),
        (lambda p, c, a: a.create_topics(["t"]), r"NewTopic\("),
        (lambda p, c, a: a.create_topics("t"), r"NewTopic\("),
        (lambda p, c, a: a.alter_topics("t"), "give a dict"),
        (lambda p, c, a: a.alter_topics({"t": "x"}), "give a dict"),
        (lambda p, c, a: a.alter_topics({3: {}}), "give a name"),
        (lambda p, c, a: a.create_partitions([("t", 4)]), "give a dict"),
        (lambda p, c, a: a.offsets([KEY]), "give a dict"),
        (lambda p, c, a: a.delete_records({KEY: "1"}), "offset is '1'"),
        (lambda p, c, a: a.delete_records({KEY: 1 << 70}), "to 9223372036854775807"),
        (lambda p, c, a: a.delete_records({"t": 1}), "TopicPartition"),
        (lambda p, c, a: a.lease_offsets("l", {"ab": 3}, 1), "TopicPartition"),
        (lambda p, c, a: a.lease_offsets("l", {KEY: 3}, "1"), "ttl_ms"),
        (lambda p, c, a: a.list_delays("t", key=3), "key is 3"),
        (lambda p, c, a: a.list_delays("t", due_from="noon"), "time zone"),
        (lambda p, c, a: a.list_delays("t", due_to=dt.datetime(2030, 1, 1)), "time zone"),
        (lambda p, c, a: a.list_delays(["t"]), "give a name"),
        (lambda p, c, a: a.cancel_delays([3]), "delay_ids"),
        (lambda p, c, a: a.cancel_delays("x", topic=3), "topic is 3"),
        (lambda p, c, a: a.reschedule_delays("x"), "give a dict"),
        (lambda p, c, a: a.reschedule_delays({"x": 5}), "the time for 'x'"),
        (lambda p, c, a: a.reschedule_delays({3: NOW}), "delay_id"),
        (lambda p, c, a: a.bring_online(3), "give a name"),
    ],
)  # fmt: skip
def test_arguments_of_a_wrong_kind_are_refused_with_a_sentence(
    clients: tuple[Producer, Consumer, Admin], call: Callable[..., object], sentence: str
) -> None:
    with pytest.raises((InvalidRequestError, InvalidRecordError), match=sentence) as caught:
        call(*clients)
    assert "the message names" in str(caught.value), "the advice fits"


@pytest.mark.parametrize(("settings", "given", "sentence"), [
    (ProducerSettings, {"enable_idempotence": "no"}, "True or False"),
    (ConsumerSettings, {"validate_batches": 1}, "True or False"),
    (ProducerSettings, {"client_id": 3}, "give text"),
    (ConsumerSettings, {"client_id": None}, "give text"),
    (AdminSettings, {"client_id": b"x"}, "text"),
    (AdminSettings, {"request_timeout_ms": 0}, "whole number"),
    (AdminSettings, {"connect_timeout_ms": "soon"}, "whole number"),
    (ProducerSettings, {"queue_buffering_max_ms": 5}, "it is linger_ms"),
    (ProducerSettings, {"message_timeout_ms": 5}, "it is delivery_timeout_ms"),
    (ConsumerSettings, {"consumer_timeout_ms": 5}, r"poll\(timeout_ms"),
    (ConsumerSettings, {"group_protocol": "consumer"}, "KIP-848"),
    (ConsumerSettings, {"group_remote_assignor": "uniform"}, "partition_assignment_strategy"),
    (ConsumerSettings, {"default_offset_commit_callback": print}, r"commit_async\(callback"),
    (ConsumerSettings, {"xyzzy": 5}, "known are bootstrap"),
])  # fmt: skip
def test_settings_of_a_wrong_kind_or_another_name_are_refused_with_a_sentence(
    settings: type, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        build(settings, given)


@pytest.mark.parametrize(("settings", "name", "sentence"), [
    (ConsumerSettings, "enable_auto_offset_store", "enable_auto_commit"),
    (ProducerSettings, "sasl_mechanism", "users"), (ConsumerSettings, "ssl_cafile", "encryption"),
])  # fmt: skip
def test_settings_of_a_later_version_say_so(settings: type, name: str, sentence: str) -> None:
    with pytest.raises(NotSupportedError, match=f"{name}: .*{sentence}"):
        build(settings, {name: "x"})


def test_truths_and_numbers_may_be_text_as_files_of_settings_have_them() -> None:
    assert (
        build(ProducerSettings, {"enable_idempotence": "False", "linger_ms": "1s"}).linger_ms
        == 1_000
    )
    assert build(ProducerSettings, {"enable_idempotence": "true"}).enable_idempotence is True
    with Admin(
        {"bootstrap.servers": NOWHERE, "client.id": "me", "request.timeout.ms": "2s"}
    ) as admin:
        assert (
            admin.settings.request_timeout_ms,
            admin.settings.connect_timeout_ms,
            admin.settings.client_id,
        ) == (2_000, None, "me")
    with pytest.raises(InvalidSettingError, match="given twice"):
        Admin(NOWHERE, bootstrap_servers=NOWHERE)


@pytest.mark.parametrize(
    "configs",
    [{3: 4}, {"retention.ms": object()}, {"retention.ms": [1]}, {"retention.ms": 1 << 64}],
)
def test_topic_settings_that_no_request_could_carry_are_refused(configs: Any) -> None:
    with pytest.raises(InvalidSettingError, match=r"topic setting|takes text"):
        NewTopic("t", configs=configs)


def test_numbers_of_numpy_are_numbers() -> None:
    assert whole("n", np.int32(5), 0) == 5
    assert partition_number(np.int64(3)) == 3
    assert (timeout_ms_of(np.float64(1.5)), timeout_s_of(np.int16(2))) == (1.5, 2.0)


def test_timeouts_without_end_and_those_that_have_passed() -> None:
    assert timeout_s_of(None) is None
    assert timeout_s_of(float("inf")) is None
    assert timeout_s_of(-3) == 0.0
    assert timeout_ms_of(float("inf")) < 1e13


@pytest.mark.parametrize("given", [True, 1.5, "1", None, [1], b"1"])
def test_what_is_no_whole_number(given: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"n is .* whole number from 0 on"):
        whole("n", given, 0)
    with pytest.raises(InvalidRecordError, match=r"partition is .* whole number"):
        partition_number(given)


def test_partitions_by_themselves_or_in_one_list() -> None:
    other = TopicPartition("t", 1)
    assert partitions_named((KEY, other)) == partitions_named(([KEY, other],)) == [KEY, other]
    assert partitions_named((("t", 1),)) == [other], "a pair is a partition, not a list of two"
    assert by_partition("offsets", {("t", 0): 1}, "") == {KEY: 1}
    assert (
        partition_list(("t", 1)) == partition_list([("t", 1)]) == partition_list(other) == [other]
    )
    assert partition_list((KEY, other)) == partition_list(iter((KEY, other))) == [KEY, other], (
        "two of them are a list"
    )
    with pytest.raises(InvalidRequestError, match="TopicPartition"):
        partition_list(("t", "u"))


def test_a_poll_that_seems_to_be_given_seconds_says_what_it_waits_for_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_names, "_warned", False)
    with Consumer(bootstrap=NOWHERE) as consumer:
        for timeout in (0, 5, 0.25, 1500.0, 0.0, 1.0, 1.0):
            with pytest.raises(InvalidRequestError, match="nothing is assigned"):
                consumer.poll(timeout)
            assert len(caplog.records) == (timeout == 1.0), timeout
    assert "poll(1.0) waits at most 1.0 ms" in caplog.text


def test_every_method_of_a_consumer_that_a_share_consumer_has_not_is_named_with_what_to_write() -> (
    None
):
    missing = {
        name
        for name, _ in inspect.getmembers(Consumer, callable)
        if not name.startswith("_") and not hasattr(ShareConsumer, name)
    }
    assert missing <= set(other_names.RENAMED_SHARE_CONSUMER_METHODS)
    assert not [
        name for name in other_names.RENAMED_SHARE_CONSUMER_METHODS if hasattr(ShareConsumer, name)
    ]


@pytest.mark.parametrize("kind", [Consumer, share_consumer])
def test_other_clients_arguments_of_poll_are_named(kind: Callable[..., Any]) -> None:
    client = kind(bootstrap=NOWHERE)
    try:
        for name, sentence in (
            ("timeout", r"poll\(timeout_ms=\.\.\.\), in milliseconds"),
            ("update_offsets", "leave it out"),
        ):
            with pytest.raises(InvalidRequestError, match=sentence):
                client.poll(**{name: 1.0})
        with pytest.raises(
            TypeError, match=r"^poll\(\) got an unexpected keyword argument 'tiemout_ms'$"
        ):
            client.poll(tiemout_ms=1)
    finally:
        client.close()


def test_a_partition_with_an_offset_says_where_the_offset_goes() -> None:
    anything: Any = TopicPartition
    named: dict[str, Any] = {"offset": 42}
    for more, keywords in (((42,), {}), ((42, "metadata"), {}), ((), named)):
        with pytest.raises(TypeError) as caught:
            anything("t", 0, *more, **keywords)
        assert "seek(TopicPartition('t', 0), 42)" in str(caught.value)
        assert "commit({TopicPartition('t', 0): 42})" in str(caught.value)
    with pytest.raises(
        TypeError, match=r"^TopicPartition\(\) missing 1 required positional argument: 'partition'"
    ):
        anything("t")
    assert (
        TopicPartition(topic="t", partition=0)
        == KEY
        == pickle.loads(pickle.dumps(KEY))
        == copy.copy(KEY)
        == KEY._replace(topic="t")
    )


def test_text_that_is_no_utf8_costs_no_other_record() -> None:
    for call in (
        lambda: bytes_of("key", "\ud800"),
        lambda: checked_headers([("\ud800", b"x")]),
        lambda: bytes_of("value", 5),
    ):
        with pytest.raises(InvalidRecordError):
            call()
    with pytest.raises(InvalidRequestError, match="key"):
        optional_text_bytes("key", "\ud800")
    assert optional_text_bytes("key", "k") == optional_text_bytes("key", bytearray(b"k")) == b"k"


@pytest.mark.parametrize("given", ["now", 1.5, 2**62, None])
def test_what_is_no_timestamp(given: Any) -> None:
    with pytest.raises(InvalidRecordError, match="timestamp"):
        timestamp_us_of(given)
