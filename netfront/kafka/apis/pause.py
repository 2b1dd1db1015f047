"""Pause of a handler, which lets the loop serve others."""

from __future__ import annotations

from netfront.kafka.apis.call import Services
from netfront.kafka.exchange.waiter import Steps, Waiter

SLICE = 1_000
"""Entries of a request that are served at once without asking anybody."""


def pause(services: Services, duration_ns: int) -> Waiter:
    """A waiter that is completed after a time."""
    waiter = Waiter()
    services.timers.add(services.now_ns + duration_ns, waiter.complete)
    return waiter


def give_way(services: Services, number: int) -> Steps:
    """Let the loop serve others after each SLICE of the entries numbered from 0."""
    if number % SLICE == SLICE - 1:
        yield pause(services, 0)
