"""Requests that another process decides, and what those tell: the front's ends of the lanes to coordinator, scheduler and groups, and back.

Owner: one front. Invariants: a message of another process is consumed before it is acted on; one that fails costs nothing but itself; the process of groups
    is told of the end of each session that has asked it something, and of no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from netfront.deciders import Decider, DeciderLink, OnDemand
from netfront.replies import Replies
from netfront.sessions import Session, Sessions
from shm.catalog_messages import LaneKind
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.wire import Api, RequestHeader

DECISION_TIMEOUT_MS = 35_000
"""The coordinator answers within 30 s, unless it was killed."""
DELAYS_TIMEOUT_MS = 15_000
DELAY_APIS = (Api.LIST_DELAYS, Api.CHANGE_DELAYS, Api.DESCRIBE_DELAYS)
"""What the scheduler decides."""
GROUPS_TIMEOUT_MS = 15_000
GROUPS_AT_ONCE_MAX = 8
"""Requests of one session that are on their way to groups: a client that asks for much at once waits behind itself, not others behind it."""
GROUP_APIS = (
    Api.GROUP_HEARTBEAT, Api.COMMIT_OFFSETS, Api.FETCH_OFFSETS, Api.LIST_GROUPS, Api.DESCRIBE_GROUP, Api.DELETE_GROUPS, Api.ALTER_GROUP_OFFSETS,
    Api.SHARE_ACQUIRE, Api.SHARE_ACKNOWLEDGE,
)  # fmt: skip
"""What the process of groups decides."""
GATHERED_FROM = 32
"""With as many sessions of groups, heartbeats of members without news are gathered."""
NO_GROUPS = orjson.dumps({"groups": [], "next": None})
"""The list of groups while their process was never needed: to look whether there are groups does not start it."""
DECIDED_APIS = (
    Api.CREATE_TOPICS, Api.DELETE_TOPICS, Api.ALTER_TOPICS, Api.DELETE_RECORDS, Api.LEASE_OFFSETS, Api.INIT_PRODUCER_ID, Api.DESCRIBE_CLUSTER,
    *DELAY_APIS, *GROUP_APIS,
)  # fmt: skip


class Decisions:
    """The three deciders of a front."""

    def __init__(
        self,
        *,
        coordinator: DeciderLink,
        scheduler: DeciderLink,
        groups: OnDemand,
        process_generation: int,
        sessions: Sessions,
        replies: Replies,
        on_assignment: Callable[[bytes], None],
        on_fed: Callable[[], None],
        start_ns: int,
    ) -> None:
        """`process_generation`: of this front, which the coordinator feeds; `on_assignment`: called with each assignment as it came, raises nothing;
        `on_fed`: called when the whole catalog has come.
        """
        self.coordinator = Decider(coordinator, DECISION_TIMEOUT_MS, self._answer_instead, start_ns)
        self.scheduler = Decider(scheduler, DELAYS_TIMEOUT_MS, self._answer_instead, start_ns)
        self.groups = Decider(groups, GROUPS_TIMEOUT_MS, self._answer_instead, start_ns, GROUPS_AT_ONCE_MAX)
        self._deciders = (self.coordinator, self.scheduler, self.groups)
        self._group_sessions: set[int] = set()
        """Words of the sessions that have asked something of groups."""
        self._with_news: set[int] = set()
        """Of these, those that groups have pushed something to since they asked."""
        self._process_generation = process_generation
        self._sessions = sessions
        self._replies = replies
        self._on_assignment = on_assignment
        self._on_fed = on_fed
        self.now_ns = start_ns
        """Of this turn of the loop; the front sets it."""

    def next_deadline_ns(self) -> int:
        """When `step` next has something to do, without a message."""
        return min(self.coordinator.next_deadline_ns(), self.scheduler.next_deadline_ns(), self.groups.next_deadline_ns())

    def step(self) -> int:
        """Read what they have answered and told; restarts and timeouts."""
        now_ns, count = self.now_ns, 0
        for decider in self._deciders:
            if not decider.is_quiet(now_ns):
                count += self._read(decider)
        return count

    def pass_on(self) -> int:
        """Move what waits into their lanes; ring, once each."""
        now_ns, count = self.now_ns, 0
        for decider in self._deciders:
            if decider.has_queued:
                count += decider.pass_on(now_ns)
        return count

    def payload_max(self, header: RequestHeader) -> int:
        """The largest body of a request of this API, in bytes."""
        return self._decider(header.api).payload_max

    def ask(self, session: Session, header: RequestHeader, body: bytes) -> None:
        """Pass a request on. Raises WireError when too many wait, or it is no JSON."""
        request = requests.decode_request(body)
        api, version, correlation_id = header.api, header.version, header.correlation_id
        if api == Api.LIST_GROUPS and self.groups.is_absent():
            self._replies.send(session, api, version, correlation_id, ErrorCode.OK, [NO_GROUPS])
            return
        decider = self._decider(api)
        is_patient = api == Api.GROUP_HEARTBEAT and self._is_patient(session.word, request)
        decider.ask(session.word, api, version, correlation_id, body, self.now_ns, is_patient=is_patient)
        if decider is self.groups:
            self._group_sessions.add(session.word)
            self._with_news.discard(session.word)

    def _is_patient(self, word: int, heartbeat: dict[str, Any]) -> bool:
        """Whether a member says no more than that it is there, which is worth gathering where many do, and is not told that there is news for it."""
        if len(self._group_sessions) < GATHERED_FROM or word in self._with_news:
            return False
        epoch = heartbeat.get("member_epoch")
        return type(epoch) is int and epoch > 0 and heartbeat.get("owned") is None and heartbeat.get("topics") is None

    def forget_session(self, session: Session) -> None:
        """The client is gone."""
        self.coordinator.forget_session(session.word)
        self.scheduler.forget_session(session.word)
        self.groups.forget_session(session.word)
        if session.word in self._group_sessions:
            self._group_sessions.remove(session.word)
            self._with_news.discard(session.word)
            self.groups.tell_closed(session.word)

    def _decider(self, api: int) -> Decider:
        if api in GROUP_APIS:
            return self.groups
        return self.scheduler if api in DELAY_APIS else self.coordinator

    def _read(self, decider: Decider) -> int:
        count = decider.step(self.now_ns)
        if decider.link is None:
            return count
        lane = decider.link.from_it
        while (message := lane.peek()) is not None:
            count += 1
            kind, code, word, correlation_id = message.kind, message.flags, message.session, message.correlation_id
            api, payload = message.slot, bytes(message.payload)
            lane.advance(message)
            lane.consume()
            if kind == LaneKind.RESPONSE:
                asked = decider.take(word, correlation_id)
                if asked is not None:
                    self._replies.answer_late(word, asked[0], asked[1], correlation_id, code_of(code), payload)
            elif kind == LaneKind.PUSH:
                self._replies.push_news(word, api, payload)
                if word in self._group_sessions:
                    self._with_news.add(word)
            elif kind == LaneKind.ASSIGN:
                self._on_assignment(payload)
            elif kind == LaneKind.FED and correlation_id == self._process_generation:
                self._on_fed()
        return count

    def _answer_instead(self, word: int, api: int, version: int, correlation_id: int, code: ErrorCode, sentence: str) -> None:
        """Answer a request that its decider will not."""
        self._replies.answer_late(word, api, version, correlation_id, code, requests.encode_error(sentence))
