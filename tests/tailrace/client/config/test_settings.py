"""Settings as a Kafka user writes them are taken, and those that make no sense are refused with a
sentence before anything is opened.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tailrace import Consumer, NewTopic, Producer, TopicPartition
from tailrace.client.config.setting_fields import ALIASES, build, merged
from tailrace.client.config.settings import (
    ConsumerOptions,
    ConsumerSettings,
    ProducerOptions,
    ProducerSettings,
)
from tailrace.client.connections.runtime import check_bootstrap
from tailrace.core.errors import InvalidRequestError, InvalidSettingError, NotSupportedError
from tailrace.core.validation import name_list, partition_list, partition_of


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("tcp://127.0.0.1:7420", "tcp://127.0.0.1:7420"),
        ("localhost:7420", "tcp://localhost:7420"), (["localhost:7420"], "tcp://localhost:7420"),
        ("localhost:7420,", "tcp://localhost:7420"), ("[::1]:7420", "tcp://[::1]:7420"),
        ("ipc:///run/t.sock", "ipc:///run/t.sock"),
    ],
)  # fmt: skip
def test_addresses_in_kafkas_spellings_are_taken(given: object, meant: str) -> None:
    assert check_bootstrap(given) == meant


@pytest.mark.parametrize(
    "given",
    [
        "",
        "localhost",
        "localhost:",
        ":7420",
        "tcp://:7420",
        "localhost:74200",
        "tcp://localhost:74200",
        "localhost:1:2",
        "http://localhost:7420",
        [],
        ["a:1", "b:2"],
        "a:1,b:2",
        7420,
        None,
        {},
    ],
)
def test_what_is_no_address_is_refused_with_a_sentence(given: object) -> None:
    with pytest.raises(InvalidSettingError, match="bootstrap"):
        check_bootstrap(given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("0", 0), ("1", 1), ("-1", "all"), (-1, "all"), ("all", "all"), (0, 0), (1, 1)],
)
def test_acks_in_every_spelling(given: object, meant: object) -> None:
    assert build(ProducerSettings, {"acks": given}).acks == meant


@pytest.mark.parametrize("given", [2, "2", True, None, "leader", 0.5])
def test_acks_that_mean_nothing(given: object) -> None:
    with pytest.raises(InvalidSettingError, match="acks"):
        build(ProducerSettings, {"acks": given})


def test_a_dict_with_dotted_names_and_keyword_arguments_together() -> None:
    given = merged(
        {"bootstrap.servers": "localhost:7420", "linger.ms": "7", "compression.type": "zstd"},
        {"acks": "1"},
    )
    settings = build(ProducerSettings, given)
    assert (
        settings.bootstrap_servers,
        settings.linger_ms,
        settings.compression_type,
        settings.acks,
    ) == ("localhost:7420", 7, "zstd", 1)


@pytest.mark.parametrize(
    ("settings", "keywords", "sentence"),
    [
        ({"linger.ms": 5}, {"linger_ms": 5}, "given twice"),
        ({"bootstrap": "a:1"}, {"bootstrap_servers": "a:1"}, "given twice"),
        ({"lingr.ms": 5}, {}, "did you mean linger_ms"), ({3: 5}, {}, "give it as text"),
        ({"linger.ms": "5 parsecs"}, {}, "whole number .* 1h30m"),
        ({"value.serializer": "json"}, {}, "give a function"),
    ],
)  # fmt: skip
def test_settings_that_contradict_themselves_or_are_unknown(
    settings: dict[Any, Any], keywords: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        build(ProducerSettings, merged(settings, keywords))


@pytest.mark.parametrize(
    ("options", "settings"),
    [(ProducerOptions, ProducerSettings), (ConsumerOptions, ConsumerSettings)],
)
def test_what_type_checkers_are_told_of_is_what_there_is(options: type, settings: type) -> None:
    assert set(options.__annotations__) == {item.name for item in fields(settings)}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_earlier_name_of_a_setting_sets_it(alias: str, name: str) -> None:
    value: object = {"bootstrap_servers": "localhost:1", "validate_batches": False}.get(
        name, 1 << 20
    )
    assert getattr(build(ConsumerSettings, merged(None, {alias: value})), name) == value
    with pytest.raises(InvalidSettingError, match="given twice"):
        merged({alias.replace("_", "."): value}, {name: value})


def test_what_is_said_of_groups_means_nothing_without_one() -> None:
    for given in (True, False, "true", "False"):
        assert (
            build(
                ConsumerSettings, {"enable_auto_commit": given, "auto_commit_interval_ms": "1s"}
            ).auto_commit_interval_ms
            == 1_000
        )
    assert (
        build(ConsumerSettings, {"session_timeout_ms": 5, "group_instance_id": "a"}).group_id
        is None
    )


def test_settings_of_a_group_have_kafkas_names_and_defaults() -> None:
    settings = build(ConsumerSettings, merged({"group.id": "g", "session.timeout.ms": "6s"}, {}))
    assert (settings.group_id, settings.session_timeout_ms, settings.heartbeat_interval_ms) == (
        "g",
        6_000,
        3_000,
    )
    assert (
        settings.enable_auto_commit,
        settings.auto_commit_interval_ms,
        settings.max_poll_interval_ms,
    ) == (True, 5_000, 300_000)
    assert settings.partition_assignment_strategy == "sticky"
    for given, meant in (
        (["range", "sticky"], "range"),
        ("cooperative-sticky", "sticky"),
        ("roundrobin,range", "roundrobin"),
    ):
        assert (
            build(
                ConsumerSettings, {"group_id": "g", "partition_assignment_strategy": given}
            ).partition_assignment_strategy
            == meant
        )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"heartbeat_interval_ms": 45_000},
            "heartbeat_interval_ms .45000. must be less than session_timeout_ms .45000.",
        ),
        ({"session_timeout_ms": 1_000}, "must be less than session_timeout_ms"),
        ({"group_id": "x" * 10_000}, "group_id is a text of 10000 characters"),
        ({"group_id": ""}, "group_id is ''"),
        ({"group_id": "a\nb"}, "without control characters"),
        ({"group_id": "\ud800"}, "without control characters"),
        ({"group_id": b"g"}, "group_id is b'g'"),
        ({"group_instance_id": "\0"}, "group_instance_id is"),
        ({"partition_assignment_strategy": []}, "give a name such as sticky"),
        ({"partition_assignment_strategy": 3}, "give a name such as sticky"),
        ({"max_poll_interval_ms": 0}, "max_poll_interval_ms is 0"),
    ],
)
def test_settings_of_a_group_that_make_no_sense_name_themselves(
    given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        build(ConsumerSettings, {"group_id": "g", **given})


def test_a_client_is_made_from_kafkas_dict() -> None:
    with Producer({"bootstrap.servers": "localhost:1", "delivery.timeout.ms": 100}) as producer:
        assert producer.settings.delivery_timeout_ms == 100
    with Consumer(
        {"bootstrap.servers": "localhost:1", "auto.offset.reset": "earliest"}
    ) as consumer:
        assert consumer.settings.auto_offset_reset == "earliest"


def test_one_name_is_one_name() -> None:
    assert name_list("names", "abc") == ["abc"]
    assert name_list("names", ("a", "b")) == ["a", "b"]
    assert partition_list(TopicPartition("t", 1)) == [("t", 1)]
    assert partition_list([("t", 1)]) == [TopicPartition("t", 1)]


@pytest.mark.parametrize("given", [None, 3, b"abc", [b"abc"], [None], {"a": 1}.items()])
def test_what_are_no_names_is_refused_with_a_sentence(given: object) -> None:
    with pytest.raises(InvalidRequestError, match="names"):
        name_list("names", given)


@pytest.mark.parametrize(
    "given", ["t", ("t",), ("t", "0"), ("t", True), (0, "t"), None, ("t", 0, 1)]
)
def test_what_is_no_partition_is_refused_with_a_sentence(given: object) -> None:
    with pytest.raises(InvalidRequestError, match="TopicPartition"):
        partition_of(given)
    with pytest.raises(InvalidRequestError, match="TopicPartition"):
        partition_list([given])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": b"t"}, InvalidSettingError),
        ({"name": "t", "partitions": "2"}, InvalidSettingError),
        ({"name": "t", "configs": [1]}, InvalidSettingError),
        ({"name": "t", "replication_factor": 3}, NotSupportedError),
    ],
)  # fmt: skip
def test_a_topic_that_makes_no_sense_is_refused_before_it_is_sent(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        NewTopic(**arguments)


def test_kafkas_words_for_a_topic() -> None:
    assert NewTopic("t", num_partitions=3, replication_factor=1).partitions == 3
    given = {"retention.ms": "1d"}
    assert (
        NewTopic("t", config=given).configs == NewTopic("t", topic_configs=given).configs == given
    )
    with pytest.raises(InvalidSettingError, match="given twice"):
        NewTopic("t", configs=given, config=given)
    with pytest.raises(InvalidSettingError, match="replication_factor"):
        NewTopic("t", 3, 1)  # type: ignore[arg-type]
