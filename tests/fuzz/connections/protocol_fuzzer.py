"""The loop of the protocol fuzzer: several connections play scripts against a real appliance while
a witness works beside them.

What must hold, however clients behave: no process ends; none grows beyond its bound; every request
of a known API on a live session is answered or its connection closed; the witness's records are
read exactly once, in order, and its acks come soon.
Owner: the appliance of the run, the witness's process, its sockets; all end with `run`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tailrace import Admin, NewTopic
from tailrace.core.errors import TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.protocol.frame import Api
from tests.fuzz.connections.line import PATIENCE_S, WINDOW, Line, Outcome
from tests.fuzz.connections.watch import Finding, Watch
from tests.fuzz.requests.conversations import make_world
from tests.fuzz.requests.scripts import make_script
from tests.fuzz.requests.world import World

LINES = 10
CULPRIT_S = 60.0
LOG_LINES = 200
"""Lines of the appliance's log in a report of findings."""
REPLAY_LINGER_S = 5.0
ACK_P99_MAX_MS = 100.0
WITNESS_TOPIC = "witness"
SETTINGS: dict[str, Any] = {
    "ring_bytes": 4 << 20, "ring_descriptors": 4096, "lane_bytes": 1 << 20, "credit_bytes": 4 << 20,
    "slots": 512, "dedicated_workers": 1,
    "journal_bytes": 4 << 20, "checkpoint_bytes": 8 << 20,
}  # fmt: skip
"""Small rings and few partitions: what is full sooner is tested sooner."""
FATAL = ("process_ended", "process_hangs", "memory")
"""Findings that end a run: behind them nothing is learned."""


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
        """Play scripts on several connections until they or the time are over, then wait for the
        answers that are under way, at most `grace_s`.
        """
        clients = [
            Line(self._appliance.address, self.outcome, WINDOW if lines > 1 else 1)
            for _ in range(lines)
        ]
        begun_s = looked_s = time.monotonic()
        is_over = False
        try:
            while not is_over or not all(
                line.waits_for_nothing or line.fileno() < 0 for line in clients
            ):
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

    def linger(self, seconds: float) -> None:
        """Watch for a while: an acknowledged request may end a process later."""
        until_s = time.monotonic() + seconds
        pause = threading.Event()
        while time.monotonic() < until_s and not self.outcome.findings:
            pause.wait(
                0.05
            )  # a watch, not a synchronisation: it ends with a finding, or when nothing has happened for `seconds`  # noqa: E501
            self.outcome.findings += self.watch.look()

    def _report(self, clients: list[Line]) -> None:
        suspects: set[int] = set()
        for index, line in enumerate(clients):
            self.outcome.report.append(f"connection {index}, its last messages:")
            self.outcome.report += [f"  {message}" for message in line.history]
            suspects |= {number for _, number in line.recent} | {
                message.script for _, message in line.pending.values()
            }
        self.outcome.suspects = sorted(suspects)


def _await(clients: list[Line]) -> None:
    """Sleep until something may have come, or ten milliseconds."""
    poll = select.poll()
    for line in clients:
        if line.fileno() >= 0 and not line.is_sulking:
            poll.register(
                line.fileno(), select.POLLIN | (select.POLLOUT if line.wants_to_send() else 0)
            )
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
    """One appliance, one seed. `scripts`: these and no more; `strict`: the witness's acks are
    timed; `meanwhile`: called once everything runs.
    """
    with tempfile.TemporaryDirectory(prefix="tailrace-fuzz-") as directory:
        data_dir = os.path.join(directory, "data")
        appliance = start_embedded(data_dir=data_dir, settings=SETTINGS, auto_create_topics=False)
        try:
            world = make_world(appliance.address, random.Random(seed), time.time_ns() // 1000)
            world.without = without
            fuzzer = ProtocolFuzzer(seed, appliance, world)
            outcome = fuzzer.outcome
            with contextlib.closing(fuzzer.watch):
                with _witness(appliance) as witness:
                    if meanwhile is not None:
                        meanwhile(appliance)
                    numbers = iter(scripts if scripts is not None else range(1 << 40))
                    fuzzer.play(numbers, time.monotonic() + seconds, lines=lines, progress=progress)
                    if lines == 1:
                        fuzzer.linger(REPLAY_LINGER_S)
                    if any(finding.kind in FATAL for finding in outcome.findings):
                        witness.kill()  # it may wait for minutes; what it would say is known
                    else:
                        outcome.witness = json.loads(witness.communicate()[0] or b"{}")
                _look_at_the_end(outcome, fuzzer, appliance, strict)
        finally:
            status = appliance.stop()
        if allow_internal_errors:
            outcome.findings = [
                finding for finding in outcome.findings if finding.kind != "internal_error"
            ]
        if status != 0 and not outcome.findings:
            outcome.findings.append(Finding("stop", f"the appliance ended with status {status}"))
        if outcome.findings:
            said = pathlib.Path(data_dir, "tailrace.log").read_text(errors="replace").splitlines()
            outcome.report += [line for line in said if "request_refused" not in line][-LOG_LINES:]
    return outcome


@contextlib.contextmanager
def _witness(appliance: EmbeddedAppliance) -> Iterator[subprocess.Popen[bytes]]:
    """A witness that is at work beside the block; killed when the block raises."""
    with Admin(appliance.address) as admin:
        # bent requests that change the defaults of topics take none of its records
        kept = {"retention.ms": -1, "retention.bytes": -1}
        admin.create_topics([NewTopic(WITNESS_TOPIC, configs=kept)])
    command = [
        sys.executable,
        "-P",
        "-m",
        "tests.fuzz.connections.witness",
        appliance.address,
        WITNESS_TOPIC,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as witness:
        try:
            assert witness.stdout is not None
            assert witness.stdout.readline() == b"ready\n"
            yield witness
        except BaseException:
            witness.kill()
            raise


def _look_at_the_end(
    outcome: Outcome, fuzzer: ProtocolFuzzer, appliance: EmbeddedAppliance, strict: bool
) -> None:
    """The witness's verdict, and what the appliance says of itself."""
    if outcome.witness:
        outcome.findings += [Finding("witness", failure) for failure in outcome.witness["failures"]]
        if strict and outcome.witness["p99_ms"] > ACK_P99_MAX_MS:
            outcome.findings.append(
                Finding("latency", f"the witness's ack p99 is {outcome.witness['p99_ms']:.1f} ms")
            )
    elif not any(finding.kind in FATAL for finding in outcome.findings):
        outcome.findings.append(Finding("witness", "it ended without a word"))
    outcome.findings += fuzzer.watch.look()
    counted = 0
    try:
        with Admin(appliance.address, request_timeout_ms=10_000) as admin:
            counted = sum(
                process["internal_errors"] for process in admin.describe_cluster()["processes"]
            )
    except TailraceError as error:
        outcome.findings.append(
            Finding("answer", f"the cluster is not described any more: {error}")
        )
    outcome.internal_errors = fuzzer.watch.internal_errors
    if counted and not outcome.internal_errors:  # the log's lines are limited in number
        outcome.findings.append(
            Finding("internal_error", f"{counted} are counted, the log has none")
        )
    outcome.peak_bytes = fuzzer.watch.peak_bytes


def find_culprit(outcome: Outcome, without: frozenset[int] = frozenset()) -> list[str]:
    """Play the scripts that were under way when a process ended, one after the other; what ends one
    alone, if that is found within a minute.
    """
    deadline_s = time.monotonic() + CULPRIT_S
    appliance = start_embedded(settings=SETTINGS, auto_create_topics=False)
    try:
        world = make_world(appliance.address, random.Random(outcome.seed), time.time_ns() // 1000)
        world.without = without
        fuzzer = ProtocolFuzzer(outcome.seed, appliance, world)
        with contextlib.closing(fuzzer.watch):
            for number in outcome.suspects:
                fuzzer.play(iter([number]), time.monotonic() + 0.3, lines=1, grace_s=0.0)
                if fuzzer.outcome.report or time.monotonic() > deadline_s:
                    break
    finally:
        appliance.stop()
    if not fuzzer.outcome.report:
        return [f"none of the {len(outcome.suspects)} scripts that were under way did it alone"]
    said = (finding.detail for finding in fuzzer.outcome.findings)
    return [
        (
            f"played one by one, the end comes at script {number}, or of what one before it left to "  # noqa: E501
            "be delivered:"
        ),
        *fuzzer.outcome.report[1:],
        *said,
    ]


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
            f"{outcome.seconds:.0f} s: {outcome.messages} messages ({rate:.0f}/s), "
            f"{outcome.sessions} sessions, {len(outcome.findings)} findings",
            file=sys.stderr,
        )


def main(arguments: list[str]) -> int:
    """`SECONDS [SEED]`; exit status 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -P -m tests.fuzz protocol")
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=None)
    parser.add_argument(
        "--scripts", default="", metavar="FIRST:LAST", help="only these, one after the other"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"the witness's ack p99 must stay below {ACK_P99_MAX_MS:.0f} ms: for a machine that "
        "does nothing else",
    )
    parser.add_argument(
        "--allow-internal-errors",
        action="store_true",
        help="count the failures that a process survives, and go on",
    )
    parser.add_argument(
        "--without",
        default="",
        metavar="API,...",
        help="leave these alone: what is known of them would hide the rest",
    )
    parser.add_argument(
        "--lines", type=int, default=LINES, help="connections; each sends as fast as it is answered"
    )
    given = parser.parse_args(arguments)
    without = frozenset(int(Api[name]) for name in given.without.split(",") if name)
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}, {given.seconds:g} s", flush=True)
    scripts, lines = None, given.lines
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
