"""One client of the fuzzer, and what a run has seen.

Owner: its connection. A request that has to be answered is pending from when it is sent until its
    answer, or the connection's end.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from tailrace.core.error_codes import code_of
from tailrace.protocol.frame import Api, WireError, decode_response_header
from tests.fuzz.connections.watch import Finding
from tests.fuzz.requests import conversations
from tests.fuzz.requests.peer import Peer
from tests.fuzz.requests.scripts import Message, Script
from tests.fuzz.requests.world import World

WINDOW = 16
"""Requests that a connection has under way."""
PATIENCE_S = 45.0
"""The slowest answer there is: TIMED_OUT of the controller's, after 35 s."""
SLOW_S = 10.0
SULK_S = 2.0
SUSPECT_S = 4.0
LAST_MESSAGES = 8
"""Messages of each connection in a report."""
UNSENT_MAX_BYTES = 4 << 20


@dataclass(slots=True)
class Outcome:
    """Counts and findings of a run."""

    seed: int
    findings: list[Finding] = field(default_factory=list)
    report: list[str] = field(default_factory=list)
    """The last messages of each connection, at the first finding that ended the run."""
    suspects: list[int] = field(default_factory=list)
    """Scripts that were under way then."""
    scripts: int = 0
    messages: int = 0
    sessions: int = 0
    seconds: float = 0.0
    closed: int = 0
    """Connections that the appliance closed."""
    slow: int = 0
    """Answers that took more than SLOW_S."""
    codes: Counter[str] = field(default_factory=Counter)
    internal_errors: Counter[str] = field(default_factory=Counter)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    witness: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        memory = ", ".join(
            f"{name} {size / (1 << 20):.0f}" for name, size in sorted(self.peak_bytes.items())
        )
        codes = ", ".join(f"{name} {count}" for name, count in self.codes.most_common())
        rate = self.messages / max(self.seconds, 0.1)
        lines = [
            (
                f"seed {self.seed}: {self.messages} messages of {self.scripts} scripts in "
                f"{self.seconds:.1f} s ({rate:.0f}/s), {self.sessions} sessions"
            ),
            (
                f"{self.closed} connections closed by the appliance, {self.slow} answers slower than "  # noqa: E501
                f"{SLOW_S:.0f} s; answers: {codes}"
            ),
            f"private memory at its highest, MiB: {memory}",
            f"witness: {self.witness}",
        ]
        lines += [
            f"internal_error x{count}: {what}" for what, count in self.internal_errors.most_common()
        ]
        lines += [f"FOUND {finding.kind}: {finding.detail}" for finding in self.findings]
        return "\n".join([*lines, *self.report])


class Line:
    """One client: plays script after script on a connection, and knows which answers have to
    come.
    """

    def __init__(
        self, address: str, outcome: Outcome, window: int = WINDOW, patience_s: float = PATIENCE_S
    ) -> None:
        self._address = address
        self._patience_s = patience_s
        self._outcome = outcome
        self._window = window
        self._peer: Peer | None = None
        self._queue: deque[Message] = deque()
        self._is_live = False
        self._shaking_since_s = 0.0
        self._sulks_until_s = 0.0
        self._is_spoilt = False
        """True if the bytes on the connection are no beginning for messages."""
        self.pending: dict[int, tuple[float, Message]] = {}
        self.history: deque[Message] = deque(maxlen=LAST_MESSAGES)
        self.recent: deque[tuple[float, int]] = deque()
        """(when it began, its number) of the scripts of the last SUSPECT_S."""

    @property
    def is_idle(self) -> bool:
        """True if the next script may come."""
        return not self._queue and not self._shaking_since_s

    @property
    def waits_for_nothing(self) -> bool:
        return self.is_idle and not self.pending

    def fileno(self) -> int:
        return -1 if self._peer is None or self._peer.is_closed else self._peer.socket.fileno()

    @property
    def is_sulking(self) -> bool:
        return time.monotonic() < self._sulks_until_s

    def wants_to_send(self) -> bool:
        return self._peer is not None and self._peer.wants_to_send

    def play(self, script: Script, now_s: float) -> None:
        self.recent.append((now_s, script.number))
        while self.recent[0][0] < now_s - SUSPECT_S:
            self.recent.popleft()
        if script.opens or self._is_spoilt or self._peer is None or self._peer.is_closed:
            self._open(script, now_s)
        if script.sulks:
            self._sulks_until_s = now_s + SULK_S
        if self._peer is not None:
            self._queue.extend(script.messages)

    def _open(self, script: Script, now_s: float) -> None:
        self.close()
        self._outcome.sessions += 1
        self._is_live = False
        self._is_spoilt = bool(script.garbage)
        try:
            self._peer = Peer(self._address, greet=script.greets)
        except OSError:  # a front that is restarted: seen elsewhere
            self._peer = None
            return
        if script.garbage:
            self._peer.send_bytes(script.garbage)
        elif script.shakes:
            request = conversations.handshake(random.Random(0), World(0))
            request.correlation_id = 1
            self._peer.send([request.header(), *request.body])
            self._shaking_since_s = now_s

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer = None
        self.pending.clear()
        self._queue.clear()
        self._shaking_since_s = 0.0

    def advance(self, now_s: float) -> list[Finding]:
        """Read, send, and look whether answers are late."""
        peer = self._peer
        if peer is None or now_s < self._sulks_until_s:
            return []
        found = self._read(peer, now_s)
        if peer.is_closed:
            self._outcome.closed += 1
            self.close()
            return found
        peer.flush()
        if not self._shaking_since_s:
            while (
                self._queue
                and len(self.pending) < self._window
                and peer.unsent_bytes < UNSENT_MAX_BYTES
            ):
                self._send(peer, self._queue.popleft(), now_s)
        return found + self._late(now_s)

    def _send(self, peer: Peer, message: Message, now_s: float) -> None:
        if self._is_live and message.api == Api.HANDSHAKE:
            # a session of its own: the answers to the old one's requests find nobody
            self.pending.clear()
        if message.correlation_id and (self._is_live or message.api == Api.HANDSHAKE):
            self.pending[message.correlation_id] = now_s, message
        self.history.append(message)
        self._outcome.messages += 1
        peer.send(message.frames)

    def _read(self, peer: Peer, now_s: float) -> list[Finding]:
        found = []
        for frames in peer.receive():
            try:
                header = decode_response_header(frames[0])
            except WireError as error:
                found.append(Finding("answer", f"an answer that is none: {error.detail}"))
                continue
            self._outcome.codes[
                "push"
                if header.correlation_id == 0 and not header.error
                else code_of(header.error).name
            ] += 1
            is_first = bool(self._shaking_since_s) and header.correlation_id == 1
            if is_first:
                self._shaking_since_s = 0.0
                self._is_live = header.error == 0
            sent_s, _ = self.pending.pop(header.correlation_id, (now_s, None))
            self._outcome.slow += now_s - sent_s > SLOW_S
            if header.api == Api.HANDSHAKE and header.error == 0:
                self._is_live = True
                # whatever it was meant to be, it was taken for one: the old session's answers find
                # nobody
                if not is_first:
                    self.pending.clear()
        return found

    def _late(self, now_s: float) -> list[Finding]:
        late = [
            key for key, (sent_s, _) in self.pending.items() if now_s - sent_s > self._patience_s
        ]
        found = [Finding("unanswered", str(self.pending.pop(key)[1])) for key in late]
        if self._shaking_since_s and now_s - self._shaking_since_s > self._patience_s:
            self._shaking_since_s = 0.0
            found.append(Finding("unanswered", "a valid handshake on a new connection"))
        return found
