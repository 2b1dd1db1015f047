"""`log verify` and what waits: bucket files are proven like segments, and each flipped byte of them
is found.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from appliance.observe.checks.findings import Severity
from appliance.observe.checks.log_verifier import check
from tailrace.format.directory.data_dir import SWAP_FILE
from tailrace.format.directory.delay_files import KIND_ROWS, PENDING_FILE, BucketEntry, Manifest
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.schema import DEFAULT_SCHEMA, delay_schema, to_message
from tests.kit.log_files.half_swapped import half_swapped_log
from workers.delays.store.bucket_files import BucketFile
from workers.log.files.delay_manifest import save_manifest
from workers.segment.files import DiskFiles

TOPIC_ID = bytes(range(16))
TICK = 1_700_000_006_144


@pytest.fixture
def delay_log(tmp_path: pathlib.Path) -> pathlib.Path:
    """A delay log's directory with two rows in a bucket file."""
    directory = tmp_path / "later@delay-0"
    directory.mkdir()
    identity = PartitionMetadata(
        "later@delay", 0, TOPIC_ID, {1: to_message(delay_schema(DEFAULT_SCHEMA))}
    )
    (directory / PARTITION_FILE).write_bytes(identity.encode())
    file = BucketFile(DiskFiles(), str(directory), BucketEntry(2, TICK, 7, 0, 0, 0, 0))
    file.append(KIND_ROWS, np.array([TICK + 5, TICK]), np.array([40, 41]), b"an Arrow message")
    save_manifest(DiskFiles(), str(directory), Manifest(TOPIC_ID.hex(), 42, 1, 8, [file.entry]))
    return directory


def verify(directory: pathlib.Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "appliance.cli.main",
            "log",
            "verify",
            "--json",
            str(directory),
        ],
        capture_output=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_what_waits_is_proven_and_counted(delay_log: pathlib.Path) -> None:
    status, found = verify(delay_log)
    assert (status, found["pending_records"], found["findings"]) == (0, 2, [])


def test_damage_to_what_waits_is_found_and_said(delay_log: pathlib.Path) -> None:
    (bucket,) = delay_log.glob("*.pending")
    good = bucket.read_bytes()
    for damaged in (good[:-1], good[:70] + bytes([good[70] ^ 1]) + good[71:], b"\0" + good[1:]):
        bucket.write_bytes(damaged)
        status, found = verify(delay_log)
        (finding,) = found["findings"]
        assert (status, finding["severity"], finding["path"]) == (1, "damage", str(bucket))
        assert "up to 2 delayed records are lost" in finding["finding"]
    bucket.unlink()
    assert verify(delay_log)[0] == 1, "it is missing"
    bucket.with_name(bucket.name + ".damaged").write_bytes(good)
    (delay_log / PENDING_FILE).write_bytes(Manifest(TOPIC_ID.hex()).encode())
    status, found = verify(delay_log)
    assert (status, [finding["severity"] for finding in found["findings"]]) == (0, ["note"])
    (delay_log / PENDING_FILE).write_bytes(b"{}")
    status, found = verify(delay_log)
    assert status == 1
    assert any(
        "the pending records are unknown" in finding["finding"] for finding in found["findings"]
    )


def test_a_swap_that_a_kill_interrupted_is_no_damage(tmp_path: pathlib.Path) -> None:
    log = half_swapped_log(tmp_path, [4])
    findings = check([str(log.directory)]).findings
    notes = [found for found in findings if "a cleaned segment has taken the place" in found.text]
    assert [found.severity for found in notes] == [Severity.NOTE]
    assert not [found for found in findings if found.severity is Severity.DAMAGE], findings
    (log.directory / SWAP_FILE).write_bytes(b"{}")
    findings = check([str(log.directory)]).findings
    assert next(f.path for f in findings if f.severity is Severity.DAMAGE).endswith(SWAP_FILE)
