"""Quota service of a front: slows what is beyond a rate, and refuses what is beyond a sum.

- Produced bytes: the credit of a connection grows as its gate allows.
- Fetched bytes: a fetch waits at its gate. At its max_wait_ms it is answered without batches.
- Requests: a connection's messages are parked, in order, and handled later. Requests that keep a
  client alive (CREDIT, PING, heartbeats) are counted and never parked.
- Connections, transactional ids: refused with QUOTA_EXCEEDED.

Several fronts divide each rate among them, by the use that each makes of it (`rate_shares`). While
a rate is used, a front shows its use, and takes its share, each SHARES_NS.

Owner: one front, which makes it when there are rules.

Invariants:
- A connection has the gates of its user and client id, whatever it was before: a gate outlives its
  connections until it is full.
- Parked messages: see `netfront.quotas.parked_messages`.

Crash: balances are lost. A restarted front begins with full buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from netfront.fetch.purgatory import Fetch
from netfront.quotas.parked_messages import ParkedMessages
from netfront.quotas.prefix_usage import PrefixUsage
from netfront.quotas.quota_gate import GateClock, QuotaGate
from netfront.quotas.rate_shares import share_of_rate
from netfront.quotas.session_quotas import SessionQuotas, Usage
from netfront.session.responses import Responses
from netfront.session.sessions import Session, Sessions
from netfront.socket.flow_control import Credit, CreditLedger
from shm.quotas.quota_rules import ANONYMOUS, QUOTAS, Entity, Rules, parse_rules, share_of
from shm.runtime.timing_wheel import NEVER_NS
from shm.tables.measurements import ThrottleState
from shm.tables.rate_uses import UNUSED, RateUse, RateUses, number_of
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import json_messages
from tailrace.protocol.frame import Api, WireError

if TYPE_CHECKING:
    from shm.rights.authorizer import Principal

GATES_MAX = 10_000
"""Gates without connections that are kept because they are not full."""
GATES_CHECK_NS = 1_000_000_000
SHARES_NS = 250_000_000
TRANSACTION_TIMEOUT_MS = 60_000
_RATES = tuple(name for name, row in QUOTAS.items() if row.is_rate)


class QuotaService:
    """Every quota of a front."""

    def __init__(
        self,
        *,
        ledger: CreditLedger,
        sessions: Sessions,
        responses: Responses,
        throttles: ThrottleState,
        handle: Callable[[list[bytes]], None],
        resume_fetch: Callable[[Fetch, int], None],
        prefixes: PrefixUsage,
        uses: RateUses,
        fronts: int,
        now_ns: int,
    ) -> None:
        """`uses`: those of all `fronts`. `handle` handles a message without looking at the rate of
        requests.
        """
        self._ledger = ledger
        self._sessions = sessions
        self._responses = responses
        self._throttles = throttles
        self._resume_fetch = resume_fetch
        self._prefixes = prefixes
        self._uses = uses
        uses.clear()
        self._fronts = max(1, fronts)
        self._share_at_ns = NEVER_NS
        self._shared_ns = now_ns
        """Time when the shares were taken last."""
        self._clock = GateClock(now_ns)
        self._rules: Rules = {}
        self._texts: list[str] = []
        self._gates: dict[tuple[str, Entity], QuotaGate] = {}
        self._usages: dict[tuple[str, Entity], Usage] = {}
        self._parked = ParkedMessages(handle)
        self._check_at_ns = now_ns + GATES_CHECK_NS

    @staticmethod
    def user_of(session: Session) -> str:
        """The user whose quotas a session has."""
        return _user(session.principal)

    # ---- rules -----------------------------------------------------------------------------------

    def use_rules(self, texts: Sequence[str], now_ns: int) -> None:
        """Use changed rules: for every session, from now on."""
        self._clock.now_ns = now_ns
        self._rules = parse_rules(texts)
        self._texts = list(texts)
        for session in self._sessions.all():
            self.attach(session)
        self._prefixes.use_rules(self._rules, now_ns)

    def attach(self, session: Session) -> None:
        """Give a session its gates, by the rules in force."""
        old = session.quota
        quotas = SessionQuotas(session)
        client = session.client_id
        user = self.user_of(session)
        quotas.produce_gate = self._gate("producer_byte_rate", user, client)
        quotas.fetch_gate = self._gate("consumer_byte_rate", user, client)
        quotas.request_gate = self._gate("request_rate", user, client)
        quotas.mutation_gate = self._gate("controller_mutation_rate", user, client)
        quotas.connections = self._usage("connections_max", user, client)
        share = share_of(self._rules, "transactions_max", user, client)
        if share is not None:
            usage = self._usages.setdefault(("transactions_max", share.key), Usage())
            usage.limit = share.value
            quotas.transactions = usage, share.value, share.key
        for gate in quotas.gates():
            gate.member_count += 1
        if quotas.connections is not None:
            quotas.connections.sessions.add(session.word)
        session.quota = None if quotas.is_empty else quotas
        self._responses.send_credit(self._ledger.use_gate(session.credit, quotas.produce_gate))
        if isinstance(old, SessionQuotas):
            self._replace(old, quotas)

    def _replace(self, old: SessionQuotas, quotas: SessionQuotas) -> None:
        """Let what waits at the gates that a session had go on by its new ones."""
        if quotas.connections is not old.connections and old.connections is not None:
            old.connections.sessions.discard(old.session.word)
        for gate in old.gates():
            gate.member_count -= 1
        if old.fetch_gate is not None and old.fetch_gate is not quotas.fetch_gate:
            for item in [item for item in old.fetch_gate.waiting if isinstance(item, Fetch)]:
                if item.session is old.session:
                    old.fetch_gate.forget(item)
                    self._resume_fetch(item, self._clock.now_ns)
        quotas.parked = old.parked
        for waited in (old.request_gate, old.mutation_gate):
            if waited is not None:
                waited.forget(old)
        if quotas.parked:
            self._parked.drain(quotas)

    def _gate(self, quota: str, user: str, client: str) -> QuotaGate | None:
        share = share_of(self._rules, quota, user, client)
        if share is None:
            return None
        gate = self._gates.get((quota, share.key))
        if gate is None:
            rate = self._share(quota, share.key, share.value, UNUSED)
            gate = self._gates[quota, share.key] = QuotaGate(quota, share.key, rate, self._clock)
            gate.shared_rate = share.value
        elif gate.shared_rate != share.value:
            gate.shared_rate = share.value
            self._set_rate(gate, self._share(quota, share.key, share.value, UNUSED))
        return gate

    # ---- shares of fronts ------------------------------------------------------------------------

    def _share(self, quota: str, key: Entity, rate: int, own: RateUse) -> int:
        if self._fronts == 1:
            return rate
        others = self._uses.of_others(number_of(f"{quota} {key.text}"), self._fronts)
        return share_of_rate(rate, own, others)

    def _set_rate(self, gate: QuotaGate, rate: int) -> None:
        if gate.bucket.rate != rate:
            gate.bucket.set_rate(rate, self._clock.now_ns)
            gate.open_now()

    def _take_shares(self, now_ns: int) -> None:
        """Show what was used here of each rate, and take this front's shares."""
        elapsed_ns = max(1, now_ns - self._shared_ns)
        self._shared_ns = now_ns
        for (quota, key), gate in self._gates.items():
            amount = max(0, gate.taken - gate.shown_taken) * 1_000_000_000 // elapsed_ns
            use = RateUse(amount, gate.was_limited or bool(gate.waiting))
            gate.shown_taken, gate.was_limited = gate.taken, False
            self._uses.put(number_of(f"{quota} {key.text}"), use)
            self._set_rate(gate, self._share(quota, key, gate.shared_rate, use))
            if use != UNUSED:
                self._clock.is_used = True

    def _usage(self, quota: str, user: str, client: str) -> Usage | None:
        share = share_of(self._rules, quota, user, client)
        if share is None:
            return None
        usage = self._usages.setdefault((quota, share.key), Usage())
        usage.limit = share.value
        return usage

    # ---- sessions --------------------------------------------------------------------------------

    def admit(self, client: str, principal: Principal | None) -> QuotaGate | None:
        """See `netfront.session.session_lifecycle.ConnectionQuotas`."""
        user = _user(principal)
        self._check_connection(user, client)
        return self._gate("producer_byte_rate", user, client)

    def _check_connection(self, user: str, client: str) -> None:
        share = share_of(self._rules, "connections_max", user, client)
        usage = self._usage("connections_max", user, client)
        if share is None or usage is None:
            return
        if len(usage.sessions) >= share.value:
            raise WireError(
                ErrorCode.QUOTA_EXCEEDED,
                f"{share.key.text} has {len(usage.sessions)} connections; its quota "
                f"connections_max is {share.value}. Close some, or raise it with `tailrace quota "
                "set`",
            )

    def check_transactions(self, session: Session, body: bytes) -> None:
        """Note the transactional id of an INIT_TRANSACTIONS. Raise WireError if it is beyond the
        quota.
        """
        quotas = session.quota
        if not isinstance(quotas, SessionQuotas) or quotas.transactions is None:
            return
        usage, most, key = quotas.transactions
        request = json_messages.decode_request(body)
        name, timeout_ms = request.get("transactional_id"), request.get("timeout_ms")
        if not isinstance(name, str):
            return  # the coordinator refuses it
        now_ns = self._clock.now_ns
        usage.ids = {one: row for one, row in usage.ids.items() if row[0] or row[1] > now_ns}
        if name not in usage.ids and len(usage.ids) >= most:
            raise WireError(
                ErrorCode.QUOTA_EXCEEDED,
                f"{key.text} uses {len(usage.ids)} transactional ids; its quota transactions_max "
                f"is {most}. Close producers, or raise it with `tailrace quota set`",
            )
        usage.ids[name] = (
            session.word,
            (max(0, timeout_ms) if type(timeout_ms) is int else TRANSACTION_TIMEOUT_MS) * 1_000_000,
        )

    def forget_session(self, session: Session) -> None:
        """Forget a session that has ended. Its gates keep what it took."""
        quotas = session.quota
        session.quota = None
        if not isinstance(quotas, SessionQuotas):
            return
        for gate in quotas.gates():
            gate.member_count -= 1
            gate.forget(quotas)
        self._parked.drop(quotas)
        if quotas.connections is not None:
            quotas.connections.sessions.discard(session.word)
        if quotas.transactions is not None:
            ids = quotas.transactions[0].ids
            for name, (word, timeout_ns) in list(ids.items()):
                if word == session.word:
                    ids[name] = 0, self._clock.now_ns + timeout_ns

    # ---- requests --------------------------------------------------------------------------------

    def parks(self, session: Session, frames: list[bytes]) -> bool:
        """Park a message if its session is beyond a rate. Raises WireError at the bounds."""
        quotas = session.quota
        return isinstance(quotas, SessionQuotas) and self._parked.parks(quotas, frames)

    def throttle_ns(self, session: Session, quotas: Container[str]) -> int:
        """Time until a session's gates of these quotas are open, 0 if they are."""
        found = session.quota
        if not isinstance(found, SessionQuotas):
            return 0
        now_ns = self._clock.now_ns
        return max(
            (
                gate.bucket.ready_ns(now_ns) - now_ns
                for gate in found.gates()
                if gate.quota in quotas
            ),
            default=0,
        )

    # ---- steps -----------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int:
        """Return the time when `step` next has work."""
        if self._clock.over:
            return self._clock.now_ns
        due_ns = min(
            self._share_at_ns, self._clock.wheel.quiet_until_ns, self._prefixes.next_deadline_ns()
        )
        return min(due_ns, self._check_at_ns) if self._gates else due_ns

    def step(self, now_ns: int) -> int:
        """Resume what waits at gates that have opened. Return how many have."""
        clock = self._clock
        clock.now_ns = now_ns
        work = 0
        while clock.over:
            gate, item, waited_ns = clock.over.pop()
            if isinstance(item, Credit):
                self._report(gate.quota, self._sessions.by_credit(item), waited_ns)
        if now_ns >= clock.wheel.quiet_until_ns:
            for gate in clock.wheel.advance(now_ns):
                work += self._resume(gate)
        if now_ns >= self._prefixes.next_deadline_ns():
            work += self._prefixes.step(now_ns)
        if now_ns >= self._share_at_ns:
            self._share_at_ns = NEVER_NS
            clock.is_used = False
            self._take_shares(now_ns)
        if clock.is_used and self._share_at_ns == NEVER_NS and self._fronts > 1:
            self._share_at_ns = now_ns + SHARES_NS
        if now_ns >= self._check_at_ns:
            self._check_at_ns = now_ns + GATES_CHECK_NS
            self._forget_full(now_ns)
        return work

    def _resume(self, gate: QuotaGate) -> int:
        count = 0
        gate.begin()
        try:
            while (found := gate.next_item()) is not None:
                count += 1
                item, waited_ns = found
                if isinstance(item, Credit):
                    session = self._sessions.by_credit(item)
                    self._report(gate.quota, session, waited_ns)
                    self._responses.send_credit(self._ledger.ask(item, item.requested))
                elif isinstance(item, Fetch):
                    self._report(gate.quota, item.session, waited_ns)
                    self._resume_fetch(item, self._clock.now_ns)
                elif isinstance(item, SessionQuotas):
                    self._report(gate.quota, item.session, waited_ns)
                    self._parked.drain(item)
        finally:
            gate.end()
        return count

    def _report(self, quota: str, session: Session | None, waited_ns: int) -> None:
        """Count a wait, and let the client know of it."""
        self._throttles.add(_RATES.index(quota), waited_ns)
        if session is not None:
            body = orjson.dumps({"throttled": quota, "ms": -(-waited_ns // 1_000_000)})
            self._responses.push_latest(session.word, Api.CREDIT, body)

    def _forget_full(self, now_ns: int) -> None:
        """Forget full gates without connections, and the oldest of these beyond the bound."""
        idle = [key for key, gate in self._gates.items() if not gate.member_count]
        excess = len(idle) - GATES_MAX
        for place, key in enumerate(idle):
            if place < excess or self._gates[key].bucket.is_full(now_ns):
                del self._gates[key]
                self._uses.remove(number_of(f"{key[0]} {key[1].text}"))
        for key, usage in list(self._usages.items()):
            if (
                not usage.sessions
                and not any(row[0] or row[1] > now_ns for row in usage.ids.values())
                and not self._is_used(usage)
            ):
                del self._usages[key]

    def _is_used(self, usage: Usage) -> bool:
        return any(
            isinstance(session.quota, SessionQuotas)
            and session.quota.transactions is not None
            and session.quota.transactions[0] is usage
            for session in self._sessions.all()
        )

    # ---- description -----------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The rules, and what is used here of each quota."""
        now_ns = self._clock.now_ns
        usage: list[dict[str, Any]] = []
        for gate in list(self._gates.values())[:DESCRIBED_MAX]:
            usage.append(
                {
                    **_named(gate.key), "quota": gate.quota, "limit": gate.bucket.rate,
                    "used": gate.taken, "available": int(gate.bucket.balance(now_ns)),
                    "waiting": len(gate.waiting), "connections": gate.member_count,
                    "throttled_ms": gate.throttled_ns // 1_000_000,
                }
            )  # fmt: skip
        for (quota, key), used in list(self._usages.items())[:DESCRIBED_MAX]:
            count = len(used.sessions) if quota == "connections_max" else len(used.ids)
            if count:
                usage.append({**_named(key), "quota": quota, "used": count, "limit": used.limit})
        usage += self._prefixes.describe()
        return {"rules": self._texts, "usage": usage}


DESCRIBED_MAX = 1_000


def _named(key: Entity) -> dict[str, str]:
    return {name: value for name, value in key._asdict().items() if value is not None}


def _user(principal: Principal | None) -> str:
    """The user of a connection; ANONYMOUS where the appliance has no users."""
    return ANONYMOUS if principal is None else principal.user
