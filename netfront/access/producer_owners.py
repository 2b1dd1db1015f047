"""Owners of transactional producer ids: whose transactions a principal may write in.

A batch names a producer id, and the process of groups knows the transactional id and the user that
it belongs to. A front asks once for each producer id. Until the answer a batch is refused with
CONCURRENT_TRANSACTIONS, which clients repeat after milliseconds. A front that passes a producer id
on to its client asks at once, so that its first batch finds the answer.

Owner: one front.
Invariants:
- A producer id belongs to one user for ever: what is known stays right.
- Known owners <= KNOWN_MAX; producer ids that are asked for <= ASKED_MAX; unknown ones are
  forgotten after UNKNOWN_NS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import orjson

from shm.messages.lane_messages import PRODUCER_OWNERS
from shm.rights.acl import TRANSACTIONAL_ID, WRITE
from shm.rights.authorizer import Principal
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS
from tailrace.protocol.frame import WireError

KNOWN_MAX = 100_000
ASKED_MAX = 1_000
WAITING_MAX = 1_000
UNKNOWN_NS = 1_000_000_000
Ask = Callable[[int, bytes, Callable[[ErrorCode, bytes], None]], None]


class ProducerOwner(NamedTuple):
    """The owner of a producer id."""

    transactional_id: str
    user: str


class ProducerOwners:
    """See the module's docstring."""

    def __init__(self, ask: Ask) -> None:
        """`ask`: a request of the front's own to another process."""
        self._ask = ask
        self._known: dict[int, ProducerOwner] = {}
        self._unknown: dict[int, int] = {}
        """Producer ids that nobody has, with the time until which that is believed."""
        self._asked: set[int] = set()
        """Producer ids whose owner is asked for, or will be with the next request."""
        self._is_asking = False
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        """Requests that wait for an owner, by producer id."""
        self._waiting_count = 0
        self.now_ns = 0
        """Time of this loop step. The front sets it."""

    # ---- decisions -------------------------------------------------------------------------------

    def refusal(self, principal: Principal, producer_id: int) -> ErrorCode:
        """The code for a batch of this producer id. OK: it may be appended."""
        if producer_id < TRANSACTIONAL_PRODUCER_IDS or principal.is_admin:
            return ErrorCode.OK
        owner = self._known.get(producer_id)
        if owner is not None:
            is_allowed = owner.user == principal.user and principal.may(
                WRITE, TRANSACTIONAL_ID, owner.transactional_id
            )
            return ErrorCode.OK if is_allowed else ErrorCode.NOT_AUTHORIZED
        if not principal.may_any(WRITE, TRANSACTIONAL_ID):
            return ErrorCode.NOT_AUTHORIZED
        if self._unknown.get(producer_id, 0) > self.now_ns:
            return ErrorCode.PRODUCER_FENCED
        self.learn((producer_id,))
        return ErrorCode.CONCURRENT_TRANSACTIONS

    def check(
        self, principal: Principal, request: dict[str, Any], repeat: Callable[[], None]
    ) -> bool:
        """True if a request may go on that names a transaction by its producer id, or none. False:
        `repeat` is called once the owner is known. Raises WireError.
        """
        transaction = request.get("transaction")
        producer_id = transaction.get("producer_id") if isinstance(transaction, dict) else None
        if type(producer_id) is not int:
            return True  # none, or one that the scheduler refuses
        code = self.refusal(principal, producer_id)
        if code is ErrorCode.OK:
            return True
        if code is not ErrorCode.CONCURRENT_TRANSACTIONS:
            raise WireError(code, ERROR_TABLE[code].meaning)
        if producer_id not in self._asked or self._waiting_count >= WAITING_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                "the owners of too many transactions are looked up now. Retry shortly",
            )
        self._waiting.setdefault(producer_id, []).append(repeat)
        self._waiting_count += 1
        return False

    # ---- look-ups --------------------------------------------------------------------------------

    def passed_on(self, body: bytes) -> None:
        """Ask for the owner of a producer id that a client has just been given."""
        producer_id = orjson.loads(body).get("producer_id")
        if type(producer_id) is int and producer_id not in self._known:
            self.learn((producer_id,))

    def learn(self, producer_ids: Iterable[int]) -> None:
        """Ask for the owners of producer ids, as far as there is room."""
        for producer_id in producer_ids:
            if len(self._asked) < ASKED_MAX:
                self._asked.add(producer_id)
        if not self._is_asking and self._asked:
            self._is_asking = True
            asked = list(self._asked)
            self._ask(
                PRODUCER_OWNERS,
                orjson.dumps({"producer_ids": asked}),
                lambda code, body: self._learned(asked, code, body),
            )

    def _learned(self, asked: list[int], code: ErrorCode, body: bytes) -> None:
        """Take an answer. It must not raise."""
        self._is_asking = False
        self._asked.difference_update(asked)
        if code is ErrorCode.OK:
            found = {
                number: ProducerOwner(name, user)
                for number, name, user in orjson.loads(body)["owners"]
            }
            if len(self._known) + len(found) > KNOWN_MAX:
                self._known.clear()
            self._known |= found
            if len(self._unknown) + len(asked) > KNOWN_MAX:
                self._unknown.clear()
            for number in asked:
                self._unknown.pop(number, None)
                if number not in found:
                    self._unknown[number] = self.now_ns + UNKNOWN_NS
        for number in asked:
            waiting = self._waiting.pop(number, ())
            self._waiting_count -= len(waiting)
            for repeat in waiting:
                repeat()
        self.learn(())
