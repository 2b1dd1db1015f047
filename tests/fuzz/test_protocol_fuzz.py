"""A short run of the protocol fuzzer, the same messages each time; `make fuzz SECONDS=...` has long ones."""

from __future__ import annotations

import os
import signal

from tailrace.private_appliance import EmbeddedAppliance
from tests.fuzz.protocol_fuzzer import run
from tests.kit.processes import children


def test_bent_requests_of_every_api_end_no_process_and_disturb_no_other_client() -> None:
    outcome = run(14, 40, scripts=range(3_000))
    assert not outcome.findings, str(outcome)
    assert outcome.messages > 2_000, str(outcome)
    assert outcome.witness["acknowledged"] > 100


def test_the_fuzzer_sees_a_process_that_ends() -> None:
    def kill_the_worker(appliance: EmbeddedAppliance) -> None:
        os.kill(children(appliance)["tr-worker-0"], signal.SIGKILL)

    outcome = run(15, 20, meanwhile=kill_the_worker)
    assert any(finding.kind == "process_ended" and "worker-0" in finding.detail for finding in outcome.findings), str(outcome)
    assert outcome.report, "the last messages of each connection"


def test_the_fuzzer_sees_a_process_that_answers_nothing() -> None:
    stopped: list[int] = []

    def stop_the_scheduler(appliance: EmbeddedAppliance) -> None:
        stopped.append(children(appliance)["tr-scheduler-0"])
        os.kill(stopped[0], signal.SIGSTOP)

    outcome = run(16, 3, scripts=range(40), meanwhile=stop_the_scheduler)
    assert outcome.codes["TIMED_OUT"], str(outcome)
