"""Partitions whose routes and logs come later than a client's question about them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.cluster.topic_entries import NO_LEADER, topic_entry
from netfront.kafka.apis.records.offsets import offset_for_leader_epoch
from netfront.kafka.exchange.waiter import Task
from netfront.kafka.wire.errors import KafkaError
from netfront.partition_routes import PartitionRoutes
from tests.kit.log_files.logs import assignment


def services_with(*partitions: int, count: int, leader_epoch: int) -> Any:
    """The services of a gateway that has the routes of these of `count` partitions."""
    routes = PartitionRoutes()
    for partition in partitions:
        routes.apply(replace(assignment(partition), partition_count=count))
    bounds = SimpleNamespace(
        leader_epoch=lambda _route: leader_epoch, end_of_epoch=lambda _route, epoch: (epoch, 7)
    )
    return SimpleNamespace(routes=routes, front=SimpleNamespace(log_bounds=bounds))


def test_a_partition_whose_route_has_not_come_is_counted_without_a_leader() -> None:
    """A producer that knew two partitions of three would send keys elsewhere."""
    entry = topic_entry(services_with(0, 2, count=3, leader_epoch=4), "t")
    assert [
        (one["partition_index"], one["error_code"], one["leader_id"]) for one in entry["partitions"]
    ] == [
        (0, KafkaError.NONE, 0), (1, KafkaError.LEADER_NOT_AVAILABLE, NO_LEADER),
        (2, KafkaError.NONE, 0),
    ]  # fmt: skip


def test_the_end_of_an_epoch_is_not_unknown_while_its_log_is_being_opened() -> None:
    """A client takes an unknown end for a log that was cut, and begins elsewhere."""
    request = {"topics": [{"topic": "t", "partitions": [{"partition": 0, "leader_epoch": 4}]}]}
    for current, expected in ((-1, (KafkaError.LEADER_NOT_AVAILABLE, -1)), (4, (0, 7))):
        services = services_with(0, count=1, leader_epoch=current)
        connection: Any = SimpleNamespace(address="host:1")
        peer: Any = None
        call = Call(services, connection, peer, 23, 4, "client", request)
        ends: list[Any] = []
        Task(offset_for_leader_epoch(call), ends.append, ends.append).resume()
        (entry,) = ends[0]["topics"][0]["partitions"]
        assert (entry["error_code"], entry["end_offset"]) == expected
