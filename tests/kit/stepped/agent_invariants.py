"""Invariants of each process's modules, as their docstrings state them, held against that process
between two of its steps.
"""

from __future__ import annotations

from appliance.control.controller_agent import Controller
from netfront.agent.front_agent import Front
from shm.runtime.agent_runner import Agent
from tests.kit.stepped.controller_invariants import check_controller
from tests.kit.stepped.front_invariants import check_front
from workers.append.worker import Worker
from workers.flush.flusher_agent import Flusher
from workers.flush.invariants import check_flusher, check_worker


def check_agent(agent: Agent, *, thoroughly: bool) -> None:
    """Every invariant that can be seen from outside a step; `thoroughly`: also those whose checks
    take long. Raises AssertionError.
    """
    if isinstance(agent, Front):
        check_front(agent)
    elif isinstance(agent, Controller):
        check_controller(agent)
    elif thoroughly and isinstance(agent, Flusher):
        check_flusher(agent)
    elif thoroughly and isinstance(agent, Worker):
        check_worker(agent)
