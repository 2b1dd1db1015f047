"""Options of `spark.read`: pure, without a Spark session."""

from __future__ import annotations

import pytest

from spark_bridge.planner import parse_options
from tailrace.errors import InvalidSettingError
from tailrace.settings import DEFAULT_BOOTSTRAP

ADDRESS = "tcp://10.0.0.7:7420"
OTHER = "tcp://10.0.0.8:7420"


@pytest.mark.parametrize("name", ["kafka.bootstrap.servers", "Kafka.Bootstrap.Servers", "bootstrap", "BOOTSTRAP"])
def test_the_address_is_taken_under_kafkas_name_too(name: str) -> None:
    assert parse_options({name: ADDRESS, "subscribe": "t"}).bootstrap == ADDRESS


def test_without_an_address_it_is_the_usual_one() -> None:
    assert parse_options({"subscribe": "t"}).bootstrap == DEFAULT_BOOTSTRAP


def test_both_names_may_be_given_when_they_agree() -> None:
    assert parse_options({"bootstrap": ADDRESS, "kafka.bootstrap.servers": ADDRESS, "subscribe": "t"}).bootstrap == ADDRESS


@pytest.mark.parametrize("bootstrap", [OTHER, ""])
def test_two_addresses_are_refused_with_what_to_do(bootstrap: str) -> None:
    with pytest.raises(InvalidSettingError, match=r"bootstrap and kafka\.bootstrap\.servers name two appliances; give one of them"):
        parse_options({"bootstrap": bootstrap, "kafka.bootstrap.servers": ADDRESS, "subscribe": "t"})


@pytest.mark.parametrize("name", ["kafka.group.id", "kafka.security.protocol", "kafka.bootstrap.server"])
def test_other_options_of_kafkas_source_are_refused_not_ignored(name: str) -> None:
    with pytest.raises(InvalidSettingError, match=f"unknown option '{name}'"):
        parse_options({name: "x", "subscribe": "t"})
