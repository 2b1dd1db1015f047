"""The sampler: takes samples while somebody watches, keeps their history, and makes the messages
that browsers get.

Owner: its thread writes the samples. Threads of requests read them under the lock.
Invariants:
- While no page is open there is no thread, and no request to a front.
- Samples take at most a twentieth of the time: the pause after one is at least 19 times as long as
  it took.
- The history is bounded: HISTORY_MAX points in all and for each group, GROUPS_MAX groups.
Crash: history begins again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from appliance.observe.console.sampling.latencies import Latencies, Percentiles
from appliance.observe.console.sampling.samples import NS_PER_S, GroupTotals, Sample, rates

logger = logging.getLogger("appliance.observe.http_server")

INTERVAL_NS = NS_PER_S
GROUPS_INTERVAL_NS = 5 * NS_PER_S
"""Time between two samples of the groups, whose lag takes a request each."""
SHARE = 19
IDLE_NS = 30 * NS_PER_S
"""Time without a reader after which the thread ends."""
HISTORY_MAX = 300
GROUPS_MAX = 200

_CLUSTER_FIELDS = ("cluster_id", "data_dirs", "offline", "offline_count", "paused")

TopicRow = tuple[int, int, int, int, int, float]
"""(partitions, records, bytes, segments, partitions that take no writes, records a second)."""
Take = Callable[[dict[str, GroupTotals] | None], Sample]


class Sampler:
    """Samples on demand. Safe in any thread."""

    def __init__(
        self,
        take: Take,
        close: Callable[[], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
        interval_ns: int = INTERVAL_NS,
    ) -> None:
        """`take` takes a sample, with the groups of the former one or anew. `close` ends what it
        asked with, when no page is open any more.
        """
        self._take = take
        self._close = close
        self._now_ns = now_ns
        self._interval_ns = interval_ns
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._read_at_ns = 0
        self._number = 0
        self._sample: Sample | None = None
        self._rates: dict[str, float] = {}
        self._throughput: deque[tuple[int, float, int]] = deque(maxlen=HISTORY_MAX)
        self._latencies = Latencies()
        self._percentiles: Percentiles = {}
        self._latency: deque[tuple[int, Percentiles]] = deque(maxlen=HISTORY_MAX)
        self._lags: dict[str, deque[tuple[int, int]]] = {}

    def state(self, timeout_s: float) -> dict[str, Any] | None:
        """The newest sample as the page takes it, with the history. None: there is none in time."""
        number = self.wait(0, timeout_s)
        with self._changed:
            if self._sample is None or not number:
                return None
            return {
                **self._message(self._sample),
                "topics": self._rows(self._sample),
                "number": number,
                "history": [list(point) for point in self._throughput],
                "latencies": [list(point) for point in self._latency],
                "lags": {name: [list(p) for p in points] for name, points in self._lags.items()},
            }

    def wait(self, after: int, timeout_s: float) -> int:
        """Wait for a sample with a number above `after`. Returns the newest number, or 0 if there
        is none in time.
        """
        deadline_ns = self._now_ns() + int(timeout_s * NS_PER_S)
        with self._changed:
            self._read_at_ns = self._now_ns()
            self._start()
            while self._number <= after or self._is_old():
                left_ns = deadline_ns - self._now_ns()
                if left_ns <= 0:
                    return 0
                self._changed.wait(left_ns / NS_PER_S)
            return self._number

    def tick(self, shown: dict[str, TopicRow]) -> dict[str, Any] | None:
        """The newest sample, with the rows of topics that differ from those that a page has
        shown. `shown` is updated.
        """
        with self._changed:
            sample = self._sample
            if sample is None:
                return None
            rows = self._rows(sample)
            message = self._message(sample)
        changed = {name: row for name, row in rows.items() if shown.get(name) != row}
        gone = [name for name in shown if name not in rows]
        shown.clear()
        shown.update(rows)
        return {**message, "topics": changed, "gone": gone}

    # ---- thread ----------------------------------------------------------------------------------

    def _is_old(self) -> bool:
        """True after a pause without an open page: the sample is a former run's."""
        return self._sample is None or self._now_ns() - self._sample.now_ns > IDLE_NS

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        groups_at_ns = 0
        try:
            while True:
                now_ns, begin_ns = self._now_ns(), time.monotonic_ns()
                is_due = now_ns >= groups_at_ns or self._sample is None
                kept = None if is_due or self._sample is None else dict(self._sample.groups)
                sample = self._take(kept)
                if is_due:
                    groups_at_ns = now_ns + GROUPS_INTERVAL_NS
                took_ns = time.monotonic_ns() - begin_ns
                with self._changed:
                    self._add(sample, is_due)
                    self._changed.notify_all()
                    self._changed.wait(max(self._interval_ns - took_ns, SHARE * took_ns) / NS_PER_S)
                    if self._now_ns() - self._read_at_ns > IDLE_NS:
                        self._thread = None
                        return
        except Exception:
            logger.exception("sampler_failed")
            with self._changed:
                self._thread = None
        finally:
            self._close()

    def _add(self, sample: Sample, with_groups: bool) -> None:
        self._rates = rates(self._sample, sample)
        self._sample = sample
        self._number += 1
        self._percentiles = self._latencies.add(sample.now_ns, sample.durations)
        self._latency.append((sample.time_ms, self._percentiles))
        size_bytes = sum(total.size_bytes for total in sample.topics.values())
        self._throughput.append((sample.time_ms, sum(self._rates.values()), size_bytes))
        if not with_groups or sample.error:
            return
        for name, group in sample.groups.items():
            if group.lag is not None and (name in self._lags or len(self._lags) < GROUPS_MAX):
                points = self._lags.setdefault(name, deque(maxlen=HISTORY_MAX))
                points.append((sample.time_ms, group.lag))
        for name in [name for name in self._lags if name not in sample.groups]:
            del self._lags[name]

    def _rows(self, sample: Sample) -> dict[str, TopicRow]:
        return {
            name: (
                total.partitions, total.records, total.size_bytes, total.segments, total.offline,
                round(self._rates.get(name, 0.0), 1),
            )
            for name, total in sample.topics.items()
        }  # fmt: skip

    def _message(self, sample: Sample) -> dict[str, Any]:
        return {
            "time_ms": sample.time_ms,
            "error": sample.error,
            "cluster": {key: sample.cluster.get(key) for key in _CLUSTER_FIELDS},
            "topic_count": len(sample.topics),
            "rate": round(sum(self._rates.values()), 1),
            "size_bytes": sum(total.size_bytes for total in sample.topics.values()),
            "latency": self._percentiles,
            "groups": {
                name: [group.kind, group.state, group.members, group.lag, group.dead_letters]
                for name, group in sample.groups.items()
            },
            "delays": sample.delays,
            "transactions": sample.transactions,
            "processes": sample.processes,
        }
