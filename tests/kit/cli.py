"""The command line, run as a user runs it."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import pty
import struct
import subprocess
import sys
import termios

from click.testing import CliRunner

from appliance.cli.main import run as run_command
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S

TAILRACE = str(pathlib.Path(sys.executable).parent / "tailrace")


def run(
    appliance: EmbeddedAppliance | None,
    *arguments: str,
    stdin: bytes = b"",
    status: int | None = 0,
    is_process: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Run `tailrace ARGUMENTS` against the appliance and check its exit status (None: any). Here,
    with streams of its own, since a process takes half a second to begin; `is_process`: as one, as
    a user's shell would.
    """
    address = appliance.address if appliance else "tcp://127.0.0.1:1"
    if is_process:
        environment = {**os.environ, "TAILRACE_BOOTSTRAP": address}
        done = subprocess.run(
            [TAILRACE, *arguments],
            input=stdin,
            capture_output=True,
            env=environment,
            timeout=HANG_LIMIT_S,
            check=False,
        )
    else:
        with CliRunner().isolation(stdin, {"TAILRACE_BOOTSTRAP": address}) as (stdout, stderr, _):
            code = run_command(list(arguments))
            sys.stdout.flush()
            sys.stderr.flush()
            done = subprocess.CompletedProcess(
                arguments, code, stdout.getvalue(), stderr.getvalue()
            )
    assert status is None or done.returncode == status, done.stderr.decode()
    return done


def on_terminal(
    appliance: EmbeddedAppliance,
    *arguments: str,
    typed: str = "",
    columns: int = 80,
    term: str = "dumb",
) -> tuple[int, str]:
    """(exit status, what the terminal shows, without colours) of a command with a terminal as its
    input and output.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {
        **os.environ,
        "TAILRACE_BOOTSTRAP": appliance.address,
        "TERM": term,
        "NO_COLOR": "1",
    }
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        [TAILRACE, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        os.write(ours, typed.encode())
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError as error:  # Linux's way to say that nobody has the other end any more
                if error.errno != errno.EIO:
                    raise
                break
            if not piece:
                break
            shown += piece
    finally:
        os.close(ours)
    return process.wait(HANG_LIMIT_S), shown.decode().replace("\r\n", "\n")
