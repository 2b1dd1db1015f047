"""The bin: deleted topics that can come back, until their retention has passed, someone purges
them, or their disk is full (docs/adr/0041).

A flusher moves the files in and out (`workers.log.files.partition_directory`), and removes them
(`workers.flush.bin`). `topic_commands` and `change_queue` decide what is deleted and what
comes back.

Owner: the controller; the table `bin` of the catalog.
Invariants:
- A topic that is being purged never comes back.
- A topic leaves the catalog when nothing of it is left in the bins.
- Retention is elapsed time (`shm.runtime.elapsed_time`).
- A data directory that is short of space gives up its oldest deletion first, one at a time.
Bounds: REQUESTS_MAX purges wait. A list has pages.
Crash: a purge that was decided is sent to the flushers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import orjson

from appliance.catalog.catalog import Catalog, PartitionRow, Topic
from appliance.catalog.deleted_topics import DeletedTopic, DeletedTopics, deleted_topic
from appliance.control.host_view import HostView
from appliance.control.request_fields import Requester, shown_name, shown_text
from appliance.control.topics.change import ENTRIES_MAX
from shm.runtime.elapsed_time import MARK_ALONE_MS, MARK_EVERY_MS
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    StorageError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.format.directory.data_dir import bin_name
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_reply

logger = logging.getLogger(__name__)

BIN_APIS = (Api.LIST_DELETED_TOPICS, Api.PURGE_TOPICS)
REQUESTS_MAX = 32
ANSWER_TIMEOUT_NS = 30_000_000_000
CHECK_NS = 1_000_000_000
"""Interval of looking for expired topics and at the disks, while the bin has topics."""
PURGING_CHECK_NS = 50_000_000
REPEAT_NS = 2_000_000_000
"""Interval of asking the flushers for a purge again."""
PAGE_MAX = 200
NAMED_MAX = 5


class _Waiting(NamedTuple):
    """A request that is answered when its topics are removed."""

    requester: Requester
    results: list[dict[str, Any]]
    topic_ids: set[bytes]
    deadline_ns: int


class TopicBin:
    """See the module's docstring."""

    def __init__(
        self,
        catalog: Catalog,
        host_view: HostView,
        dir_index: Callable[[PartitionRow], int | None],
        ask_flusher: Callable[[int, bytes], None],
        publish_purged: Callable[[Topic], None],
        elapsed_ms: Callable[[], int],
        keep_time: Callable[[int], None],
        wall_us: Callable[[], int],
    ) -> None:
        """`dir_index`: a partition's data directory in this run, None: it is not configured.
        `ask_flusher`: have the flusher of a directory remove a topic from the bin.
        `publish_purged`: tell other processes that a topic does not come back. `keep_time`: keep
        elapsed time on the disk if the last mark is so old, ms.
        """
        self._catalog = catalog
        self._deleted = DeletedTopics(catalog)
        self._host_view = host_view
        self._dir_index = dir_index
        self._ask_flusher = ask_flusher
        self._publish_purged = publish_purged
        self._elapsed_ms = elapsed_ms
        self._keep_time = keep_time
        self._wall_us = wall_us
        self._waiting: list[_Waiting] = []
        self._asked_ns: dict[bytes, int] = {}
        """Topics that the flushers were asked to remove, and when."""
        self._due_ns = 0
        self._read: list[DeletedTopic] | None = None
        """The table; None: it was changed and has to be read."""

    # ---- the topics ------------------------------------------------------------------------------

    @property
    def _topics(self) -> list[DeletedTopic]:
        if self._read is None:
            self._read = self._deleted.all()
        return self._read

    def bring_back(self, deleted: DeletedTopic, name: str) -> Topic:
        """Decide that a topic comes back under this name; `changed` follows. Raises
        CatalogFullError.
        """
        return self._deleted.undelete(deleted, name)

    def changed(self) -> None:
        """Note that the table was changed within the controller's transaction."""
        self._forget_read()
        self._catalog.afterwards(lambda: None, lambda _error: self._forget_read())

    def _forget_read(self) -> None:
        self._read = None
        self._due_ns = 0

    def kept(self) -> list[Topic]:
        """The topics that can come back, and their delay logs."""
        return [deleted.topic for deleted in self._topics if not deleted.is_purging]

    def put(self, topic: Topic, kept_ms: int) -> None:
        """Note that a topic's files are in the bin. Raises StorageError, DiskFullError."""
        size = sum(
            self._host_view.bin_bytes(index, bin_name(topic.topic_id, row.partition))
            for row in topic.partitions
            if (index := self._dir_index(row)) is not None
        )
        expires_ms = self._elapsed_ms() + kept_ms
        with self._catalog.together():
            self._deleted.put(deleted_topic(topic, self._wall_us(), expires_ms, size))
            self._keep_time(MARK_EVERY_MS)
        self.changed()

    def named(self, item: dict[str, Any]) -> DeletedTopic:
        """The deleted topic that an entry's `name` names, which may be its id.

        Raises: UnknownTopicError, InvalidRequestError.
        """
        name = item.get("name")
        kept = [
            deleted
            for deleted in self._topics
            if not deleted.topic.delay_of and not deleted.is_purging
        ]
        found = [deleted for deleted in kept if deleted.topic.topic_id.hex() == name] or [
            deleted for deleted in kept if deleted.topic.name == name
        ]
        if not found:
            raise UnknownTopicError(f"there is no deleted topic {shown_name(name)!r}")
        if len(found) > 1:
            ids = ", ".join(each.topic.topic_id.hex() for each in found[:NAMED_MAX])
            raise InvalidRequestError(
                f"{len(found)} deleted topics had the name {shown_name(name)!r}: give the id of "
                f"one of them: {ids}"
            )
        return found[0]

    def delay_logs_of(self, topic: Topic) -> list[DeletedTopic]:
        """The delay log of a deleted topic, if it has one."""
        return [deleted for deleted in self._topics if deleted.topic.delay_of == topic.topic_id]

    def check_whole(self, deleted: DeletedTopic) -> None:
        """Check that the bin has all partitions. Raises StorageError."""
        names: dict[int, set[str]] = {}
        for row in deleted.topic.partitions:
            index = self._dir_index(row)
            if index is None:
                raise StorageError(
                    f"partition {row.partition} of the deleted topic {deleted.topic.name!r} is in "
                    "a directory that data_dirs lacks: list it, and restart"
                )
            if index not in names:
                names[index] = set(self._names_in(index))
            name = bin_name(deleted.topic.topic_id, row.partition)
            if name not in names[index]:
                raise StorageError(
                    f"bin/{name} is missing: restore it, or give the topic up with "
                    f"`tailrace topic purge {deleted.topic.topic_id.hex()}`"
                )

    def _names_in(self, index: int) -> list[str]:
        try:
            return self._host_view.bin_names(index)
        except OSError as error:
            raise StorageError(f"the bin cannot be read: {error}") from None

    # ---- requests --------------------------------------------------------------------------------

    def take(
        self, requester: Requester, api: int, request: dict[str, Any], now_ns: int, answer_max: int
    ) -> dict[str, Any] | None:
        """Handle a request; None: it is answered later. Raises TailraceError."""
        if api == Api.LIST_DELETED_TOPICS:
            return self._list(request.get("after"), answer_max // 2)
        items = request.get("topics")
        if not isinstance(items, list) or not 0 < len(items) <= ENTRIES_MAX:
            raise InvalidRequestError(
                f"the request needs a list `topics` of 1 to {ENTRIES_MAX} entries"
            )
        if len(self._waiting) >= REQUESTS_MAX:
            raise TailraceError(
                f"{REQUESTS_MAX} requests to purge topics wait; try again later",
                ErrorCode.NOT_READY,
            )
        results: list[dict[str, Any]] = []
        purged: set[bytes] = set()
        for item in items:
            results.append(self._purge_entry(item, purged))
        self.changed()
        self._waiting.append(_Waiting(requester, results, purged, now_ns + ANSWER_TIMEOUT_NS))
        self._due_ns = 0
        return None

    def _purge_entry(self, item: Any, purged: set[bytes]) -> dict[str, Any]:
        named = item.get("name") if isinstance(item, dict) else item
        result: dict[str, Any] = {"name": shown_name(named), "code": 0}
        try:
            if not isinstance(item, dict):
                raise InvalidRequestError("each entry of `topics` must be an object")
            deleted = self.named(item)
            purged |= self._decide_purge(deleted)
            result["bytes"] = self._size_of(deleted)
        except TailraceError as error:
            result.update(code=int(error.code), message=shown_text(error.detail))
        return result

    def _list(self, after: Any, page_bytes_max: int) -> dict[str, Any]:
        """A page of the topics that can come back, the oldest deletion first. Raises
        InvalidRequestError.
        """
        shown = [deleted for deleted in self._topics if not deleted.topic.delay_of]
        begin = 0
        if after is not None:
            ids = [deleted.topic.topic_id.hex() for deleted in shown]
            if after not in ids:
                raise InvalidRequestError(
                    "`after` must be `next` of the previous answer; begin again without it"
                )
            begin = ids.index(after) + 1
        page: list[dict[str, Any]] = []
        size = 0
        for deleted in shown[begin : begin + PAGE_MAX]:
            entry = self._entry(deleted)
            size += len(orjson.dumps(entry)) + 1
            if page and size > page_bytes_max:
                break
            page.append(entry)
        is_last = begin + len(page) == len(shown)
        return {"topics": page, "next": None if is_last or not page else page[-1]["topic_id"]}

    def _entry(self, deleted: DeletedTopic) -> dict[str, Any]:
        topic = deleted.topic
        return {
            "name": topic.name,
            "topic_id": topic.topic_id.hex(),
            "partitions": len(topic.partitions),
            "typed": topic.typed,
            "deleted_us": deleted.deleted_us,
            "left_ms": max(0, deleted.expires_ms - self._elapsed_ms()),
            "bytes": self._size_of(deleted),
            "state": topic.state,
        }

    def _size_of(self, deleted: DeletedTopic) -> int:
        logs = self.delay_logs_of(deleted.topic)
        return deleted.size_bytes + sum(log.size_bytes for log in logs)

    def summary(self) -> dict[str, Any]:
        """Number and bytes of the topics in the bin, and the oldest one, for DESCRIBE_CLUSTER."""
        shown = [deleted for deleted in self._topics if not deleted.topic.delay_of]
        oldest = min(shown, key=lambda deleted: deleted.deleted_us, default=None)
        return {
            "topics": len(shown),
            "bytes": sum(deleted.size_bytes for deleted in self._topics),
            "oldest": oldest.topic.name if oldest is not None else None,
            "oldest_deleted_us": oldest.deleted_us if oldest is not None else None,
        }

    # ---- purging ---------------------------------------------------------------------------------

    def _decide_purge(self, deleted: DeletedTopic) -> set[bytes]:
        """Decide to remove a topic and its delay log; returns their ids. The caller calls
        `changed`. Raises StorageError, DiskFullError.
        """
        both = [deleted, *self.delay_logs_of(deleted.topic)]
        with self._catalog.together():
            for each in both:
                self._deleted.mark_purging(each.topic.topic_id)
        return {each.topic.topic_id for each in both}

    def step(self, now_ns: int) -> int:
        """Decide what is to be purged, within the controller's transaction; returns how much was
        done.
        """
        if not self._topics or now_ns < self._due_ns:
            return 0
        count = 0
        try:
            count = self._expire() + self._make_room()
        except TailraceError as error:
            logger.warning("bin_not_purged error=%r", error.detail)
        if count:
            self.changed()
        is_purging = any(deleted.is_purging for deleted in self._topics)
        self._due_ns = now_ns + (PURGING_CHECK_NS if is_purging else CHECK_NS)
        return count

    def _expire(self) -> int:
        elapsed_ms = self._elapsed_ms()
        expired = [
            deleted
            for deleted in self._topics
            if not deleted.is_purging
            and not deleted.topic.delay_of
            and deleted.expires_ms <= elapsed_ms
        ]
        for deleted in expired:
            self._decide_purge(deleted)
            logger.info("bin_expired topic=%s", deleted.topic.name)
        if not expired:
            self._keep_time(MARK_ALONE_MS)
        return len(expired)

    def _make_room(self) -> int:
        """Give up the oldest deletion of each data directory that is short of space, unless one is
        being removed there.
        """
        oldest: dict[int, DeletedTopic] = {}
        busy: set[int] = set()
        for deleted in sorted(self._topics, key=lambda deleted: deleted.deleted_us):
            for index in self._dirs_of([deleted]):
                if deleted.is_purging:
                    busy.add(index)
                elif not deleted.topic.delay_of:
                    oldest.setdefault(index, deleted)
        given_up = {
            deleted.topic.topic_id: (index, deleted)
            for index, deleted in oldest.items()
            if index not in busy and self._host_view.is_short_of_space(index)
        }
        for index, deleted in given_up.values():
            self._decide_purge(deleted)
            logger.warning(
                "bin_purged_for_space topic=%s bytes=%d data_dir=%d advice=%r",
                deleted.topic.name, self._size_of(deleted), index,
                "its disk is nearly full: free some space on it",
            )  # fmt: skip
        return len(given_up)

    def finish(self, now_ns: int) -> int:
        """Ask the flushers for what was decided, and note what is removed, within the controller's
        transaction; returns how much was done. Call it first: what this step decides is not on the
        disk yet.
        """
        purging = [deleted for deleted in self._topics if deleted.is_purging]
        present: dict[int, set[str]] = {}
        for index in self._dirs_of(purging):
            try:
                present[index] = {
                    name.partition("-")[0] for name in self._host_view.bin_names(index)
                }
            except OSError as error:
                logger.warning("bin_not_purged error=%r", str(error))
                return 0
        return sum(self._finish(deleted, present, now_ns) for deleted in purging)

    def _finish(self, deleted: DeletedTopic, present: dict[int, set[str]], now_ns: int) -> int:
        """`present`: ids of the topics that the bin of a directory has files of."""
        topic_id = deleted.topic.topic_id
        left = {index for index in self._dirs_of([deleted]) if topic_id.hex() in present[index]}
        if left:
            asked_ns = self._asked_ns.get(topic_id)
            if asked_ns is not None and now_ns - asked_ns < REPEAT_NS:
                return 0
            self._asked_ns[topic_id] = now_ns
            for index in left:
                self._ask_flusher(index, topic_id)
            if asked_ns is None:
                self._publish_purged(deleted.topic)
            return 1
        try:
            self._deleted.forget(topic_id)
        except TailraceError as error:
            logger.warning("bin_not_purged error=%r", error.detail)
            return 0

        self.changed()
        self._asked_ns.pop(topic_id, None)
        if not deleted.topic.delay_of:
            logger.info("topic_purged topic=%s bytes=%d", deleted.topic.name, deleted.size_bytes)
        return 1

    def _dirs_of(self, topics: Iterable[DeletedTopic]) -> set[int]:
        """The configured data directories that hold partitions of these topics."""
        return {
            index
            for deleted in topics
            for row in deleted.topic.partitions
            if (index := self._dir_index(row)) is not None
        }

    def answer(
        self, now_ns: int, send: Callable[[Requester, ErrorCode, bytes], None], answer_max: int
    ) -> int:
        """Answer requests whose topics are removed, and those past their deadline; returns their
        number.
        """
        if not self._waiting:
            return 0
        present = {deleted.topic.topic_id for deleted in self._topics}
        over = [
            waiting
            for waiting in self._waiting
            if not waiting.topic_ids & present or now_ns >= waiting.deadline_ns
        ]
        for waiting in over:
            self._waiting.remove(waiting)
            if waiting.topic_ids & present:
                message = "the topics are being removed; look at `tailrace topic list --deleted`"
                send(
                    waiting.requester,
                    *encode_reply(ErrorCode.TIMED_OUT, {"message": message}, answer_max),
                )
            else:
                send(
                    waiting.requester,
                    *encode_reply(ErrorCode.OK, {"results": waiting.results}, answer_max),
                )
        return len(over)

    def next_deadline_ns(self) -> int | None:
        """Time of the next look; None while the bin is empty."""
        return self._due_ns if self._topics or self._waiting else None
