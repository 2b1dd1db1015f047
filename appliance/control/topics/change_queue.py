"""Queue of requests that change topics: decided in order, a few at a time, carried out by the
flushers, then answered.

Owner: the controller.
Invariants:
- Requests are decided in the order of their arrival.
- A change is answered once, at the latest at its deadline.
Bounds:
- CHANGES_MAX requests of a front wait or are under way.
- DECIDED_AT_ONCE entries are decided in one step.
- One change a topic is kept beyond its deadline.
Crash: a successor publishes what was decided and not carried out. The front fails what was not
decided.
"""

from __future__ import annotations

import logging
from typing import Any

from appliance.catalog.catalog import Catalog, CatalogFullError, Topic
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from appliance.control.request_fields import Requester, shown_name, shown_text
from appliance.control.topics.bin import TopicBin
from appliance.control.topics.change import Change
from appliance.control.topics.completion import Completion
from appliance.control.topics.topic_commands import TopicCommands
from shm.crash_points import crash_point
from shm.runtime.error_handler import CountedErrorHandler
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_error

logger = logging.getLogger(__name__)

CHANGE_TIMEOUT_NS = 30_000_000_000
CHANGES_MAX = 32
DECIDED_AT_ONCE = 16
CHANGES = (
    Api.CREATE_TOPICS, Api.DELETE_TOPICS, Api.ALTER_TOPICS, Api.DELETE_RECORDS, Api.UNDELETE_TOPICS,
)  # fmt: skip


NO_MEMORY = (
    "worker.dedicated: /dev/shm has no room for another worker's ring. The topic is created, "
    "and takes records when there is room: enlarge /dev/shm, or delete the topic"
)


class TopicChangeQueue:
    """The requests that change topics, from their arrival to their answer."""

    def __init__(
        self, catalog: Catalog, topics: dict[str, Topic], publisher: MetadataPublisher,
        decisions: TopicCommands, topic_bin: TopicBin, error_handler: CountedErrorHandler,
        answer_max: int,
    ) -> None:  # fmt: skip
        """`topics`: by name, as the controller knows them; changed here."""
        self._catalog = catalog
        self._topics = topics
        self._publisher = publisher
        self._error_handler = error_handler
        self._answer_max = answer_max
        self._decide_by = {
            Api.CREATE_TOPICS: decisions.create, Api.DELETE_TOPICS: decisions.delete,
            Api.ALTER_TOPICS: decisions.alter,
            Api.DELETE_RECORDS: decisions.delete_records, Api.UNDELETE_TOPICS: decisions.undelete,
        }  # fmt: skip
        self._changes: list[Change] = []
        self._completion = Completion(catalog, topics, publisher, topic_bin)
        self._late = self._completion.late
        # A predecessor may not have published these.
        for topic in [topic for topic in topics.values() if topic.state != "active"]:
            if topic.state == "deleting":
                publisher.publish_to_readers(topic)
            publisher.publish_to_workers(topic)
            self._late[topic.topic_id] = topic

    def is_waiting(self) -> bool:
        """True if a request or a decision is not finished."""
        return bool(self._changes or self._late)

    def take(self, requester: Requester, api: Api, payload: bytes, now_ns: int) -> None:
        """Queue a request.

        Raises: TailraceError if its front has too many.
        """
        if (
            sum(change.requester.front == requester.front for change in self._changes)
            >= CHANGES_MAX
        ):
            raise TailraceError(
                f"{CHANGES_MAX} changes of topics are under way, which is the limit; try again "
                "later",
                ErrorCode.NOT_READY,
            )
        self._changes.append(Change(requester, api, payload, now_ns + CHANGE_TIMEOUT_NS))

    def redecide(self, topic: Topic) -> None:
        """Decide a topic as it is: its settings have other defaults now. Raises StorageError,
        DiskFullError.
        """
        self.carry_out(topic, self._catalog.alter_topic(topic, topic.given, len(topic.partitions)))

    def carry_out(self, before: Topic, decided: Topic) -> None:
        """Carry out a decision that no client waits for, when it is on the disk."""

        def publish() -> None:
            self._late[decided.topic_id] = decided
            self._publisher.publish_to_workers(decided)

        def forget(_error: TailraceError) -> None:
            self._topics[before.name] = before

        self._topics[before.name] = decided
        self._catalog.afterwards(publish, forget)

    def step(self, now_ns: int) -> int:
        """Decide some entries, finish what is carried out; returns how much was done."""
        return self.decide_and_note(now_ns) + self.answer(now_ns)

    def decide_and_note(self, now_ns: int) -> int:
        """Decide some entries and note what is carried out: the part of a step that changes the
        catalog. `answer` follows after the commit.
        """
        return self._decide_some() + self._note_completed(now_ns)

    # ---- deciding --------------------------------------------------------------------------------

    def _decide_some(self) -> int:
        count = 0
        for change in [change for change in self._changes if not change.is_decided]:
            try:
                if not change.is_started:
                    change.start()
                while change.undecided and count < DECIDED_AT_ONCE:
                    self._decide(change, change.undecided.popleft())
                    count += 1
            except TailraceError as error:
                self._refuse(change, error.code, error.detail)
            except Exception as error:  # the boundary of one request
                self._refuse(
                    change,
                    ErrorCode.INTERNAL_ERROR,
                    self._error_handler.on_error(f"api={change.api.name}", error),
                )
            if count >= DECIDED_AT_ONCE:
                break
        return count

    def _decide(self, change: Change, item: Any) -> None:
        result: dict[str, Any] = {
            "name": shown_name(item.get("name") if isinstance(item, dict) else item),
            "code": 0,
        }
        change.results.append(result)
        try:
            if not isinstance(item, dict):
                raise InvalidRequestError("each entry of `topics` must be an object")
            change.check_offsets(item)
            decided = self._decide_by[change.api](item, change.validate_only)
            if decided:
                if change.api is Api.DELETE_TOPICS:
                    result["kept_ms"] = decided[0].bin
                elif change.api is Api.UNDELETE_TOPICS:
                    result.update(restored=decided[0].name, topic_id=decided[0].topic_id.hex())
                self._take_up(change, result, decided, revive=bool(item.get("online")))
        except TailraceError as error:
            result.update(code=int(error.code), message=shown_text(error.detail))
        except CatalogFullError as error:
            result.update(code=int(ErrorCode.INVALID_SETTING), message=str(error))
        except Exception as error:  # the boundary of one entry
            self._fail(change, result, error)

    def _take_up(
        self, change: Change, result: dict[str, Any], decided: list[Topic], *, revive: bool
    ) -> None:
        """Apply the decision for the entries that follow. Other processes learn of it after the
        commit.
        """
        topics_before = {topic.name: self._topics.get(topic.name) for topic in decided}
        pending_before = {topic.topic_id: change.pending.get(topic.topic_id) for topic in decided}

        def publish_all() -> None:
            crash_point("controller.after_decision")
            try:
                for topic in decided:
                    if topic.state == "deleting":  # before its files are deleted
                        self._publisher.publish_to_readers(topic)
                    self._publisher.publish_to_workers(topic, revive=revive)
            except Exception as error:  # the boundary of one entry
                self._fail(change, result, error)

        def forget(refusal: TailraceError) -> None:
            for topic in decided:
                old = self._topics.pop(topic.name)
                before = topics_before[topic.name]
                if before is not None:
                    self._topics[topic.name] = before
                added = old.partitions[
                    len(before.partitions)
                    if before is not None and before.topic_id == topic.topic_id
                    else 0 :
                ]
                self._publisher.placement.release(topic._replace(partitions=added))
                pending = pending_before[topic.topic_id]
                if pending is None:
                    change.pending.pop(topic.topic_id, None)
                else:
                    change.pending[topic.topic_id] = pending
            result.update(code=int(refusal.code), message=shown_text(refusal.detail))

        self._topics.update({topic.name: topic for topic in decided})
        for topic in decided:
            _, results = change.pending.get(topic.topic_id, (topic, []))
            change.pending[topic.topic_id] = topic, [*results, result]
            self._publisher.placement.assign(topic)
        self._catalog.afterwards(publish_all, forget)

    def _fail(self, change: Change, result: dict[str, Any], error: Exception) -> None:
        sentence = self._error_handler.on_error(
            f"api={change.api.name} topic={result['name']!r}", error
        )
        result.update(code=int(ErrorCode.INTERNAL_ERROR), message=sentence)
        self._resume_decided()

    def _resume_decided(self) -> None:
        """Reload the topics from the catalog after a failure between decision and publication."""
        for topic in self._catalog.topics():
            if self._topics.get(topic.name) != topic and topic.state != "active":
                self._topics[topic.name] = self._late[topic.topic_id] = topic
                self._publisher.publish_to_workers(topic)

    # ---- carrying out ----------------------------------------------------------------------------

    def _note_completed(self, now_ns: int) -> int:
        count = self._completion.complete_late(now_ns)  # its requester is answered in the next step
        for change in [change for change in self._changes if change.is_decided]:
            for topic, results in [
                pending
                for pending in change.pending.values()
                if self._completion.is_over(pending[0])
            ]:
                del change.pending[topic.topic_id]
                self._completion.complete(topic, results, now_ns)
                count += 1
        return count

    def answer(self, now_ns: int) -> int:
        """Finish requests that are carried out and noted, and those past their deadline; return
        their number.
        """
        count = 0
        for change in [change for change in self._changes if change.is_decided]:
            for topic, results in [
                pending
                for pending in change.pending.values()
                if self._publisher.placement.lacks_memory(pending[0])
            ]:
                del change.pending[topic.topic_id]
                self._late[topic.topic_id] = topic
                for result in results:
                    result.update(code=int(ErrorCode.INVALID_SETTING), message=NO_MEMORY)
            if not change.pending:
                self._changes.remove(change)
                self._answer(change)
                count += 1
            elif now_ns >= change.deadline_ns:
                self._refuse(
                    change,
                    ErrorCode.TIMED_OUT,
                    "the change is decided but not carried out yet; look at `tailrace status`",
                )
        return count

    # ---- answering -------------------------------------------------------------------------------

    def _answer(self, change: Change) -> None:
        if change.api is Api.DELETE_RECORDS:
            self._add_log_starts(change)
        for result in change.results:
            if result["code"]:
                logger.info(
                    "topic_change_refused api=%s topic=%r request=%x code=%s reason=%r",
                    change.api.name, result["name"], change.requester.correlation_id,
                    code_of(result["code"]).name, result.get("message", ""),
                )  # fmt: skip
        code, body = change.encode_results(self._answer_max)
        self._send(change.requester, code, body)

    def _add_log_starts(self, change: Change) -> None:
        for result in change.results:
            topic = self._topics.get(result["name"])
            if topic is not None and not result["code"]:
                result["log_start_offsets"] = {
                    str(row.partition): self._publisher.table(row).read(row.slot).log_start_offset
                    for row in topic.partitions
                }

    def _refuse(self, change: Change, code: ErrorCode, detail: str) -> None:
        """Answer a request as a whole; its decisions are still carried out."""
        self._changes.remove(change)
        for topic_id, (topic, _) in change.pending.items():
            late = self._late.get(topic_id)
            if late is None or late.version < topic.version:
                self._late[topic_id] = topic
        self._send(change.requester, code, encode_error(detail))

    def _send(self, requester: Requester, code: ErrorCode, body: bytes) -> None:
        self._publisher.answer(
            requester.front, requester.session, requester.correlation_id, code, body
        )
