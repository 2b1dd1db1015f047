"""COMPACT_TOPIC: an operator wants a compacted topic to be cleaned now, and asks how far it is.

    request without a number   gets one; the flushers are told to clean up to where the log ends now
    with the number            how far that is; a flusher that was restarted is told again

Owner: the controller; pure beside the messages. The progress is in the partition table.

Invariants:
- Numbers ascend while the host runs, as the partition table's do.
- A partition has done a request when its flusher says so, also where a part must wait or cannot be
  cleaned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from appliance.catalog.catalog import PartitionRow, Topic
from appliance.config.topic_settings import COMPACT, TOPIC_SETTINGS
from appliance.control.request_fields import is_whole, shown_name
from shm.memory.layout import SlotState
from shm.tables.partition_table import CLEANING_NAMES, CleaningState, PartitionState
from tailrace.core.errors import InvalidRequestError, InvalidSettingError

NUMBER_MAX = 2**62


class CompactionRequests:
    """See the module's docstring."""

    def __init__(
        self,
        existing: Callable[[dict[str, Any]], Topic],
        state_of: Callable[[PartitionRow], PartitionState],
        put: Callable[[PartitionRow, bytes], None],
        now_ns: Callable[[], int],
        topic_defaults: Mapping[str, Any],
    ) -> None:
        """`existing`: the topic of {"name": ...}; raises UnknownTopicError. `put`: send a COMPACT
        message with this payload to the partition's flusher. `topic_defaults`: in force.
        """
        self._existing = existing
        self._state_of = state_of
        self._put = put
        self._now_ns = now_ns
        self._topic_defaults = topic_defaults

    def take(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle one request; returns the response. Raises UnknownTopicError,
        InvalidSettingError for a topic that is not compacted, InvalidRequestError.
        """
        topic = self._existing(request)
        default = TOPIC_SETTINGS["cleanup.policy"].default
        settings = {"cleanup.policy": default, **self._topic_defaults, **topic.given}
        if COMPACT not in settings["cleanup.policy"]:
            raise InvalidSettingError(
                f"topic {shown_name(topic.name)!r} is not compacted; set cleanup.policy=compact "
                "first (tailrace topic alter)"
            )
        number = request.get("number")
        if number is None:
            number = self._now_ns()
        elif not is_whole(number, 1, NUMBER_MAX):
            raise InvalidRequestError(f"number is {str(number)[:40]}; send that of the response")
        return {
            "number": number,
            "partitions": [self._partition(topic, row, number) for row in topic.partitions],
        }

    def _partition(self, topic: Topic, row: PartitionRow, number: int) -> dict[str, Any]:
        state = self._state_of(row)
        if state.topic_id != topic.topic_id:  # a start has not opened it yet
            state = PartitionState.empty(topic.topic_id, row.partition, SlotState.FREE, 0)
        is_offline = state.state in (SlotState.OFFLINE_FOR_WRITES, SlotState.UNREADABLE)
        if not is_offline and state.compaction_asked < number:
            self._put(row, orjson.dumps([topic.topic_id.hex(), row.partition, number]))
        return {
            "partition": row.partition,
            "state": "offline"
            if is_offline
            else CLEANING_NAMES[CleaningState(state.cleaning_state)],
            "is_done": is_offline or state.compaction_done >= number,
            "cleaned_below": state.cleaned_below,
            "log_end_offset": state.log_end_offset,
            "clean_bytes": state.clean_bytes,
            "dirty_bytes": state.dirty_bytes,
            "dirty_since_us": state.dirty_since_us,
        }
