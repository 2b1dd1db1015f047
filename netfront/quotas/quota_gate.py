"""Quota gates: where connections and requests of one entity wait until its rate allows more.

Owner: one front.

Invariants:
- What waits goes on in the order of arrival. What comes meanwhile waits behind it.
- A gate with something that waits has a timer.
"""

from __future__ import annotations

from collections import OrderedDict

from shm.quotas.quota_rules import Entity
from shm.quotas.token_bucket import TokenBucket
from shm.runtime.timing_wheel import Timer, TimingWheel


class GateClock:
    """Time of the loop step, which all gates of a front share."""

    __slots__ = ("is_used", "now_ns", "over", "wheel")

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.is_used = False
        """True if something was taken, or waits, since the shares of fronts were looked at."""
        self.over: list[tuple[QuotaGate, object, int]] = []
        """Waits that are over, and that nobody has been told of: (gate, item, length)."""
        self.wheel: TimingWheel[QuotaGate] = TimingWheel(now_ns)


class QuotaGate:
    """The gate of one quota of one entity (see `netfront.socket.flow_control.Gate`)."""

    __slots__ = (
        "_clock",
        "_is_resuming",
        "_timer",
        "bucket",
        "key",
        "member_count",
        "quota",
        "shared_rate",
        "shown_taken",
        "taken",
        "throttled_ns",
        "waiting",
        "was_limited",
    )

    def __init__(self, quota: str, key: Entity, rate: int, clock: GateClock) -> None:
        self.quota = quota
        self.key = key
        self.bucket = TokenBucket(rate, clock.now_ns)
        self.member_count = 0
        """Sessions that use it."""
        self.taken = 0
        """Amount in all."""
        self.shared_rate = rate
        """The rate of all fronts, of which this gate has a share."""
        self.shown_taken = 0
        """Amount in all when the other fronts were shown it."""
        self.was_limited = False
        """True if something has waited since then."""
        self.throttled_ns = 0
        """Waits in all."""
        self.waiting: OrderedDict[object, int] = OrderedDict()
        """Waiting items, each with the time since when."""
        self._clock = clock
        self._timer: Timer[QuotaGate] | None = None
        self._is_resuming = False

    def room(self, asked: int) -> int:
        if self.waiting and not self._is_resuming:
            return 0
        balance = int(self.bucket.balance(self._clock.now_ns))
        return max(asked, balance) if balance >= 1 else 0

    def take(self, amount: int) -> None:
        self.taken += amount
        self._clock.is_used = True
        self.bucket.take(amount, self._clock.now_ns)

    @property
    def now_ns(self) -> int:
        return self._clock.now_ns

    def note_wait(self, item: object, since_ns: int) -> None:
        waited_ns = self._clock.now_ns - since_ns
        self.was_limited = self._clock.is_used = True
        if waited_ns > 0:
            self.throttled_ns += waited_ns
            self._clock.over.append((self, item, waited_ns))

    def wait(self, item: object, since_ns: int = 0) -> None:
        if item in self.waiting:
            return
        self.was_limited = self._clock.is_used = True
        self.waiting[item] = since_ns or self._clock.now_ns
        if self._timer is None:
            self._timer = self._clock.wheel.add(self.bucket.ready_ns(self._clock.now_ns), self)

    def forget(self, item: object) -> bool:
        since_ns = self.waiting.pop(item, None)
        if since_ns is None:
            return False
        self.throttled_ns += self._clock.now_ns - since_ns
        if not self.waiting and self._timer is not None:
            self._clock.wheel.cancel(self._timer)
            self._timer = None
        return True

    # ---- resuming --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to resume, after its timer."""
        self._timer = None
        self._is_resuming = True

    def next_item(self) -> tuple[object, int] | None:
        """(First item that waits, how long it has waited), which waits no more; None: the gate is
        closed again, or nothing waits.
        """
        if not self.waiting or self.bucket.balance(self._clock.now_ns) < 1:
            return None
        item, since_ns = self.waiting.popitem(last=False)
        waited_ns = self._clock.now_ns - since_ns
        self.throttled_ns += waited_ns
        return item, waited_ns

    def end(self) -> None:
        """End resuming. If something waits still, the timer is set again."""
        self._is_resuming = False
        if self.waiting and self._timer is None:
            self._timer = self._clock.wheel.add(self.bucket.ready_ns(self._clock.now_ns), self)

    def open_now(self) -> None:
        """Let everything go on at the next step: the rate has changed."""
        if self._timer is not None:
            self._clock.wheel.cancel(self._timer)
            self._timer = self._clock.wheel.add(self._clock.now_ns, self)
