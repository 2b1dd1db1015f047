"""Former files of partitions that have moved: kept while something needs them, then removed.

Owner: the controller (`partition_moves`).

Invariants:
- Former files are removed when the readers know the new place, KEPT_NS after the arrival at the
  earliest. The leases and the transactions of before must have ended.
- Until then the former worker, and each successor of it, has the partition closed: it keeps the
  coordinator from forgetting the decisions that came while the partition was closed.
- The removal is requested until the flusher there shows that it is done.

Bounds: leases keep the files for LEASES_MAX_NS.

Crash: a successor keeps them as if the partition had arrived with its start.
"""

from __future__ import annotations

from appliance.catalog.rows import PartitionRow, Topic
from appliance.control.moves.moving_partition import Move, Part, states_of
from appliance.control.offset_leases import OffsetLeases
from appliance.control.publishing.lane_sender import LaneSender
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from shm.memory.layout import SlotState

KEPT_NS = 5_000_000_000
"""Shortest time from the arrival to the removal of the former files: readers end what they have
begun.
"""
LEASES_MAX_NS = 3_600_000_000_000
"""Longest wait for readers' leases."""
REPEAT_NS = 5_000_000_000
WAITS_FOR_READERS = "readers need the former files"
WAITS_FOR_TRANSACTIONS = "transactions that were open when it moved have not ended there"
WAITS_FOR_FILES = (
    "the flusher there does not remove the files: its disk may stand still. Repair it, or take its "
    "directory out of data_dirs and restart"
)


class FormerFiles:
    """Decides when they go, for each move by itself."""

    def __init__(self, publisher: MetadataPublisher, leases: OffsetLeases[LaneSender]) -> None:
        self._publisher = publisher
        self._leases = leases

    def keep(self, each: Move, now_ns: int) -> None:
        """A partition is open in its new place: keep its former files for those who may need them.
        Nothing needs what is left of one that went back.
        """
        for part in each.parts:
            part.leases = set() if each.is_back else self._leases.names_of(*part.key)
        each.state, each.until_ns = "left", now_ns + KEPT_NS

    def place(self, each: Move, topics: list[Topic]) -> list[tuple[Topic, PartitionRow, int]]:
        """The former place of each part with its worker, for `MetadataPublisher.former_places`;
        empty when its end was sent, or its directory is not configured any more.
        """
        if each.state == "closing" or each.sent_ns or not self._is_configured(each) or not topics:
            return []
        worker = self._worker(each, topics)
        return [
            (topic, part.former, worker) for topic, part in zip(topics, each.parts, strict=True)
        ]

    def are_gone(self, each: Move) -> bool:
        """True if the files are removed, or their directory is not configured any more."""
        return not self._is_configured(each) or not self._left(each)

    def remove(self, each: Move, topics: list[Topic], now_ns: int) -> int:
        """Request the removal of what is left, if nothing needs it. `topics`: empty if they are
        deleted. Returns 1 if it was requested.
        """
        reason = self._reason_to_wait(each, topics, now_ns)
        each.waits_for = reason or (WAITS_FOR_FILES if each.is_repeated else "")
        if (
            now_ns < max(each.until_ns, each.sent_ns + REPEAT_NS if each.sent_ns else 0)
            or reason
            or not self._publisher.have_readers_caught_up()
        ):
            return 0
        worker = self._worker(each, topics)
        shown = topics or [_unknown_topic(part, self._next_version(part)) for part in each.parts]
        left = self._left(each)
        for topic, part in zip(shown, each.parts, strict=True):
            if part in left:
                self._publisher.publish_left(topic, part.former, worker)
        each.is_repeated = bool(each.sent_ns)
        each.sent_ns = now_ns
        return 1

    def _is_configured(self, each: Move) -> bool:
        return self._publisher.placement.known_dir_index(each.former) is not None

    def _left(self, each: Move) -> list[Part]:
        """The parts whose files are there, as far as is known."""
        return [part for part in each.parts if not (each.sent_ns and self._is_removed(part))]

    def _is_removed(self, part: Part) -> bool:
        state = self._publisher.table(part.former).read(part.former.slot)
        return state.state is SlotState.DELETED and state.topic_id == part.topic_id

    def _next_version(self, part: Part) -> int:
        """A version that no process there has: the end of an earlier one would be ignored. A topic
        that comes back has a later one, so no change of it is taken for carried out by this end.
        """
        state = self._publisher.table(part.former).read(part.former.slot)
        return state.applied_version + 1 if state.topic_id == part.topic_id else 0

    def _worker(self, each: Move, topics: list[Topic]) -> int:
        topic = topics[0] if topics else _unknown_topic(each.parts[0])
        return self._publisher.placement.former_worker_of(topic, each.former)

    def _reason_to_wait(self, each: Move, topics: list[Topic], now_ns: int) -> str:
        """The reason why the former files of a partition stay; "": they may go."""
        if topics and self._has_open(each, topics):
            return WAITS_FOR_TRANSACTIONS
        has_lease = any(part.leases & self._leases.names_of(*part.key) for part in each.parts)
        is_late = now_ns >= each.until_ns + LEASES_MAX_NS
        return WAITS_FOR_READERS if has_lease and not is_late else ""

    def _has_open(self, each: Move, topics: list[Topic]) -> bool:
        """True if a transaction that was open at the arrival has not ended in the new place. Its
        last stable offset passes the markers when they are as durable as the topic requires.
        """
        states = states_of(each, topics, self._publisher)
        return any(
            state.topic_id == part.topic_id and state.last_stable_offset < part.end_offset
            for state, part in zip(states, each.parts, strict=True)
        )


def _unknown_topic(each: Part, version: int = 0) -> Topic:
    """Stand-in for a deleted topic, with what the end of a partition needs."""
    return Topic(each.topic_id, each.name, "deleting", version, False, 0, b"", {}, (), 0)
