"""What the docstrings of each process's modules promise, held against that process between two of its steps."""

from __future__ import annotations

from appliance.coordinator import Coordinator
from netfront.front import Front
from shm.runtime.process import Agent
from tests.kit.coordinator_invariants import check_coordinator
from tests.kit.front_invariants import check_front
from workers.flusher import Flusher
from workers.invariants import check_flusher, check_worker
from workers.worker import Worker


def check_agent(agent: Agent, *, thoroughly: bool) -> None:
    """Every invariant that can be seen from outside a step; `thoroughly`: also those whose checks take long. Raises AssertionError."""
    if isinstance(agent, Front):
        check_front(agent)
    elif isinstance(agent, Coordinator):
        check_coordinator(agent)
    elif thoroughly and isinstance(agent, Flusher):
        check_flusher(agent)
    elif thoroughly and isinstance(agent, Worker):
        check_worker(agent)
