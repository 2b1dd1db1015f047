"""An appliance that `tailrace serve` runs from a configuration file, as a service does."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kit.cli import TAILRACE
from tests.kit.processes import HANG_LIMIT_S, wait_until

_READY = re.compile(r" ready address=(\S+) ")


class Served:
    """A running appliance with its file."""

    def __init__(self, process: subprocess.Popen[bytes], config: pathlib.Path, log: pathlib.Path):
        self.process = process
        self.config = config
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def address(self) -> str:
        found = _READY.search(self.log)
        assert found is not None, self.log
        return found[1].split(",")[0]

    def wait_for(self, text: str, after: int = 0) -> None:
        """Wait for a text in its log, behind the first `after` characters."""
        wait_until(
            lambda: text in self.log[after:] or self.process.poll() is not None,
            f"{text!r} in the log",
        )
        assert text in self.log[after:], self.log

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)


@contextmanager
def served(
    directory: pathlib.Path, text: str, at_start: str = " ready address=", **environment: str
) -> Iterator[Served]:
    """Serve the configuration `text`, which needs neither addresses nor data directories.
    `at_start`: in the log once it serves.
    """
    config, log = directory / "tailrace.toml", directory / "served.log"
    config.write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    given = {
        "TAILRACE_LISTEN": "tcp://127.0.0.1:0", "TAILRACE_HTTP_LISTEN": "",
        "TAILRACE_DATA_DIRS": str(directory / "data"), "TAILRACE_RING_BYTES": str(4 << 20),
    }  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            [TAILRACE, "serve", "--config", str(config)],
            env={**kept, **given, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    found = Served(process, config, log)
    try:
        found.wait_for(at_start)
        yield found
    finally:
        process.terminate()
        process.wait(HANG_LIMIT_S)
