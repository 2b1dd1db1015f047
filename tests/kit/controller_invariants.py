"""What the docstrings of the coordinator's modules promise, held against a coordinator between two of its steps."""

from __future__ import annotations

from appliance.changes import CHANGES_MAX, Changes
from appliance.coordinator import Coordinator
from appliance.outgoing import NEWS_AT_ONCE, Outgoing
from shm.catalog_messages import REPLAY, Assignment


def check_coordinator(coordinator: Coordinator) -> None:
    """Every invariant that can be seen from outside a step. Raises AssertionError."""
    for out in coordinator._telling._outgoing:
        _check_outgoing(out)
    _check_changes(coordinator._changes)


def _check_outgoing(out: Outgoing) -> None:
    """Of news about one partition only the newest waits; few partitions are being changed behind a worker."""
    news = [item.content for item in out.queue if isinstance(item.content, Assignment) and not item.flags & REPLAY]
    keys = [(assignment.topic_id, assignment.partition) for assignment in news]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(out._news)
    assert len(out._under_way) <= NEWS_AT_ONCE


def _check_changes(changes: Changes) -> None:
    """Of a front few requests wait; one that is not decided has decisions of its own only."""
    fronts = [change.requester.front for change in changes._changes]
    assert all(fronts.count(front) <= CHANGES_MAX for front in set(fronts))
    assert all(not change.payload for change in changes._changes if change.is_begun)
    assert all(topic.topic_id == topic_id for change in changes._changes for topic_id, (topic, _) in change.pending.items())
