"""Log bounds: leader epoch, start and end of a partition's log, as Kafka's APIs show them."""

from __future__ import annotations

from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import LogReadError
from shm.messages.lane_messages import Assignment


class LogBounds:
    """Epochs and offsets of the partitions that a front serves."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    def leader_epoch(self, route: Assignment) -> int:
        """The leader epoch of a partition, -1 while its log is not open."""
        try:
            return self._reader.state(route).leader_epoch
        except LogReadError:
            return -1

    def shown_offsets(self, route: Assignment) -> tuple[int, int]:
        """The log start offset and the high watermark of a partition, -1 each while its log is not
        open.
        """
        try:
            state = self._reader.state(route)
        except LogReadError:
            return -1, -1
        return state.log_start_offset, state.high_watermark

    def is_decided(self, route: Assignment) -> bool:
        """True if nothing of an open transaction is durable in the partition's log."""
        try:
            state = self._reader.state(route)
        except LogReadError:
            return False
        return state.last_stable_offset == state.high_watermark

    def end_of_epoch(self, route: Assignment, epoch: int) -> tuple[int, int]:
        """Return a leader epoch, at most `epoch`, and where its records end; -1 each if that is not
        known.
        """
        try:
            state = self._reader.state(route)
        except LogReadError:
            return -1, -1
        if epoch == state.leader_epoch:
            return epoch, state.high_watermark
        if not 0 <= epoch < state.leader_epoch:
            return -1, -1
        end = self._reader.end_of_epoch(route, state, epoch)
        return (-1, -1) if end is None else (epoch, end)
