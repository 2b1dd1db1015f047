"""Requests about delayed records over a little world, stepped by hand."""

from __future__ import annotations

from typing import Any

import orjson

from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tests.kit.stepped.delays import LOG_ID, DelayWorld
from workers.delays.requests.changes import Requester
from workers.delays.requests.service import DelayRequests

SECOND, DAY = 1_000_000, 86_400_000_000
PLACE = (LOG_ID.hex(), 0)


class Asking:
    """Requests over a little world, stepped by hand."""

    def __init__(self, page_bytes: int = 1 << 18) -> None:
        self.world = DelayWorld(1)
        self.answers: list[tuple[Requester, ErrorCode, dict[str, Any]]] = []
        self.failures: list[Exception] = []
        self.opening: list[Assignment] = []
        self.requests = DelayRequests(
            {PLACE: self.world.partition}, lambda: self.opening, self.world.partition._send,
            lambda requester, code, value: self.answers.append((requester, code, value)),
            self._caught, lambda: self.world.wall_us, page_bytes,
        )  # fmt: skip

    def _caught(self, _: str, error: Exception) -> str:
        self.failures.append(error)
        return "id=1"

    def ask(self, api: int, request: Any, session: int = 1) -> None:
        payload = request if isinstance(request, bytes) else orjson.dumps(request)
        self.requests.serve(
            Requester(0, session, len(self.answers)), api, payload, self.world.now_ns
        )

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds * 10):
            self.world.now_ns += 100_000_000
            self.requests.serve_deferred(self.world.now_ns)
            self.requests.advance_changes(self.world.now_ns)
            self.world.settle()
            self.world.partition.step(self.world.now_ns, self.world.wall_us)

    def answered(self, api: int, request: Any) -> tuple[ErrorCode, dict[str, Any]]:
        before = len(self.answers)
        self.ask(api, request)
        self.pass_time(1)
        (found,) = self.answers[before:]
        return found[1:]
