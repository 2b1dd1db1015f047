"""Audit trail of a front: who did what, when, from where, and with which outcome.

Events go to the controller, which writes them. Administration waits until its event is on the disk;
sign-ins, results, denials and data access are reported afterwards, many at a time.

Owner: one front.

Invariants:
- A request of administration is handled only after its event is on the disk. If it cannot be
  written the request is refused with AUDIT_UNAVAILABLE.
- Data goes on whatever happens to the audit log.
- At most EVENTS_MAX events wait, of a session SESSION_EVENTS_MAX. Those beyond are counted, and an
  event has their number.
- Only a user with the right makes it write at once: rights are checked before an event is waited
  for, and a denial that is repeated is counted.
- No event has a secret: values under names of secrets are left out.

Crash: events that wait are lost with the front, except those of administration, which is then not
carried out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from netfront.session.responses import api_name, error_detail
from netfront.session.sessions import Session
from shm.messages.lane_messages import AUDIT_REQUEST
from shm.runtime.timing_wheel import NEVER_NS
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import Api, RequestHeader, WireError

EVENTS_MAX = 10_000
EVENTS_AT_ONCE = 200
RETRY_NS = 1_000_000_000
REQUEST_SHOWN_MAX = 4_000
SESSION_EVENTS_MAX = 1_000
DENIALS_MAX = 50
"""Different denials of a session that have a line of their own in DENIALS_EVERY_NS."""
DENIALS_EVERY_NS = 60_000_000_000
"""Interval at which the repeats of denials are reported."""
_NAMES = (
    "CREATE_TOPICS", "DELETE_TOPICS", "ALTER_TOPICS", "DELETE_RECORDS", "UNDELETE_TOPICS",
    "PURGE_TOPICS", "COMPACT_TOPIC", "ALTER_CONFIGS", "RELOAD_CONFIG", "ALTER_QUOTAS",
    "DELETE_GROUPS", "ALTER_GROUP_OFFSETS", "ABORT_TRANSACTION", "ALTER_USERS", "ALTER_ACLS",
)  # fmt: skip
ADMINISTRATION = frozenset(int(api) for api in Api if api.name in _NAMES)
DENIALS = frozenset((ErrorCode.NOT_AUTHENTICATED, ErrorCode.NOT_AUTHORIZED))
_SECRET_WORDS = ("password", "secret", "token", "private", "credential", "key")
_NOT_SECRET = frozenset(("keys", "key_count"))
Ask = Callable[[int, bytes, Callable[[ErrorCode, bytes], None]], None]
Handle = Callable[[Session, RequestHeader, list[bytes]], None]


class AuditTrail:
    """The events of a front."""

    def __init__(
        self,
        ask: Ask,
        refuse: Callable[[Session, RequestHeader, WireError], None],
        handle: Handle,
        is_open: Callable[[Session], bool],
        address_of: Callable[[bytes], str],
        topic_of: Callable[[bytes], str],
        prefixes: Sequence[str],
    ) -> None:
        """`handle` carries a request out, `refuse` answers it with an error. `prefixes`: of the
        topics whose access is reported; `*`: all.
        """
        self._ask = ask
        self._refuse = refuse
        self._handle = handle
        self._is_open = is_open
        self._address_of = address_of
        self._topic_of = topic_of
        self._prefixes = tuple(prefixes)
        self._events: deque[dict[str, Any]] = deque()
        self._dropped_count = 0
        self._is_asking = False
        self._retry_at_ns = NEVER_NS
        self._accesses: dict[int, set[tuple[str, bytes]]] = {}
        """Operations and topics that are reported: as many at most as topics are watched."""
        self._waiting: Counter[int] = Counter()
        """Events that wait, by session."""
        self._decisions: set[tuple[int, int]] = set()
        """Decisions about transactions that are carried out: session word, correlation id."""
        self._denials: dict[int, dict[tuple[int, str], dict[str, Any]]] = {}
        """Denials since the last report of repeats, by session, API and reason."""
        self._denials_at_ns = NEVER_NS
        self.now_ns = 0

    @property
    def watches_data(self) -> bool:
        """True if access to records is reported."""
        return bool(self._prefixes)

    # ---- events ----------------------------------------------------------------------------------

    @staticmethod
    def concerns(api: int, body: Sequence[Readable]) -> bool:
        """True for a request of administration: `defer` takes it once its rights are checked."""
        return api in ADMINISTRATION or (api == Api.END_TRANSACTION and _decides_by_id(body))

    def defer(self, session: Session, header: RequestHeader, body: list[bytes]) -> None:
        """Let a request of administration wait for its event."""
        event = self._event("request", session, header.api, header.correlation_id)
        event["request"] = shown_request(body[0] if body else b"")

        def on_answer(code: ErrorCode, answer: bytes) -> None:
            if not self._is_open(session):
                return
            if header.api not in ADMINISTRATION:
                self._decisions.add((session.word, header.correlation_id))
            if code is ErrorCode.OK:
                self._handle(session, header, body)
                return
            sentence = error_detail(answer) or "the audit log cannot be written now; try again"
            self._refuse(session, header, WireError(ErrorCode.AUDIT_UNAVAILABLE, sentence))

        self._ask(AUDIT_REQUEST, orjson.dumps({"events": [event]}), on_answer)

    def signed_in(self, session: Session) -> None:
        """Report a new session. Of the console's that act for a user of its page: what they say, as
        a login is one session of the page and many of the console's.
        """
        acting_for = session.acting_for
        if acting_for is None:
            self._add(self._event("login", session, 0, 0))
        elif acting_for.event == "login":
            self._add(self._event("login", session, 0, 0) | {"outcome": "allowed"})
        elif acting_for.event == "denied":
            self.login_failed(acting_for.user, acting_for.address, acting_for.detail)
        elif acting_for.event == "query" and self.watches_data:
            event = self._event("access", session, 0, 0)
            event |= {"operation": "query", "query": acting_for.detail, "outcome": "allowed"}
            self._add(event)

    def forget(self, session: Session) -> None:
        """Forget a session that has ended."""
        self._accesses.pop(session.word, None)
        self._decisions = {one for one in self._decisions if one[0] != session.word}
        self._report_repeats(self._denials.pop(session.number, {}))

    def answered(
        self, session: Session | None, api: int, correlation_id: int, code: ErrorCode,
        body: Readable,
    ) -> None:  # fmt: skip
        """Report the result of administration, and every denial."""
        is_result = session is not None and self._is_result(session, api, correlation_id)
        if code in DENIALS:
            self._denied(session, api, correlation_id, code, error_detail(body))
            return
        if not is_result:
            return
        event = self._event("result", session, api, correlation_id)
        reason = ""
        if code is not ErrorCode.OK:
            reason = error_detail(body)
        else:
            code, reason = failure_in(body)
        event["outcome"] = (
            "denied" if code in DENIALS else "allowed" if code is ErrorCode.OK else "failed"
        )
        if code is not ErrorCode.OK:
            event["code"], event["reason"] = code.name, reason[:1_000]
        self._add(event)

    def _is_result(self, session: Session, api: int, correlation_id: int) -> bool:
        if api in ADMINISTRATION:
            return True
        key = session.word, correlation_id
        if key not in self._decisions:
            return False
        self._decisions.remove(key)
        return True

    def _denied(
        self, session: Session | None, api: int, correlation_id: int, code: ErrorCode, reason: str
    ) -> None:
        """Report a denial, and count its repeats."""
        event = self._event("denied", session, api, correlation_id)
        event |= {"outcome": "denied", "code": code.name, "reason": reason[:1_000]}
        self._report_denial(0 if session is None else session.number, (api, reason), event)

    def denied_before(self, session: Session | None, asker: dict[str, str], reason: str) -> None:
        """Report a denial that was decided before the request came to the front. `session`: None if
        the client has none yet.
        """
        number = 0 if session is None else session.number
        event: dict[str, Any] = {"event": "denied", **asker, "outcome": "denied"}
        event |= {"code": ErrorCode.NOT_AUTHORIZED.name, "reason": reason[:1_000]}
        if session is not None:
            event["session"] = number
        self._report_denial(number, (0, f"{asker['api']} {reason}"), event)

    def key_refused(self, host: str) -> None:
        """Report a connection whose key no user has."""
        self.login_failed("", host, "no user has the key of this client")

    def login_failed(self, user: str, address: str, reason: str) -> None:
        """Report a login that failed. `user`: the name that was given, which may be anybody's;
        empty: none.
        """
        event = {
            "event": "denied", "user": f"User:{user[:100] or 'ANONYMOUS'}", "address": address,
            "outcome": "denied", "code": ErrorCode.NOT_AUTHENTICATED.name,
            "reason": reason[:1_000],
        }  # fmt: skip
        self._report_denial(0, (0, f"{user} {address} {reason}"), event)

    def _report_denial(self, number: int, key: tuple[int, str], event: dict[str, Any]) -> None:
        mine = self._denials.setdefault(number, {})
        if key not in mine and len(mine) >= DENIALS_MAX:
            key = 0, ""  # all others
        known = mine.get(key)
        if known is not None:
            known["repeats"] = known.get("repeats", 0) + 1
            return
        mine[key] = dict(event)
        self._denials_at_ns = min(self._denials_at_ns, self.now_ns + DENIALS_EVERY_NS)
        self._add(event)

    def _report_repeats(self, denials: dict[tuple[int, str], dict[str, Any]]) -> None:
        for event in denials.values():
            if "repeats" in event:
                self._add(event)

    def accessed(self, session: Session, operation: str, topic_ids: Sequence[bytes]) -> None:
        """Report the first access of a session to a topic that is watched, which is allowed."""
        known = self._accesses.setdefault(session.word, set())
        for topic_id in topic_ids:
            pair = operation, topic_id
            if pair in known:
                continue
            topic = self._topic_of(topic_id)
            if topic and any(p == "*" or topic.startswith(p) for p in self._prefixes):
                known.add(pair)
                event = self._event("access", session, 0, 0)
                event |= {"operation": operation, "topic": topic, "outcome": "allowed"}
                self._add(event)

    def _event(
        self, name: str, session: Session | None, api: int, correlation_id: int
    ) -> dict[str, Any]:
        event: dict[str, Any] = {"event": name}
        if session is not None:
            event |= {
                "user": user_of(session), "client": session.client_id,
                "address": self._address_of(session.identity), "session": session.number,
            }  # fmt: skip
            if session.acting_for is not None:
                event["address"] = session.acting_for.address
        if api:
            event |= {"api": api_name(api), "id": f"{correlation_id:x}"}
        return event

    # ---- reporting -------------------------------------------------------------------------------

    def _add(self, event: dict[str, Any]) -> None:
        number = event.get("session", 0)
        if len(self._events) >= EVENTS_MAX or self._waiting[number] >= SESSION_EVENTS_MAX:
            self._dropped_count += 1
        else:
            self._events.append(event)
            self._waiting[number] += 1
        if self._retry_at_ns == NEVER_NS:
            self._retry_at_ns = 0

    def next_deadline_ns(self) -> int:
        """Return the time when `step` next has work."""
        return NEVER_NS if self._is_asking else min(self._retry_at_ns, self._denials_at_ns)

    def step(self, now_ns: int) -> int:
        """Send the events that wait."""
        self.now_ns = now_ns
        if now_ns >= self._denials_at_ns:
            self._denials_at_ns = NEVER_NS
            denials, self._denials = self._denials, {}
            for of_session in denials.values():
                self._report_repeats(of_session)
        if self._is_asking or now_ns < self._retry_at_ns:
            return 0
        batch = [self._events.popleft() for _ in range(min(EVENTS_AT_ONCE, len(self._events)))]
        self._waiting -= Counter(event.get("session", 0) for event in batch)
        if self._dropped_count:
            batch.append({"event": "events_dropped", "count": self._dropped_count})
        self._retry_at_ns = NEVER_NS
        if not batch:
            return 0
        dropped = self._dropped_count
        self._is_asking = True

        def on_answer(code: ErrorCode, _answer: bytes) -> None:
            self._is_asking = False
            if code is ErrorCode.OK:
                self._dropped_count -= dropped
                self._retry_at_ns = 0 if self._events or self._dropped_count else NEVER_NS
                return
            kept = [event for event in batch if event["event"] != "events_dropped"]
            self._events.extendleft(reversed(kept))
            self._waiting += Counter(event.get("session", 0) for event in kept)
            self._retry_at_ns = self.now_ns + RETRY_NS

        self._ask(AUDIT_REQUEST, orjson.dumps({"events": batch}), on_answer)
        return 1


def _decides_by_id(body: Sequence[Readable]) -> bool:
    """True for an END_TRANSACTION that is an operator's decision about a prepared transaction."""
    frame = bytes(body[0]) if body else b""
    if b"by_id" not in frame and b"\\" not in frame:
        return False
    try:
        request = orjson.loads(frame)
    except ValueError:
        return False
    return isinstance(request, dict) and bool(request.get("by_id"))


def failure_in(body: Readable) -> tuple[ErrorCode, str]:
    """(Code, sentence) of the first entry of a response that failed; OK, "": none did."""
    try:
        results = orjson.loads(body).get("results", [])
        for row in results:
            if row.get("code"):
                return code_of(row["code"]), f"{row.get('name', '')}: {row.get('message', '')}"
    except (ValueError, AttributeError, TypeError):
        pass
    return ErrorCode.OK, ""


def user_of(session: Session) -> str:
    """The principal of a session, as Kafka writes it. The console's user, where it acts for one."""
    if session.acting_for is not None and session.acting_for.user:
        return f"User:{session.acting_for.user}"
    return "User:ANONYMOUS" if session.principal is None else session.principal.names[0]


def shown_request(body: bytes) -> Any:
    """A request's JSON for a line: without secrets, cut where it is long."""
    try:
        value = orjson.loads(body)
    except ValueError:
        return None
    shown = without_secrets(value)
    text = orjson.dumps(shown)
    return shown if len(text) <= REQUEST_SHOWN_MAX else text[:REQUEST_SHOWN_MAX].decode(
        "utf-8", "replace"
    )  # fmt: skip


def without_secrets(value: Any) -> Any:
    """A value whose members under names of secrets are replaced."""
    if isinstance(value, dict):
        return {
            name: "(secret)" if _is_secret(name) else without_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return value


def _is_secret(name: str) -> bool:
    plain = name.lower()
    return plain not in _NOT_SECRET and any(word in plain for word in _SECRET_WORDS)
