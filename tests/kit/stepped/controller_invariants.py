"""Invariants of the controller's modules, as their docstrings state them, held against a controller
between two of its steps.
"""

from __future__ import annotations

from appliance.control.controller_agent import Controller
from appliance.control.publishing.lane_sender import UPDATES_AT_ONCE, LaneSender
from appliance.control.topics.change_queue import CHANGES_MAX, TopicChangeQueue
from shm.messages.lane_messages import REPLAY, Assignment


def check_controller(controller: Controller) -> None:
    """Every invariant that can be seen from outside a step. Raises AssertionError."""
    for out in controller._publisher._outgoing:
        _check_outgoing(out)
    _check_changes(controller._changes)


def _check_outgoing(out: LaneSender) -> None:
    """Check that of messages about one partition only the newest waits, and that few partitions are
    being changed behind a worker.
    """
    update = [
        item.content
        for item in out.queue
        if isinstance(item.content, Assignment) and not item.flags & REPLAY
    ]
    keys = [(assignment.topic_id, assignment.partition) for assignment in update]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(out._updates)
    assert len(out._under_way) <= UPDATES_AT_ONCE


def _check_changes(changes: TopicChangeQueue) -> None:
    """Check that few requests of a front wait; one that is not decided has decisions of its own
    only.
    """
    fronts = [change.requester.front for change in changes._changes]
    assert all(fronts.count(front) <= CHANGES_MAX for front in set(fronts))
    assert all(not change.payload for change in changes._changes if change.is_started)
    assert all(
        topic.topic_id == topic_id
        for change in changes._changes
        for topic_id, (topic, _) in change.pending.items()
    )
