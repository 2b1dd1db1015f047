"""Pause of a handler."""

from __future__ import annotations

from netfront.kafka.apis.call import Services
from netfront.kafka.exchange.waiter import Waiter


def pause(services: Services, duration_ns: int) -> Waiter:
    """A waiter that is completed after a time."""
    waiter = Waiter()
    services.timers.add(services.now_ns + duration_ns, waiter.complete)
    return waiter
