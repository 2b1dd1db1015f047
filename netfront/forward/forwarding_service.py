"""Forwarding service: requests that the controller, the scheduler or the group coordinator answers,
and their pushes.

Owner: one front; its ends of the lanes to and from these processes.

Invariants:
- A message is consumed before it is handled. A failing message affects nothing else.
- A request is handled behind everything that the controller had sent before it was read
  (`catch_up`): its client may know of a change from another front.
- The group coordinator is notified of the end of each session that has sent it a request, and of no
  other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from netfront.forward.forwarder import Forwarder, ForwarderLink, OnDemand
from netfront.session.responses import Responses
from netfront.session.sessions import Session, Sessions
from shm.messages.lane_messages import PRODUCER_OWNERS, REPLAY, LaneKind
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.protocol import json_messages
from tailrace.protocol.frame import Api, RequestHeader, WireError

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from netfront.access.member_topics import MemberTopics
    from netfront.access.producer_owners import ProducerOwners

CONTROLLER_TIMEOUT_MS = 35_000
"""The controller answers within 30 s unless it was killed."""
DELAYS_TIMEOUT_MS = 15_000
DELAY_APIS = (Api.LIST_DELAYS, Api.CHANGE_DELAYS, Api.DESCRIBE_DELAYS)
"""APIs that the scheduler answers."""
GROUPS_TIMEOUT_MS = 15_000
GROUPS_AT_ONCE_MAX = 8
"""Requests of one session in the group coordinator's lane at a time. Further ones wait behind it,
so that a busy client delays only itself.
"""
GROUP_APIS = (
    Api.GROUP_HEARTBEAT, Api.COMMIT_OFFSETS, Api.FETCH_OFFSETS, Api.LIST_GROUPS, Api.DESCRIBE_GROUP,
    Api.DELETE_GROUPS, Api.ALTER_GROUP_OFFSETS,
    Api.SHARE_ACQUIRE, Api.SHARE_ACKNOWLEDGE,
    Api.INIT_TRANSACTIONS, Api.END_TRANSACTION, Api.LIST_TRANSACTIONS, Api.DESCRIBE_TRANSACTION,
    Api.ABORT_TRANSACTION, Api.CREATE_BRANCHES, Api.JOIN_TRANSACTION,
)  # fmt: skip
"""APIs that the process of groups answers: of the group and the transaction coordinator."""
GATHERED_FROM = 32
"""Number of group sessions from which heartbeats without changes are gathered."""
NOTHING_LISTED: dict[int, bytes] = {
    Api.LIST_GROUPS: orjson.dumps({"groups": [], "next": None}),
    Api.LIST_TRANSACTIONS: orjson.dumps({"transactions": [], "next": None}),
}
"""Responses to lists while the process of groups was never started. A list does not start it."""
NAMES_PRODUCER = frozenset((int(Api.INIT_TRANSACTIONS), int(Api.JOIN_TRANSACTION)))
"""APIs whose responses give a producer id to a client."""
OWN_WORD = 0
"""Session word of requests that the front makes for itself. No session has it."""
NO_DELAYS = orjson.dumps({"partitions": [], "after": None})
"""Response to DESCRIBE_DELAYS while the scheduler was never started, for metrics and `tailrace
status`.
"""
FORWARDED_APIS = (
    Api.CREATE_TOPICS, Api.DELETE_TOPICS, Api.ALTER_TOPICS, Api.DELETE_RECORDS, Api.LEASE_OFFSETS,
    Api.INIT_PRODUCER_ID, Api.DESCRIBE_CLUSTER,
    Api.DESCRIBE_CONFIGS, Api.ALTER_CONFIGS, Api.RELOAD_CONFIG,
    Api.LIST_DELETED_TOPICS, Api.UNDELETE_TOPICS, Api.PURGE_TOPICS, Api.DESCRIBE_SCHEMAS,
    Api.COMPACT_TOPIC,
    Api.ALTER_QUOTAS,
    Api.LIST_USERS, Api.ALTER_USERS, Api.LIST_ACLS, Api.ALTER_ACLS, Api.TEST_ACL,
    *DELAY_APIS, *GROUP_APIS,
)  # fmt: skip
_OF_GROUPS = frozenset((*map(int, GROUP_APIS), PRODUCER_OWNERS))
_OF_DELAYS = frozenset(map(int, DELAY_APIS))
"""Plain ints: each request is looked up, and a member of an enumeration compares in Python."""


class ForwardingService:
    """The three processes to which a front forwards requests."""

    def __init__(
        self,
        *,
        controller: ForwarderLink,
        scheduler: OnDemand,
        groups: OnDemand,
        process_generation: int,
        sessions: Sessions,
        responses: Responses,
        on_assignment: Callable[[bytes], None],
        on_rights: Callable[[bytes, bool], None],
        on_fed: Callable[[], None],
        start_ns: int,
        gate: Gate | None = None,
    ) -> None:
        """`gate` checks requests, and cuts lists, by the rights of their sessions.

        `process_generation` is this front's generation, which the controller feeds.
        `on_assignment` is called with each encoded assignment and must not raise. `on_rights` is
        called with users and ACLs, and True where they begin anew. `on_fed` is
        called when the whole catalog has arrived.
        """
        self.controller = Forwarder(
            controller, CONTROLLER_TIMEOUT_MS, self._answer_instead, start_ns
        )
        self.scheduler = Forwarder(scheduler, DELAYS_TIMEOUT_MS, self._answer_instead, start_ns)
        self.groups = Forwarder(
            groups, GROUPS_TIMEOUT_MS, self._answer_instead, start_ns, GROUPS_AT_ONCE_MAX
        )
        self._forwarders = (self.controller, self.scheduler, self.groups)
        self._group_sessions: set[int] = set()
        """Session words with a request to the group coordinator."""
        self._pushed_sessions: set[int] = set()
        """Session words that it has pushed something to since their last request."""
        self._process_generation = process_generation
        self._sessions = sessions
        self._responses = responses
        self._on_assignment = on_assignment
        self._on_rights = on_rights
        self._gate = gate
        self._on_fed = on_fed
        self.owners: ProducerOwners | None = None
        """Owners of transactional producer ids, where the appliance has users."""
        self.member_topics: MemberTopics | None = None
        """Topics of share members, where the appliance has users."""
        self._own: dict[int, Callable[[ErrorCode, bytes], None]] = {}
        """Callbacks of the front's own requests, by correlation id. Their session word is 0."""
        self._own_count = 0
        self.now_ns = start_ns
        """Time of this loop step. The front sets it."""

    def next_deadline_ns(self) -> int:
        """Return the time of the next step that is due without a message."""
        return min(
            self.controller.next_deadline_ns(),
            self.scheduler.next_deadline_ns(),
            self.groups.next_deadline_ns(),
        )

    def step(self) -> int:
        """Read responses and pushes, and handle restarts and timeouts.

        Return the amount of work done.
        """
        now_ns, count = self.now_ns, 0
        for forwarder in self._forwarders:
            if not forwarder.is_quiet(now_ns):
                count += self._read(forwarder)
        return count

    def catch_up(self) -> None:
        """Read what the controller has sent. To be called between reading a request and handling
        it: the controller updates every front before it answers a client.
        """
        link = self.controller.link
        if link is not None and link.from_it.has_more():
            self._read(self.controller)

    def pass_on(self) -> int:
        """Write queued requests to the lanes and ring each process once."""
        now_ns, count = self.now_ns, 0
        for forwarder in self._forwarders:
            if forwarder.has_queued:
                count += forwarder.pass_on(now_ns)
        return count

    def payload_max(self, header: RequestHeader) -> int:
        """Return the largest body of a request of this API, in bytes."""
        return self._forwarder(header.api).payload_max

    def ask(self, session: Session, header: RequestHeader, body: bytes) -> None:
        """Forward a request. Raises WireError at a limit or for invalid JSON."""
        request = json_messages.decode_request(body)
        api, version, correlation_id = header.api, header.version, header.correlation_id
        if self._gate is not None and session.principal is not None:
            if self._gate.opened(session.principal, api, request):
                body = orjson.dumps(request)
            body = self._gate.check(session.principal, api, request, body)
            body = self._gate.with_user(session.principal, api, body)
            if self.member_topics is not None and api == Api.SHARE_ACQUIRE:
                body = self.member_topics.checked(session.principal, body)
            elif self.member_topics is not None and api == Api.GROUP_HEARTBEAT:
                self.member_topics.heartbeat(session.principal, orjson.loads(body))
            if (
                api == Api.CHANGE_DELAYS
                and self.owners is not None
                and not self.owners.check(
                    session.principal, request, lambda: self._forward_waiting(session, header, body)
                )
            ):
                return
        nothing = NOTHING_LISTED.get(api)
        if nothing is not None and self.groups.is_absent():
            self._responses.send(session, api, version, correlation_id, ErrorCode.OK, [nothing])
            return
        if api == Api.DESCRIBE_DELAYS and _is_first_page(request) and self.scheduler.is_absent():
            self._responses.send(session, api, version, correlation_id, ErrorCode.OK, [NO_DELAYS])
            return
        forwarder = self._forwarder(api)
        is_patient = api == Api.GROUP_HEARTBEAT and self._is_patient(session.word, request)
        forwarder.ask(
            session.word, api, version, correlation_id, body, self.now_ns, is_patient=is_patient
        )
        if forwarder is self.groups:
            self._group_sessions.add(session.word)
            self._pushed_sessions.discard(session.word)

    def _forward_waiting(self, session: Session, header: RequestHeader, body: bytes) -> None:
        """Forward a request that has waited. It must not raise."""
        if self._sessions.by_word(session.word) is not session:
            return
        api, version, correlation_id = header.api, header.version, header.correlation_id
        try:
            self.ask(session, header, body)
        except WireError as error:
            self._responses.refuse(session.identity, session, api, version, correlation_id, error)
        except Exception as error:
            self._responses.fail(session.identity, session, api, version, correlation_id, error)

    def ask_for_itself(
        self, api: int, body: bytes, on_answer: Callable[[ErrorCode, bytes], None]
    ) -> None:
        """Ask another process for this front itself. `on_answer` must not raise; it gets NOT_READY
        at once if a process that is started on demand does not run, unless it is asked for owners.
        """
        forwarder = self._forwarder(api)
        if api != PRODUCER_OWNERS and forwarder.is_absent():
            on_answer(ErrorCode.NOT_READY, b"")
            return
        self._own_count += 1
        number = self._own_count
        try:
            forwarder.ask(OWN_WORD, api, 1, number, body, self.now_ns)
        except WireError as error:
            on_answer(error.code, json_messages.encode_error(error.detail))
        else:
            self._own[number] = on_answer

    def _respond(
        self, word: int, api: int, version: int, correlation_id: int, code: ErrorCode, body: bytes
    ) -> None:
        if word == OWN_WORD:
            on_answer = self._own.pop(correlation_id, None)
            if on_answer is not None:
                on_answer(code, body)
            return
        self._responses.answer_deferred(word, api, version, correlation_id, code, body)

    def _is_patient(self, word: int, heartbeat: dict[str, Any]) -> bool:
        """True for a heartbeat without changes, from a member that has no push to react to, if
        there are enough members to gather for.
        """
        if len(self._group_sessions) < GATHERED_FROM or word in self._pushed_sessions:
            return False
        epoch = heartbeat.get("member_epoch")
        return (
            type(epoch) is int
            and epoch > 0
            and heartbeat.get("owned") is None
            and heartbeat.get("topics") is None
        )

    def forget_session(self, session: Session) -> None:
        """Forget a session that has ended."""
        self.controller.forget_session(session.word)
        self.scheduler.forget_session(session.word)
        self.groups.forget_session(session.word)
        if session.word in self._group_sessions:
            self._group_sessions.remove(session.word)
            self._pushed_sessions.discard(session.word)
            self.groups.queue_session_closed(session.word)

    def _forwarder(self, api: int) -> Forwarder:
        if api in _OF_GROUPS:
            return self.groups
        return self.scheduler if api in _OF_DELAYS else self.controller

    def _read(self, forwarder: Forwarder) -> int:
        count = forwarder.step(self.now_ns)
        if forwarder.link is None:
            return count
        lane = forwarder.link.from_it
        while (message := lane.peek()) is not None:
            count += 1
            kind, code, word, correlation_id = (
                message.kind,
                message.flags,
                message.session,
                message.correlation_id,
            )
            api, payload = message.slot, bytes(message.payload)
            lane.advance(message)
            lane.consume()
            if kind == LaneKind.RESPONSE:
                asked = forwarder.take(word, correlation_id)
                if asked is not None:
                    if self._gate is not None and not code:
                        payload = self._shown(self._gate, word, asked[0], payload)
                    elif code == ErrorCode.NOT_READY and asked[0] == Api.SHARE_ACQUIRE:
                        payload = self._learned(word, payload)
                    self._respond(word, asked[0], asked[1], correlation_id, code_of(code), payload)
            elif kind == LaneKind.PUSH:
                self._responses.push_latest(word, api, payload)
                if word in self._group_sessions:
                    self._pushed_sessions.add(word)
            elif kind == LaneKind.ASSIGN:
                self._on_assignment(payload)
            elif kind == LaneKind.RIGHTS:
                self._on_rights(payload, bool(code & REPLAY))
            elif kind == LaneKind.FED and correlation_id == self._process_generation:
                self._on_fed()
        return count

    def _shown(self, gate: Gate, word: int, api: int, payload: bytes) -> bytes:
        """The part of a response that its session may see."""
        session = self._sessions.by_word(word)
        if session is None or session.principal is None:
            return payload
        if self.owners is not None and api in NAMES_PRODUCER:
            self.owners.passed_on(payload)
        return gate.shown(session.principal, api, payload)

    def _learned(self, word: int, payload: bytes) -> bytes:
        """The part of a refusal of SHARE_ACQUIRE that its client gets. The rest is the front's."""
        session = self._sessions.by_word(word)
        if self.member_topics is None or session is None or session.principal is None:
            return payload
        return self.member_topics.refused(session.principal, payload)

    def _answer_instead(
        self, word: int, api: int, version: int, correlation_id: int, code: ErrorCode, sentence: str
    ) -> None:
        """Answer a request that its process will not answer."""
        self._respond(
            word, api, version, correlation_id, code, json_messages.encode_error(sentence)
        )


def _is_first_page(request: dict[str, Any]) -> bool:
    """True for a request whose parameters the scheduler would not refuse."""
    return request.get("after") is None and request.get("limit") is None
