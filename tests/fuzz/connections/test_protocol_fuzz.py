"""A short run of the protocol fuzzer, the same messages each time; `make fuzz SECONDS=...` has long
ones.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import zmq

from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol.frame import Api, RequestHeader, decode_request_header, encode_response
from tests.fuzz.connections import watch
from tests.fuzz.connections.line import Line, Outcome
from tests.fuzz.connections.protocol_fuzzer import run
from tests.fuzz.requests.scripts import Message, Script
from tests.kit import seeds
from tests.kit.matrices import short
from tests.kit.processes import HANG_LIMIT_S, children, wait_until


@pytest.mark.slow_because("hundreds of connections with a witness beside them")
@pytest.mark.parametrize(
    ("seed", "scripts"),
    [*short([(14, 250), (14, 500)]), pytest.param(seeds.base(), 10_000, marks=pytest.mark.long)],
)
def test_bent_requests_of_every_api_end_no_process_and_disturb_no_other_client(
    seed: int, scripts: int
) -> None:
    outcome = run(seed, HANG_LIMIT_S, scripts=range(scripts))
    assert not outcome.findings, str(outcome)
    assert outcome.messages, str(outcome)
    assert outcome.witness["acknowledged"]
    assert outcome.peak_bytes["tr-groups-0"], "the process of groups was asked, and watched"


def test_the_fuzzer_sees_a_process_that_ends() -> None:
    def kill_the_worker(appliance: EmbeddedAppliance) -> None:
        os.kill(children(appliance)["tr-worker-0"], signal.SIGKILL)

    outcome = run(15, HANG_LIMIT_S, meanwhile=kill_the_worker)
    assert any(
        finding.kind == "process_ended" and "worker-0" in finding.detail
        for finding in outcome.findings
    ), str(outcome)
    assert outcome.report, "the last messages of each connection"


def test_the_fuzzer_sees_a_process_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MEMORY_MAX_BYTES", 1 << 20)
    outcome = run(16, HANG_LIMIT_S)
    assert any(
        finding.kind == "memory" and "its bound" in finding.detail for finding in outcome.findings
    ), str(outcome)


def test_the_fuzzer_sees_a_request_that_is_not_answered() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mute = context.socket(zmq.ROUTER)
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    outcome = Outcome(1)
    line = Line(f"tcp://127.0.0.1:{port}", outcome, patience_s=0.2)
    ping = Message(
        7, [RequestHeader(Api.PING, 1, 85, 0).to_bytes()], "", correlation_id=85, api=Api.PING
    )
    line.play(Script(7, [ping], opens=True), time.monotonic())
    try:

        def is_found() -> bool:
            outcome.findings += line.advance(time.monotonic())
            if mute.poll(0):
                identity, header, *_ = mute.recv_multipart()
                if decode_request_header(header).api == Api.HANDSHAKE:
                    mute.send_multipart(
                        [identity, *map(bytes, encode_response(Api.HANDSHAKE, 1, 1, 0, 0, 1))]
                    )
            return bool(outcome.findings)

        wait_until(is_found, "the ping is missed")
    finally:
        line.close()
        mute.close(0)
        context.term()
    assert [finding.kind for finding in outcome.findings] == ["unanswered"]
    assert "script 7 PING" in outcome.findings[0].detail
