"""`tailrace partition move` of a topic that is deleted meanwhile says so: nothing has moved, and
nothing "stays where it was".
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.backup.source.point import SourcePartition
from appliance.cli.commands.storage import partition
from appliance.cli.commands.storage.partition import PartitionGoneError, Place
from tailrace.admin.admin import Admin
from tailrace.core.errors import UnknownTopicError

PLACE = Place(SourcePartition("orders", b"1" * 16, 3, "/disk1/orders-3", False, None), "/disk1")


class Deleted:
    """An administrator whose topic is gone, or another one now."""

    def __init__(self, topic_id: bytes | None) -> None:
        self.topic_id = topic_id

    def describe_cluster(self) -> dict[str, Any]:
        return {"moves": []}

    def topic_info(self, names: list[str]) -> dict[str, Any]:
        if self.topic_id is None:
            raise UnknownTopicError("there is no topic 'orders'")
        return {name: SimpleNamespace(topic_id=self.topic_id) for name in names}

    def move_partition(self, *_: object, validate_only: bool = False) -> None:
        del validate_only
        raise UnknownTopicError("there is no topic 'orders'")


@pytest.mark.parametrize("topic_id", [None, b"2" * 16], ids=["gone", "another"])
def test_a_partition_whose_topic_was_deleted_has_not_moved(topic_id: bytes | None) -> None:
    admin = cast(Admin, Deleted(topic_id))
    for step in (
        lambda: partition._check_movable(admin, PLACE, "/disk2"),
        lambda: partition._close(admin, PLACE, "/disk2"),
        lambda: partition._await_arrival(admin, PLACE),
    ):
        with pytest.raises(PartitionGoneError, match="orders:3 was not moved: its topic was"):
            step()


def test_a_partition_that_is_there_has_arrived() -> None:
    partition._await_arrival(cast(Admin, Deleted(PLACE.topic_id)), PLACE)
