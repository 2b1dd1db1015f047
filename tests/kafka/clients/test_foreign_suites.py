"""The integration suite that kafka-python has of its own, unchanged, against a gateway."""

from __future__ import annotations

import pathlib
import shutil
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.kafka.clients.programs import Program, built

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow_because("it has 67 tests, which wait for groups and for time limits"),
]
NOT_HERE = {
    "acls": "the appliance of these tests has no users",
    "ssl": "it has no certificate",
    "test_transactional_producer_offsets": "it commits a leader epoch that it has made up, and "
    "expects it back (ADR 0066)",
}
"""Parts of the names of tests that cannot pass, and why."""
PASSED_MIN = 53


def test_kafka_pythons_own_suite(gateway: str, tmp_path: pathlib.Path) -> None:
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:",
             "-r", "requirements.txt"]  # fmt: skip
    unpack = ["sh", "-c", "tar xzf kafka_python-*.tar.gz --strip-components=1"]
    sources = built("suites", sys.executable, fetch, unpack, ["cp", "service.py", "test/"])
    shutil.copytree(f"{sources}/test", tmp_path / "test")
    (tmp_path / "test/__init__.py").touch()  # Python has a package of this name, too
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=results.xml",
        "test/integration",
    ]  # fmt: skip
    environment = {
        "KAFKA_URI": f"kafka://{gateway}", "KAFKA_VERSION": "4.3.0", "KAFKA_ROOT": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
    }  # fmt: skip
    with Program(command, tmp_path, environment) as program:
        program.process.wait()
        print(program.output[-20_000:])
    cases = list(ET.parse(tmp_path / "results.xml").iter("testcase"))
    failed = {
        case.attrib["name"]
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    assert {name for name in failed if not any(part in name for part in NOT_HERE)} == set()
    skipped = sum(case.find("skipped") is not None for case in cases)
    assert len(cases) - skipped - len(failed) >= PASSED_MIN
