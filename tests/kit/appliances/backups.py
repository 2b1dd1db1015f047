"""Backups made and restored as a user does, by the command line."""

from __future__ import annotations

import os
import pathlib
import subprocess
from typing import Any

import orjson

from tests.kit.cli import TAILRACE, run
from tests.kit.processes import HANG_LIMIT_S


def back_up(
    data_dir: str | os.PathLike[str], target: pathlib.Path, *options: str, status: int = 0
) -> dict[str, Any]:
    """Make a backup; what the command prints, or its sentence as {"error": ...}."""
    done = run(
        None, "backup", str(target), "--data-dir", str(data_dir), "--json", *options, status=status
    )
    if status:
        return {"error": done.stderr.decode()}
    found: dict[str, Any] = orjson.loads(done.stdout)
    return found


def restore(
    target: pathlib.Path, data_dir: pathlib.Path, *options: str, status: int = 0
) -> dict[str, Any]:
    """Restore a backup; see `back_up`."""
    done = run(None, "restore", str(target), str(data_dir), "--json", *options, status=status)
    if status:
        return {"error": done.stderr.decode()}
    found: dict[str, Any] = orjson.loads(done.stdout)
    return found


def verify(target: pathlib.Path, *options: str, status: int | None = 0) -> list[str]:
    """Verify backups; the findings."""
    done = run(None, "backup", "verify", str(target), "--json", *options, status=status)
    return [each["finding"] for each in orjson.loads(done.stdout)["findings"]]


def listed(target: pathlib.Path) -> list[dict[str, Any]]:
    """The backups of a target."""
    done = run(None, "backup", "list", str(target), "--json")
    found: list[dict[str, Any]] = orjson.loads(done.stdout)
    return found


def records_in(data_dir: pathlib.Path) -> int:
    """Records of a restored directory, which `tailrace log verify` must find intact."""
    done = run(None, "log", "verify", str(data_dir), "--json")
    return int(orjson.loads(done.stdout)["records"])


def run_killed_at(point: str, *arguments: str) -> int:
    """Run a command that dies at a crash point; its exit status."""
    environment = {**os.environ, "TAILRACE_CRASH_POINT": point}
    done = subprocess.run(
        [TAILRACE, *arguments],
        capture_output=True,
        env=environment,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    return done.returncode
