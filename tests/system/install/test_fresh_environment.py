"""The wheel in a virtual environment that pip alone has filled: it starts, serves, and says if its
kernel is not compiled.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import venv

import pytest

from tests.kit.hosts.installed import ROOT, build_wheel
from tests.kit.processes import HANG_LIMIT_S, wait_until

pytestmark = pytest.mark.long  # a wheel is built, and pip fetches what it asks for
PIP_LIMIT_S = 1200


@pytest.mark.timeout(2 * PIP_LIMIT_S)
@pytest.mark.parametrize("kernel", ["compiled", "Python"])
def test_a_wheel_installs_starts_and_says_which_kernel_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    monkeypatch.setenv("TAILRACE_PURE", "0" if kernel == "compiled" else "1")
    wheel = build_wheel(ROOT, tmp_path)
    monkeypatch.delenv("TAILRACE_PURE")
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    programs = tmp_path / "venv/bin"
    done = subprocess.run(
        [programs / "python", "-m", "pip", "install", "--disable-pip-version-check", wheel],
        capture_output=True, text=True, check=False, timeout=PIP_LIMIT_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    log_path = tmp_path / "log"

    def run(*arguments: str, stdin: str = "") -> str:
        ran = subprocess.run(
            [programs / "tailrace", *arguments, "--bootstrap", address()], cwd=tmp_path,
            env=environment, input=stdin, capture_output=True, text=True, check=False,
            timeout=HANG_LIMIT_S,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def address() -> str:
        found = re.search(r"ready address=(\S+)", log_path.read_text())
        return found[1] if found else ""

    with log_path.open("wb") as log:
        served = subprocess.Popen(
            [programs / "tailrace", "serve", "--data-dir", tmp_path / "data",
             "--listen", "tcp://127.0.0.1:0", "--set", "http.listen="],
            cwd=tmp_path, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            wait_until(lambda: bool(address()) or served.poll() is not None, "it serves")
            run("topic", "create", "orders")
            run("produce", "orders", stdin="one\n")
            assert run("consume", "orders", "--from-beginning") == "one\n"
        finally:
            served.send_signal(signal.SIGTERM)
            status = served.wait(HANG_LIMIT_S)
    text = log_path.read_text()
    assert status == 0, text
    assert text.count("kernel_not_compiled") == (kernel == "Python"), text
    assert ("gcc and python3-dev" in text) is (kernel == "Python")
    assert sys.prefix not in text
