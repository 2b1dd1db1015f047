"""The data directory that a partition is to move to: is there such a one, and may it move there?

Owner: pure; it reads the names in the directory.
"""

from __future__ import annotations

import os
from typing import Any

from appliance.catalog.catalog import Topic
from appliance.control.host_view import HostView
from appliance.control.placement.partition_placement import PartitionPlacement
from tailrace.core.errors import InvalidRequestError


def move_target(
    topics: list[Topic],
    number: int,
    path: Any,
    host_view: HostView,
    placement: PartitionPlacement,
) -> int:
    """The index of the directory that a partition may move to. `topics`: its topic, and the delay
    log that moves with it. Raises InvalidRequestError.
    """
    topic = topics[0]
    row = topic.partitions[number]
    paths = host_view.dir_paths()
    target = next(
        (
            index
            for index, known in enumerate(paths)
            if isinstance(path, str) and os.path.realpath(known) == os.path.realpath(path)
        ),
        None,
    )
    if target is None:
        raise InvalidRequestError(
            f"{str(path)[:200]!r} is no data directory of this appliance; it has "
            f"{', '.join(paths)}. To add one, list it in data_dirs and restart"
        )
    if target == placement.dir_index(row):
        raise InvalidRequestError(f"{topic.name}-{row.partition} is in {paths[target]} already")
    if not placement.has_room_in(topic, target):
        raise InvalidRequestError(
            f"topic {topic.name!r} has worker.dedicated, and {paths[target]} can have no other "
            "worker now: raise dedicated_workers in the configuration, and restart"
        )
    try:
        present = host_view.names_in(target)
    except OSError as error:
        raise InvalidRequestError(f"{paths[target]} cannot be read: {error}") from None
    for name in (f"{each.name}-{number}" for each in topics):
        if name in present:
            raise InvalidRequestError(
                f"{paths[target]}/{name} is there already: it was left by an earlier move or "
                "copied; move it away"
            )
    return target
