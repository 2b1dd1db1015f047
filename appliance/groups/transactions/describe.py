"""Answers to LIST_TRANSACTIONS and DESCRIBE_TRANSACTION.

Owner: the coordinator; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from appliance.groups.base.request_validation import flag_in
from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.store.transaction_rows import TransactionRows
from appliance.groups.transactions.branches.pool import pool_of
from appliance.groups.transactions.counters import Counters
from appliance.groups.transactions.decisions.decision_log import DecisionLog
from appliance.groups.transactions.decisions.hanging import HangingTransactions
from appliance.groups.transactions.decisions.workers import Workers
from appliance.groups.transactions.ids.ends import decoded
from appliance.groups.transactions.ids.id_table import Entry, IdTable
from appliance.groups.transactions.requests.fields import next_in, states_in
from appliance.groups.transactions.requests.prepared import described
from shm.messages.transaction_messages import Outcome

PAGE = 1_000
STAGED_PAGE = 64
"""Ids of a page with their staged texts, which may be long."""
ONGOING, COMMITTING, ABORTING, EMPTY = "ongoing", "committing", "aborting", "empty"
PREPARED = "prepared"


class Describer:
    """See the module's docstring."""

    def __init__(
        self,
        table: IdTable,
        log: DecisionLog,
        rows: TransactionRows,
        workers: Workers,
        hanging: HangingTransactions,
        counters: Counters,
        answer_max: int,
    ) -> None:
        self._table = table
        self._log = log
        self._rows = rows
        self._workers = workers
        self._hanging = hanging
        self._counters = counters
        self._answer_max = answer_max

    def state(self, entry: Entry) -> str:
        """The state of an id, by the words of the protocol."""
        if entry.row.prepared:
            return PREPARED
        if entry.opened_ns is not None:
            return ONGOING
        if entry.unsettled_count or entry.staged_count:
            ends = decoded(entry.row.ended)
            if ends:
                return COMMITTING if ends[0].outcome == Outcome.COMMIT else ABORTING
        return EMPTY

    def describe(self, entry: Entry, now_ns: int) -> bytes:
        """The body of the answer about one id."""
        ends = decoded(entry.row.ended)
        last = None
        if ends:
            end = ends[0]
            last = {
                "outcome": end.name, "by": end.by, "wall_ms": end.wall_ms, "owner": end.owner,
                "producer_id": end.producer_id, "producer_epoch": end.epoch,
            }  # fmt: skip
        return orjson.dumps(
            {
                **self._row(entry.row, entry, now_ns),
                "owned_ms": entry.row.owned_ms,
                "prepared": described(entry.row),
                "metadata": entry.row.metadata,
                "staged": entry.row.staged,
                "branches": [list(branch) for branch in pool_of(entry.row).registered],
                "last": last,
                "workers_pending": self.workers_pending(entry),
            }
        )

    def _row(self, row: TransactionalIdRow, entry: Entry | None, now_ns: int) -> dict[str, Any]:
        opened_ns = None if entry is None else entry.opened_ns
        return {
            "transactional_id": row.transactional_id,
            "state": EMPTY if entry is None else self.state(entry),
            "producer_id": row.producer_id,
            "producer_epoch": row.epoch,
            "owner": row.owner,
            "client_id": row.client_id,
            "timeout_ms": row.timeout_ms,
            "open_ms": None if opened_ns is None else (now_ns - opened_ns) // 1_000_000,
        }

    def workers_pending(self, entry: Entry) -> list[str]:
        """Names of the workers that the id's decisions wait for."""
        number = entry.row.id_number
        names = {
            name
            for decided in self._log.unsettled.values()
            if decided.id_number == number
            for name in self._workers.pending_on(decided.ordinal)
        }
        return sorted(names)

    # ---- lists -----------------------------------------------------------------------------------

    def list_page(
        self, request: Mapping[str, Any], now_ns: int, settle: Callable[[], None]
    ) -> bytes:
        """A page of ids. `settle`: writes the rows of this step."""
        after, states = next_in(request), states_in(request)
        if flag_in(request, "hanging"):
            return orjson.dumps({"transactions": list(self._hanging_rows(now_ns)), "next": None})
        is_staged = bool(flag_in(request, "staged"))
        if is_staged:
            settle()
            rows = self._rows.staged_behind(after, STAGED_PAGE + 1)
        elif states is not None and EMPTY not in states:
            entries = [one for one in self._table if self.state(one) in states]
            entries.sort(key=lambda one: one.row.transactional_id)
            rows = [one.row for one in entries if one.row.transactional_id > after][: PAGE + 1]
        else:
            settle()
            rows = self._rows.ids_behind(after, PAGE + 1)
        listed: list[dict[str, Any]] = []
        page = STAGED_PAGE if is_staged else PAGE
        size = 4_096
        last, has_more = after, False
        for row in rows:
            shown = self._row(row, self._table.loaded(row.transactional_id), now_ns)
            if is_staged:
                shown["staged"] = row.staged
            size += len(orjson.dumps(shown)) + 1
            if len(listed) == page or (listed and size > self._answer_max):
                has_more = True
                break
            last = row.transactional_id
            if states is None or shown["state"] in states:
                listed.append(shown)
        answer: dict[str, Any] = {"transactions": listed, "next": last if has_more else None}
        if not after:
            answer["totals"] = self._totals(now_ns)
        return orjson.dumps(answer)

    def _totals(self, now_ns: int) -> dict[str, Any]:
        open_ns = [now_ns - one.opened_ns for one in self._table if one.opened_ns is not None]
        return {
            "ids": self._table.count,
            "open": len(open_ns),
            "oldest_ms": max(open_ns, default=0) // 1_000_000,
            "unsettled": len(self._log.unsettled),
            **self._counters.totals(),
        }

    def _hanging_rows(self, now_ns: int) -> Iterator[dict[str, Any]]:
        """Open transactions without an owner, and those that are older than their timeout."""
        for entry in self._table:
            if entry.row.prepared:
                continue  # it waits for its decision, as long as an operator lets it
            row = self._row(entry.row, entry, now_ns)
            if row["open_ms"] is not None and row["open_ms"] > entry.row.timeout_ms:
                yield {**row, "reason": "it is open for longer than its timeout", "workers": []}
        for (producer_id, epoch), found in self._hanging.listed(now_ns)[:PAGE]:
            yield {
                "transactional_id": None,
                "state": ONGOING,
                "producer_id": producer_id,
                "producer_epoch": epoch,
                "open_ms": (now_ns - found.since_ns) // 1_000_000,
                "reason": "no transactional id has this producer id and epoch",
                "workers": [f"worker-{one}" for one in sorted(found.workers)],
            }
