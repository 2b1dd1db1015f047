"""Crash points: named places in the code where tests kill a process to check its successor's
recovery.

`crash_point("flusher.after_write")` costs one comparison while none is armed. The environment arms
one (`TAILRACE_CRASH_POINT=name`, or `name:3` for the third visit). Only the first generation of a
process obeys, so that its successor survives. Tests arm one in their own process with `armed`.

Owner: pure, except for the kill.

Invariants: every name is listed in CRASH_POINTS, and a test visits each of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CRASH_POINT_VARIABLE = "TAILRACE_CRASH_POINT"

CRASH_POINTS = {
    "worker.after_copy": "a batch lies in the ring, its descriptor is not published",
    "worker.after_publish": "descriptors are published, no doorbell was rung, lane space is not "
    "released",
    "worker.after_marker": "a marker is in the ring, nothing is published, and other markers of "
    "the decision may be missing",
    "worker.before_settled": "markers are durable, the coordinator was not informed",
    "flusher.after_place": "file positions are decided and recorded in the ring, nothing is "
    "written",
    "flusher.after_write": "batches are written, not synced",
    "flusher.after_journal": "the journal holds the group durably, verdicts are not written",
    "flusher.after_sync": "the group is durable, verdicts are not written",
    "flusher.after_verdicts": "verdicts and watermarks are written, `settled` is not moved",
    "flusher.after_seal": "a segment is sealed, its successor does not exist",
    "flusher.in_roll": "the new segment's file exists and is empty",
    "flusher.in_checkpoint": "half of a checkpoint is written",
    "flusher.in_write_durably": "a small file is written and synced under its temporary name",
    "flusher.in_retention": "the new log start offset is durable, the files below it are still "
    "there",
    "flusher.in_delete": "the directory of a deleted topic has its new name, its files are still "
    "there",
    "flusher.in_bin": "the directory of a deleted topic is in the bin, the table does not show it",
    "flusher.in_undelete": "the metadata of a partition in the bin has the topic's name, its "
    "directory is still in the bin",
    "flusher.in_purge": "a partition in the bin has the name of a removed one, its files are still "
    "there",
    "flusher.in_rewrite": "after a failed sync: the new segment is durable and has no name yet",
    "flusher.before_swap": "cleaned segments are ready, their swap is not decided",
    "flusher.after_swap_intent": "the swap of a cleaned segment is decided, no file has moved",
    "flusher.in_swap": "one more file of a cleaned segment has its name, the other segments of its "
    "run are still there",
    "flusher.after_swap": "a cleaned segment has its place, no checkpoint knows it",
    "flusher.before_swap_end": "checkpoints know the cleaned segment, its intent is still there",
    "cleaner.in_segment": "a part of a cleaned segment is written",
    "cleaner.before_report": "a cleaned segment is written and synced, its flusher has no report",
    "recovery.before_cut": "a torn tail was found and is still there",
    "recovery.after_cut": "the torn tail is cut, the index is not repaired",
    "recovery.in_suffix_change": "one more segment of a directory of an older format has its new "
    "name",
    "recovery.after_journal": "groups of the journal are written to their segments, not synced",
    "recovery.before_ready": "rings are drained and everything is synced, no process was notified",
    "controller.after_decision": "a change of topics is decided, no process was notified",
    "controller.after_apply": "the flusher has applied a change, the catalog does not have it yet",
    "controller.after_producer_id": "a producer id is recorded in the catalog, its producer has no "
    "response",
    "scheduler.after_publish": "a delayed batch or a mark is in the lane to its worker, which has "
    "not handled it",
    "scheduler.after_delivery": "a batch of due records is written to the lane, not published",
    "scheduler.before_manifest": "delayed rows are in bucket files, durable, the manifest does "
    "not name them",
    "scheduler.after_manifest": "the manifest names what was saved, memory still has it",
    "scheduler.after_move": "some rows of a far bucket were moved nearer, the others were not",
    "groups.after_decision": "one request of a group is decided in memory, others of the step are "
    "not, nothing is committed",
    "groups.before_commit": "all requests of a step are decided, nothing is committed, no response "
    "was sent",
    "groups.after_commit": "a step's decisions are committed, no response was sent",
    "groups.after_answer": "a response is written to the lane to its front, not published",
    "supervisor.after_lock": "the data directory is locked, nothing exists in shared memory",
    "supervisor.after_manifest": "the manifest names regions that do not exist yet",
    "supervisor.after_regions": "regions exist, no process does",
    "supervisor.after_spawn": "processes are started, the lock does not name them yet",
    "supervisor.after_recovery": "the flushers have recovered, the drained regions are still there",
    "move.copied": "the copy of a partition that moves is whole and synced, and has no name yet",
    "move.complete": "the copy of a partition that moves is in the bin of its new directory",
    "move.delays_copied": "the copy of a delay log that moves has the scheduler's files, and lacks "
    "others",
    "move.before_decision": "the controller has found the copy, the move is not decided",
    "move.after_decision": "the move is decided, no process was notified",
    "move.before_opening": "a partition that has moved is read there, it takes no batches yet",
    "move.before_going_back": "a partition that has moved cannot be opened there, and is closed",
    "backup.after_segments": "a partition's whole segments are in the target, others' are not",
    "backup.after_point": "the ends of the logs are read, the logs up to there are not",
    "backup.before_manifest": "all objects are in the target, no manifest names them",
    "backup.after_manifest": "the manifest is durable, older backups are not removed yet",
    "restore.in_partitions": "one more partition of a data directory is restored",
    "restore.before_identity": "everything is restored but the directory's identity",
    "migrate.after_create": "a topic is created in the target, nothing of it is in the journal",
    "migrate.after_begin": "the journal has where partitions begin, no record is copied",
    "migrate.after_plain": "records are on their way to the target, perhaps in its log",
    "migrate.after_open": "the journal has that transactions begin, none has",
    "migrate.before_entries": "records of a transaction are written, their entries are not",
    "migrate.before_commit": "a transaction has its records and entries, it is not committed",
    "migrate.after_commit": "a transaction is committed, the process that copies does not know it",
    "migrate.after_groups": "the offsets of groups are set, the switch is not noted",
    "migrate.before_switch": "everything is copied and set, the switch is not noted",
    "supervisor.in_clean_up": "every process has ended cleanly, the regions are still there",
}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_armed = ""
_visits_left = 0
_action: Callable[[], None] = _kill


def crash_point(name: str) -> None:
    """Kill this process if `name` is armed and due."""
    if name == _armed:
        _visit()


def is_armed() -> bool:
    """True if a crash point is armed.

    Compiled code, which visits none, then leaves the work to Python.
    """
    return bool(_armed)


def _visit() -> None:
    global _visits_left
    _visits_left -= 1
    if _visits_left == 0:
        _action()


def arm_from_environment() -> None:
    """Arm the crash point in CRASH_POINT_VARIABLE, if set."""
    global _armed, _visits_left
    name, _, visits = os.environ.get(CRASH_POINT_VARIABLE, "").partition(":")
    if name:
        if name not in CRASH_POINTS:
            raise SystemExit(f"tailrace: {CRASH_POINT_VARIABLE}={name!r} is not a crash point")
        _armed, _visits_left = name, int(visits or 1)


@contextmanager
def armed(name: str, action: Callable[[], None], visit: int = 1) -> Iterator[None]:
    """Arm a crash point in this process: `action` (which raises) runs at the
    `visit`-th visit of `name`.
    """
    global _armed, _visits_left, _action
    if name not in CRASH_POINTS:
        raise ValueError(f"{name!r} is not a crash point")
    _armed, _visits_left, _action = name, visit, action
    try:
        yield
    finally:
        _armed, _visits_left, _action = "", 0, _kill
