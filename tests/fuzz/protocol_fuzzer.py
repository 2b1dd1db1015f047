"""The loop of the protocol fuzzer: several connections play scripts against a real appliance while a witness works beside them.

What must hold, however clients behave: no process ends; none grows beyond its bound; every request of a known API on a live session is answered or its
connection closed; the witness's records are read exactly once, in order, and its acks come soon.
Owner: the appliance of the run, the witness's process, its sockets; all end with `run`.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tailrace import Admin, NewTopic
from tailrace.errors import TailraceError
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tailrace.protocol.errors import code_of
from tailrace.protocol.wire import Api, WireError, decode_response_header
from tests.fuzz import conversations
from tests.fuzz.conversations import World, make_world
from tests.fuzz.peer import Peer
from tests.fuzz.scripts import Message, Script, make_script
from tests.fuzz.watch import Finding, Watch

LINES = 10
WINDOW = 16
"""Requests that a connection has under way."""
PATIENCE_S = 45.0
"""The slowest answer there is: TIMED_OUT of the coordinator's, after 35 s."""
SLOW_S = 10.0
SULK_S = 2.0
SUSPECT_S = 4.0
CULPRIT_S = 60.0
LAST_MESSAGES = 8
"""Of each connection, in a report."""
UNSENT_MAX_BYTES = 4 << 20
ACK_P99_MAX_MS = 100.0
WITNESS_TOPIC = "witness"
SETTINGS: dict[str, Any] = {
    "ring_bytes": 4 << 20, "ring_descriptors": 4096, "lane_bytes": 1 << 20, "credit_bytes": 4 << 20, "slots": 512, "dedicated_workers": 1,
    "journal_bytes": 4 << 20, "checkpoint_bytes": 8 << 20,
}  # fmt: skip
"""Small rings and few partitions: what is full sooner is tested sooner."""
FATAL = ("process_ended", "process_hangs", "memory")
"""What ends a run: behind it nothing is learned."""


@dataclass(slots=True)
class Outcome:
    """What a run has seen."""

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
        memory = ", ".join(f"{name} {size / (1 << 20):.0f}" for name, size in sorted(self.peak_bytes.items()))
        codes = ", ".join(f"{name} {count}" for name, count in self.codes.most_common())
        rate = self.messages / max(self.seconds, 0.1)
        lines = [
            f"seed {self.seed}: {self.messages} messages of {self.scripts} scripts in {self.seconds:.1f} s ({rate:.0f}/s), {self.sessions} sessions",
            f"{self.closed} connections closed by the appliance, {self.slow} answers slower than {SLOW_S:.0f} s; answers: {codes}",
            f"private memory at its highest, MiB: {memory}",
            f"witness: {self.witness}",
        ]
        lines += [f"internal_error x{count}: {what}" for what, count in self.internal_errors.most_common()]
        lines += [f"FOUND {finding.kind}: {finding.detail}" for finding in self.findings]
        return "\n".join([*lines, *self.report])


class Line:
    """One client: plays script after script on a connection, and knows which answers have to come."""

    def __init__(self, address: str, outcome: Outcome, window: int = WINDOW, patience_s: float = PATIENCE_S) -> None:
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
        """Whether what was said on the connection is no beginning for messages."""
        self.pending: dict[int, tuple[float, Message]] = {}
        self.history: deque[Message] = deque(maxlen=LAST_MESSAGES)
        self.recent: deque[tuple[float, int]] = deque()
        """(when it began, its number) of the scripts of the last SUSPECT_S."""

    @property
    def is_idle(self) -> bool:
        """Whether the next script may come."""
        return not self._queue and not self._shaking_since_s

    @property
    def waits_for_nothing(self) -> bool:
        return self.is_idle and not self.pending

    def fileno(self) -> int:
        return -1 if self._peer is None or self._peer.is_closed else self._peer.socket.fileno()

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
            while self._queue and len(self.pending) < self._window and peer.unsent_bytes < UNSENT_MAX_BYTES:
                self._send(peer, self._queue.popleft(), now_s)
        return found + self._late(now_s)

    def _send(self, peer: Peer, message: Message, now_s: float) -> None:
        if self._is_live and message.api == Api.HANDSHAKE:
            self.pending.clear()  # a session of its own: the answers to the old one's requests find nobody
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
            self._outcome.codes["push" if header.correlation_id == 0 and not header.error else code_of(header.error).name] += 1
            if self._shaking_since_s and header.correlation_id == 1:
                self._shaking_since_s = 0.0
                self._is_live = header.error == 0
            sent_s, message = self.pending.pop(header.correlation_id, (now_s, None))
            self._outcome.slow += now_s - sent_s > SLOW_S
            if message is not None and message.api == Api.HANDSHAKE and header.error == 0:
                self._is_live = True
        return found

    def _late(self, now_s: float) -> list[Finding]:
        late = [key for key, (sent_s, _) in self.pending.items() if now_s - sent_s > self._patience_s]
        found = [Finding("unanswered", str(self.pending.pop(key)[1])) for key in late]
        if self._shaking_since_s and now_s - self._shaking_since_s > self._patience_s:
            self._shaking_since_s = 0.0
            found.append(Finding("unanswered", "a valid handshake on a new connection"))
        return found


class ProtocolFuzzer:
    """A run; see the module's docstring."""

    def __init__(self, seed: int, appliance: EmbeddedAppliance, world: World) -> None:
        self._seed = seed
        self._world = world
        self._appliance = appliance
        self.outcome = Outcome(seed)
        self.watch = Watch(appliance)

    def play(
        self,
        numbers: Iterator[int],
        until_s: float,
        *,
        lines: int = LINES,
        grace_s: float = 2 * PATIENCE_S,
        progress: Callable[[Outcome], None] | None = None,
    ) -> None:
        """Play scripts on several connections until they or the time are over, then wait for the answers that are under way, at most `grace_s`."""
        clients = [Line(self._appliance.address, self.outcome, WINDOW if lines > 1 else 1) for _ in range(lines)]
        begun_s = looked_s = time.monotonic()
        is_over = False
        try:
            while not is_over or not all(line.waits_for_nothing or line.fileno() < 0 for line in clients):
                now_s = time.monotonic()
                is_over = is_over or now_s >= until_s
                if now_s >= until_s + grace_s:
                    break
                for line in clients:
                    while line.is_idle and not is_over and len(line.pending) < WINDOW:
                        number = next(numbers, None)
                        if number is None:
                            is_over = True
                            break
                        line.play(make_script(self._seed, number, self._world), now_s)
                        self.outcome.scripts += 1
                        self.outcome.findings += line.advance(now_s)
                    self.outcome.findings += line.advance(now_s)
                if lines == 1 or now_s - looked_s > 0.25:
                    looked_s = now_s
                    self.outcome.findings += self.watch.look()
                    self.outcome.seconds = now_s - begun_s
                    if progress is not None:
                        progress(self.outcome)
                if any(finding.kind in FATAL for finding in self.outcome.findings):
                    self._report(clients)
                    return
                _await(clients)
        finally:
            self.outcome.seconds = time.monotonic() - begun_s
            for line in clients:
                line.close()

    def _report(self, clients: list[Line]) -> None:
        suspects: set[int] = set()
        for index, line in enumerate(clients):
            self.outcome.report.append(f"connection {index}, its last messages:")
            self.outcome.report += [f"  {message}" for message in line.history]
            suspects |= {number for _, number in line.recent} | {message.script for _, message in line.pending.values()}
        self.outcome.suspects = sorted(suspects)


def _await(clients: list[Line]) -> None:
    """Sleep until something may have come, or ten milliseconds."""
    poll = select.poll()
    for line in clients:
        if line.fileno() >= 0:
            poll.register(line.fileno(), select.POLLIN | (select.POLLOUT if line.wants_to_send() else 0))
    poll.poll(10)


def run(
    seed: int,
    seconds: float,
    *,
    scripts: range | None = None,
    lines: int = LINES,
    strict: bool = False,
    without: frozenset[int] = frozenset(),
    allow_internal_errors: bool = False,
    progress: Callable[[Outcome], None] | None = None,
    meanwhile: Callable[[EmbeddedAppliance], None] | None = None,
) -> Outcome:
    """One appliance, one seed. `scripts`: these and no more; `strict`: the witness's acks are timed; `meanwhile`: called once everything runs."""
    appliance = start_embedded(settings=SETTINGS, auto_create_topics=False)
    try:
        world = make_world(appliance.address, random.Random(seed), time.time_ns() // 1000)
        world.without = without
        with Admin(appliance.address) as admin:
            admin.create_topics([NewTopic(WITNESS_TOPIC)])
        fuzzer = ProtocolFuzzer(seed, appliance, world)
        outcome = fuzzer.outcome
        command = [sys.executable, "-P", "-m", "tests.fuzz.witness", appliance.address, WITNESS_TOPIC]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as witness:
            assert witness.stdin is not None
            assert witness.stdout is not None
            assert witness.stdout.readline() == b"ready\n"
            if meanwhile is not None:
                meanwhile(appliance)
            numbers = iter(scripts if scripts is not None else range(1 << 40))
            fuzzer.play(numbers, time.monotonic() + seconds, lines=lines, progress=progress)
            if any(finding.kind in FATAL for finding in outcome.findings):
                witness.kill()  # it may wait for minutes; what it would say is known
            else:
                witness.stdin.close()
                outcome.witness = json.loads(witness.stdout.read() or b"{}")
        _look_at_the_end(outcome, fuzzer, appliance, strict)
    finally:
        status = appliance.stop()
    if allow_internal_errors:
        outcome.findings = [finding for finding in outcome.findings if finding.kind != "internal_error"]
    if status != 0 and not outcome.findings:
        outcome.findings.append(Finding("stop", f"the appliance ended with status {status}"))
    return outcome


def _look_at_the_end(outcome: Outcome, fuzzer: ProtocolFuzzer, appliance: EmbeddedAppliance, strict: bool) -> None:
    """The witness's verdict, and what the appliance says of itself."""
    if outcome.witness:
        outcome.findings += [Finding("witness", failure) for failure in outcome.witness["failures"]]
        if strict and outcome.witness["p99_ms"] > ACK_P99_MAX_MS:
            outcome.findings.append(Finding("latency", f"the witness's ack p99 is {outcome.witness['p99_ms']:.1f} ms"))
    elif not any(finding.kind in FATAL for finding in outcome.findings):
        outcome.findings.append(Finding("witness", "it ended without a word"))
    outcome.findings += fuzzer.watch.look()
    counted = 0
    try:
        with Admin(appliance.address, request_timeout_ms=10_000) as admin:
            counted = sum(process["internal_errors"] for process in admin.describe_cluster()["processes"])
    except TailraceError as error:
        outcome.findings.append(Finding("answer", f"the cluster is not described any more: {error}"))
    outcome.internal_errors = fuzzer.watch.internal_errors
    if counted and not outcome.internal_errors:  # the log's lines are limited in number
        outcome.findings.append(Finding("internal_error", f"{counted} are counted, the log has none"))
    outcome.peak_bytes = fuzzer.watch.peak_bytes
    fuzzer.watch.close()


def find_culprit(outcome: Outcome, without: frozenset[int] = frozenset()) -> list[str]:
    """Play the scripts that were under way when a process ended, one after the other; what ends one alone, if that is found within a minute."""
    deadline_s = time.monotonic() + CULPRIT_S
    appliance = start_embedded(settings=SETTINGS, auto_create_topics=False)
    try:
        world = make_world(appliance.address, random.Random(outcome.seed), time.time_ns() // 1000)
        world.without = without
        fuzzer = ProtocolFuzzer(outcome.seed, appliance, world)
        for number in outcome.suspects:
            fuzzer.play(iter([number]), time.monotonic() + 0.3, lines=1, grace_s=0.0)
            if fuzzer.outcome.report or time.monotonic() > deadline_s:
                break
        fuzzer.watch.close()
    finally:
        appliance.stop()
    if not fuzzer.outcome.report:
        return [f"none of the {len(outcome.suspects)} scripts that were under way did it alone"]
    said = (finding.detail for finding in fuzzer.outcome.findings)
    return [f"alone, script {number} (or one just before it) ends it:", *fuzzer.outcome.report[1:], *said]


class _Progress:
    """A line each few seconds, for people."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, outcome: Outcome) -> None:
        if time.monotonic() - self._said_s < 5 or not sys.stderr.isatty():
            return
        self._said_s = time.monotonic()
        rate = outcome.messages / max(outcome.seconds, 0.1)
        print(
            f"{outcome.seconds:.0f} s: {outcome.messages} messages ({rate:.0f}/s), {outcome.sessions} sessions, {len(outcome.findings)} findings",
            file=sys.stderr,
        )


def main(arguments: list[str]) -> int:
    """`SECONDS [SEED]`; exit status 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -P -m tests.fuzz protocol")
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=None)
    parser.add_argument("--scripts", default="", metavar="FIRST:LAST", help="only these, one after the other")
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"the witness's ack p99 must stay below {ACK_P99_MAX_MS:.0f} ms: for a machine that does nothing else",
    )
    parser.add_argument("--allow-internal-errors", action="store_true", help="count the failures that a process survives, and go on")
    parser.add_argument("--without", default="", metavar="API,...", help="leave these alone: what is known of them would hide the rest")
    given = parser.parse_args(arguments)
    without = frozenset(int(Api[name]) for name in given.without.split(",") if name)
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}, {given.seconds:g} s", flush=True)
    scripts, lines = None, LINES
    if given.scripts:
        first, _, last = given.scripts.partition(":")
        scripts, lines = range(int(first), int(last or first) + 1), 1
    outcome = run(
        seed,
        given.seconds,
        scripts=scripts,
        lines=lines,
        strict=given.strict,
        without=without,
        allow_internal_errors=given.allow_internal_errors,
        progress=_Progress(),
    )
    print(outcome, flush=True)
    if outcome.suspects and not given.scripts:
        print(*find_culprit(outcome, without), sep="\n", flush=True)
    if not outcome.findings:
        return 0
    print(f"again: python -P -m tests.fuzz protocol {given.seconds:g} {seed}")
    return 1
