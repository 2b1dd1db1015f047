"""Programs of Kafka clients in other languages: fetched and built once, run against a gateway.

The sources are in `sources/`, one directory a language. What a language's package client fetches
and builds stays in the cache of `bench.peers`, by a hash of the sources. A test is skipped with a
sentence where a toolchain is missing or a package cannot be fetched.

Crash: a build is made under another name and renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from types import TracebackType

import pytest

from bench.peers.kafka import CACHE, fetch_jars
from bench.peers.servers import Missing
from tests.kit.processes import HANG_LIMIT_S, wait_until

SOURCES = pathlib.Path(__file__).parent / "sources"
BUILD_TIMEOUT_S = 900


class Program:
    """A running program; killed at the end of its block.

    Its output goes to a file, and is part of every failure.
    """

    def __init__(
        self,
        command: Iterable[str],
        directory: pathlib.Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        fd, path = tempfile.mkstemp(suffix=".out", dir=directory)
        self._path = pathlib.Path(path)
        with os.fdopen(fd, "wb") as file:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.kill()
        if _kind is not None:
            print(f"--- {self._command[-6:]}\n{self.output[-6000:]}")

    @property
    def output(self) -> str:
        """Everything it has printed."""
        return self._path.read_text(errors="replace")

    def lines(self, prefix: str) -> list[str]:
        """The complete lines of its output that begin with a word, without it."""
        whole = self.output.rpartition("\n")[0]
        return [
            line.removeprefix(prefix).strip()
            for line in whole.splitlines()
            if line.startswith(prefix)
        ]

    def kill(self) -> None:
        """SIGKILL to it and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        self.process.terminate()
        self.process.wait(HANG_LIMIT_S)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until a text stands in the output `count` times; fails when it has ended before."""

        def is_there() -> bool:
            if self.output.count(text) >= count:
                return True
            assert self.process.poll() is None, f"ended without {text!r}:\n{self.output[-6000:]}"
            return False

        wait_until(is_there, f"{text!r} in {self._path}")

    def result(self) -> str:
        """Wait for its end; its output. Fails unless it has succeeded."""
        code = self.process.wait(HANG_LIMIT_S)
        assert code == 0, f"exit {code}:\n{self.output[-6000:]}"
        return self.output


def java_command(jars: str, *arguments: str, heap: str = "256m") -> list[str]:
    """The command of a Java program with these jars."""
    return ["java", f"-Xmx{heap}", "-XX:-UsePerfData", "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={SOURCES}/java/log4j2.properties",
            "-cp", f"{jars}/*", *arguments]  # fmt: skip


def engine_jars() -> str:
    """The directory of the jars of Kafka's tools, Streams and Connect. Skips without them."""
    if shutil.which("javac") is None:
        pytest.skip("a Java compiler is missing (Debian: apt-get install openjdk-17-jdk-headless)")
    try:
        return fetch_jars("kafka-engines-4.3.0", str(SOURCES / "java" / "pom.xml"))
    except Missing as error:
        pytest.skip(str(error))


def built(language: str, tool: str, *commands: list[str]) -> str:
    """The directory in which the sources of a language have been built by the commands.

    Skips without its tool, or when a command fails, which is a package that cannot be fetched.
    """
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is missing")
    found = hashlib.sha256()
    for path in sorted((SOURCES / language).rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes())
    directory = f"{CACHE}/kafka-{language}-{found.hexdigest()[:12]}"
    if os.path.isdir(directory):
        return directory
    os.makedirs(CACHE, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as building:
        part = f"{building}/{language}"
        shutil.copytree(SOURCES / language, part)
        for command in commands:
            done = subprocess.run(
                command, cwd=part, capture_output=True, text=True,
                timeout=BUILD_TIMEOUT_S, check=False,
            )  # fmt: skip
            if done.returncode:
                said = (done.stderr + done.stdout).strip()[-400:]
                pytest.skip(f"`{' '.join(command)}` cannot build the {language} clients: {said}")
        if not os.path.isdir(directory):  # another test process may have been faster
            os.rename(part, directory)
    return directory
