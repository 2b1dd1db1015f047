"""A front in memory with a coordinator of transactions: what it decides, and what readers of
committed records would see. It does to each request what a test says.

Owner: one test.
Invariants:
- A batch is taken under the registered epoch only. It is in `committed` once its epoch is.
- A decision is made once for each epoch. A repeated END is answered as the first.
- Each attempt to join has a branch of its own. A decision has an outcome for each branch.
- A prepared transaction takes no batches, and ends by a decision alone.
- A batch of an unregistered id is refused as fenced, until its owner has asked.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Self

import orjson

from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS, BatchHeader
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import Api, decode_request_header
from tests.conformance.logging_front import LoggingFront
from tests.kit.peers.scripted_front import _Socket

FIRST_ID = TRANSACTIONAL_PRODUCER_IDS + (3 << 32)
EPOCH_MAX = 32_767
IDLE_MS = 1_800_000
BRANCH_ID = FIRST_ID + (1 << 20)
"""Producer id of the first branch."""
_APIS = (
    Api.INIT_TRANSACTIONS, Api.END_TRANSACTION, Api.DESCRIBE_TRANSACTION, Api.CREATE_BRANCHES,
    Api.JOIN_TRANSACTION,
)  # fmt: skip


class Refused(Exception):
    """The request has this answer."""

    def __init__(self, code: ErrorCode, message: str, **body: Any) -> None:
        super().__init__(code, message)
        self.code = code
        self.body = {"message": message, **body}


class Decision(NamedTuple):
    """Decision about an epoch."""

    outcome: str
    by: str
    producer_id: int
    epoch: int
    offsets: tuple[Any, ...] = ()
    branches: tuple[tuple[int, int], ...] = ()
    """Those that have its outcome."""


LOST_BEFORE, LOST_AFTER, SILENT = "lost before", "lost after", "silent"
"""Fates of a request beside an error code: the connection is lost before or after it was carried
out; it is carried out without an answer.
"""


class TransactionFront(LoggingFront):
    """See the module's docstring. `plan[api]`: what becomes of the next requests, one by one: None
    is as it should be.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.plan: dict[Api, deque[Any]] = {api: deque() for api in (*_APIS, Api.PRODUCE)}
        self.requests: list[tuple[Api, dict[str, Any]]] = []
        self.owner = 0
        self.attempt = ""
        self.producer_id, self.registered = FIRST_ID, -1
        self.epoch_max = EPOCH_MAX
        self.decisions: list[Decision] = []
        self.is_forgotten = True
        self.idle_ms = IDLE_MS
        self.is_unregistered = False
        """The workers have forgotten the id."""
        self.headers: list[BatchHeader] = []
        """Header of each batch that came."""
        self.attempts: dict[str, tuple[int, int]] = {}
        """Attempt -> the (producer id, epoch) of its branch, in the current transaction."""
        self.branch_count = 0
        """The last count of CREATE_BRANCHES."""
        self.prepared: dict[str, Any] | None = None
        """The request that has prepared the current transaction."""
        self.is_topic_gone = False
        """METADATA does not know the topic."""
        self.is_late = False
        """Answers wait until `deliver`."""
        self._late: list[list[bytes]] = []
        self.is_in_the_way = False
        """True while another transaction keeps every commit from being decided."""
        self._taken: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        """(producer id, epoch) -> (partition, value) of its records."""

    def known(self, *, owner: int = 0, registered: int = 0) -> Self:
        """The id is known already: another producer has registered it."""
        self.is_forgotten = False
        self.owner, self.registered = owner, registered
        return self

    def write(self, producer_id: int, epoch: int, *values: bytes) -> None:
        """Batches of another process are in the log."""
        self._taken[producer_id, epoch] = [(0, value) for value in values]

    # ---- what a test sees ------------------------------------------------------------------------

    def committed(self, partition: int | None = None) -> list[bytes]:
        """The values that a reader of committed records sees."""
        return [
            value
            for one in self.decisions
            if one.outcome == "commit"
            for key in ((one.producer_id, one.epoch), *one.branches)
            for where, value in self._taken.get(key, [])
            if partition in (None, where)
        ]

    def aborted(self) -> list[bytes]:
        """The values that no reader of committed records will see."""
        return [
            value
            for one in self.decisions
            if one.outcome == "abort"
            for _, value in self._taken.get((one.producer_id, one.epoch), [])
        ]

    @property
    def offsets(self) -> list[Any]:
        """The offsets of all commits."""
        return [group for one in self.decisions for group in one.offsets]

    def count(self, api: Api) -> int:
        """Count the requests of this kind that came."""
        return sum(asked is api for asked, _ in self.requests)

    def connect(self) -> _Socket:
        self._late.clear()
        return super().connect()

    def _reply(self, api: int, version: int, correlation_id: int, code: int, body: bytes) -> None:
        super()._reply(api, version, correlation_id, code, body)
        if self.is_late:
            self._late.append(self._answers.pop())

    def _described(self) -> dict[str, Any]:
        if self.is_topic_gone:
            return {"name": "t", "code": int(ErrorCode.UNKNOWN_TOPIC), "message": "it is gone"}
        return super()._described()

    def deliver(self) -> None:
        """Answers that were late come now."""
        self._answers.extend(self._late)
        self._late.clear()

    # ---- what others do --------------------------------------------------------------------------

    def abort_by(self, by: str) -> None:
        """The appliance aborts what is open."""
        self._decide("abort", by)

    def commit_by(self, by: str) -> None:
        """An operator commits what is prepared."""
        assert self.prepared is not None
        self._decide("commit", by)

    def take_over(self) -> None:
        """Another producer becomes the owner of the id."""
        self._decide("abort", "init")
        self.owner += 1
        self.attempt = "another"

    def unregister(self) -> None:
        """The id was idle for long."""
        self._decide("abort", "idleness")
        self.is_unregistered = True

    # ---- the coordinator -------------------------------------------------------------------------

    def _decide(self, outcome: str, by: str, offsets: Any = (), branches: Any = ()) -> None:
        named = tuple((producer_id, epoch) for producer_id, epoch in branches)
        self.decisions.append(
            Decision(outcome, by, self.producer_id, self.registered, tuple(offsets), named)
        )
        self.attempts, self.branch_count, self.prepared = {}, 0, None
        self.registered += 1
        if self.registered > self.epoch_max:
            self.producer_id, self.registered = self.producer_id + 1, 0

    def _following(self) -> dict[str, int]:
        return {"producer_id": self.producer_id, "producer_epoch": self.registered}

    def _initialize(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request["transactional_id"]
        assert request["timeout_ms"] > 0
        if self.prepared is not None and not request.get("keep_prepared"):
            raise Refused(ErrorCode.INVALID_TRANSACTION, "it has a prepared transaction")
        if self.is_forgotten or request["attempt"] != self.attempt:
            if self.prepared is None:
                self.take_over()
            else:
                self.owner += 1
            self.attempt = request["attempt"]
        self.is_forgotten = self.is_unregistered = False
        prepared = None
        if self.prepared is not None:
            prepared = {**self._following(), "tag": self.prepared["tag"], "wall_ms": 0}
        return {
            **self._following(), "owner": self.owner, "prepared": prepared, "idle_ms": self.idle_ms,
        }  # fmt: skip

    def _create_branches(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_current(request)
        self.branch_count = request["count"]
        return {"count": self.branch_count}

    def _join(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_current(request)
        new = (BRANCH_ID + len(self.attempts), self.registered)
        producer_id, epoch = self.attempts.setdefault(request["attempt"], new)
        return {"producer_id": producer_id, "producer_epoch": epoch}

    def _check_current(self, request: dict[str, Any]) -> None:
        self._check_owner(request)
        if (request["producer_id"], request["producer_epoch"]) != (
            self.producer_id,
            self.registered,
        ):
            raise Refused(ErrorCode.TRANSACTION_ABORTED, "the transaction of the branch has ended")

    def _decide_by_id(self, request: dict[str, Any]) -> dict[str, Any]:
        asked = request["producer_id"], request["producer_epoch"]
        for one in self.decisions:
            if asked == (one.producer_id, one.epoch):
                if one.outcome == request["outcome"]:
                    return {"outcome": one.outcome}
                raise Refused(ErrorCode.INVALID_TRANSACTION, f"it was {one.outcome}ed before")
        raise Refused(ErrorCode.INVALID_TRANSACTION, "it is not a prepared transaction")

    def _end(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("by_id"):
            return self._decide_by_id(request)
        self._check_owner(request)
        asked = request["producer_id"], request["producer_epoch"]
        last = self.decisions[-1]
        if asked == (last.producer_id, last.epoch):
            if last.by != "owner" and last.outcome == "abort":
                raise Refused(
                    ErrorCode.TRANSACTION_ABORTED, f"aborted by {last.by}", **self._following()
                )
            if (last.outcome, request["outcome"]) == ("commit", "abort"):
                raise Refused(
                    ErrorCode.INVALID_TRANSACTION,
                    "the transaction was committed before, it cannot be aborted",
                    outcome="commit",
                    **self._following(),
                )
            return {"outcome": last.outcome, **self._following()}
        if asked != (self.producer_id, self.registered):
            raise Refused(ErrorCode.INVALID_TRANSACTION, "this epoch is not the current one")
        outcome, prepared = request["outcome"], self.prepared
        if self.is_in_the_way and outcome == "commit":
            raise Refused(ErrorCode.CONCURRENT_TRANSACTIONS, "another one has the offset")
        if outcome == "prepare":
            assert prepared in (None, request), "a repeated request is the same"
            self.prepared = request
        else:
            assert prepared is None or not (request["offsets"] or request.get("branches"))
            content = prepared or request
            branches = content.get("branches", []) if outcome == "commit" else []
            assert all(tuple(one) in self.attempts.values() for one in branches)
            offsets = content["offsets"] if outcome == "commit" else []
            self._decide(outcome, "owner", offsets, branches)
        return {"outcome": outcome, **self._following()}

    def _check_owner(self, request: dict[str, Any]) -> None:
        if self.is_forgotten:
            raise Refused(ErrorCode.UNKNOWN_TRANSACTIONAL_ID, "there is no such id")
        if request["owner"] != self.owner:
            raise Refused(
                ErrorCode.PRODUCER_FENCED, "client other-1 has taken the id over since 12:00:01"
            )

    def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_owner(request)
        self.is_unregistered = False
        last = self.decisions[-1]
        return {
            **self._following(),
            "state": "ongoing",
            "owner": self.owner,
            "last": {"outcome": last.outcome, "by": last.by},
        }

    # ---- requests --------------------------------------------------------------------------------

    def _take(self, socket: _Socket, frames: list[bytes]) -> None:
        if socket is not self._socket or self.is_silent:
            return
        header = decode_request_header(frames[0])
        api = Api(header.api)
        planned = self.plan[api].popleft() if self.plan.get(api) else None
        if planned is LOST_BEFORE:
            self.restart()
            return
        if api not in _APIS:
            if api is Api.PRODUCE and isinstance(planned, ErrorCode):
                self._refusing = planned
            super()._take(socket, frames)
            self._refusing = None
            if planned is LOST_AFTER:
                self._answers.clear()
                self.restart()
            return
        request = orjson.loads(frames[1])
        self.requests.append((api, request))
        if isinstance(planned, ErrorCode):
            planned = Refused(planned, "refused as the test says")
        try:
            if isinstance(planned, Refused):
                raise planned
            handle = {
                Api.INIT_TRANSACTIONS: self._initialize,
                Api.END_TRANSACTION: self._end,
                Api.DESCRIBE_TRANSACTION: self._describe,
                Api.CREATE_BRANCHES: self._create_branches,
                Api.JOIN_TRANSACTION: self._join,
            }[api]
            code, body = ErrorCode.OK, handle(request)
        except Refused as refused:
            code, body = refused.code, refused.body
        if planned is LOST_AFTER:
            self.restart()
        elif planned is not SILENT:
            self._reply(api, 1, header.correlation_id, code, orjson.dumps(body))

    _refusing: ErrorCode | None = None

    def _append(
        self, partition: int, header: BatchHeader, data: memoryview
    ) -> produce_messages.ProducedEntry:
        self.headers.append(header)
        assert header.is_transactional
        assert header.producer_id >= TRANSACTIONAL_PRODUCER_IDS
        identity = header.producer_id, header.producer_epoch
        code = self._refusing
        is_known = (
            identity in ((self.producer_id, self.registered), *self.attempts.values())
            and not self.is_unregistered
            and self.prepared is None
        )
        if code is None and not is_known:
            code = ErrorCode.PRODUCER_FENCED
        if code is not None:
            return produce_messages.ProducedEntry(code, 0, 0, -1, 5)
        count = len(self.logs.get(partition, []))
        entry = super()._append(partition, header, data)
        taken = self._taken.setdefault(identity, [])
        taken += [(partition, value) for value in self.logs[partition][count:]]
        return entry
