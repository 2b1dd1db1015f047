"""Removal of an installation. The data and the configurations stay, unless they are purged.

Invariants:
- A service is stopped before its files go.
- Only what the record names is removed, and nothing that somebody changed.
Crash: the record goes last, so a second run removes the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from appliance.install.apply import Action, Step, read_text, remove
from appliance.install.instances import DEFAULT
from appliance.install.plan import CONFIGURATION, STATE, PlannedFile
from appliance.install.record import PATH, Record

USER = "tailrace"
NO_SUCH_USER = 6
"""Exit status of userdel."""


def plan_removal(root: str, record: Record) -> list[Step]:
    """The files to remove, and those that were changed and stay. Raises OSError."""
    steps = []
    for path in sorted(record.files):
        if path.startswith(f"{CONFIGURATION}/") or not os.path.lexists(root + path):
            continue
        is_link = os.path.islink(root + path)
        found = os.readlink(root + path) if is_link else read_text(root + path)
        if found is not None and record.wrote(path, found):
            steps.append(Step(PlannedFile(path, ""), Action.REMOVE))
        else:
            steps.append(Step(PlannedFile(path, ""), Action.KEEP, "was changed here"))
    return steps


def service_commands(names: list[str]) -> list[list[str]]:
    """Commands that stop the services of these instances, and keep them stopped."""
    units = []
    for name in names:
        suffix = "" if name == DEFAULT else f"@{name}"
        units += [
            f"tailrace{suffix}.service",
            f"tailrace-verify{suffix}.timer",
            f"tailrace-backup{suffix}.timer",
        ]
        if name == DEFAULT:
            units.insert(0, "tailrace.socket")  # it would start the service again
    return [["systemctl", "disable", "--now", *units]] if units else []


def purged_paths(root: str, names: list[str]) -> list[str]:
    """Configurations and data of these instances, as far as they lie where an installation puts
    them.
    """
    paths = []
    for name in names:
        paths += [
            f"{CONFIGURATION}/{name}.toml",
            f"{CONFIGURATION}/{name}.toml.new",
            STATE if name == DEFAULT else f"{STATE}-{name}",
        ]
    return [path for path in paths if os.path.lexists(root + path)]


def remove_files(root: str, steps: list[Step]) -> None:
    """Remove the files, and the record last. Raises OSError."""
    for step in steps:
        if step.action is Action.REMOVE:
            remove(root + step.file.path)
    remove(os.path.join(root, PATH))
    _remove_empty(os.path.dirname(os.path.join(root, PATH)))


def purge(root: str, paths: list[str]) -> None:
    """Remove configurations and data for good. Raises OSError."""
    for path in paths:
        if os.path.isdir(root + path) and not os.path.islink(root + path):
            shutil.rmtree(root + path)
        else:
            remove(root + path)
    for directory in (f"{CONFIGURATION}/conf.d", CONFIGURATION):
        _remove_empty(root + directory)


def remove_user() -> list[str]:
    """Remove the service's user and group; the reason if it failed."""
    done = subprocess.run(["userdel", USER], capture_output=True, text=True, check=False)
    return (
        [] if done.returncode in (0, NO_SUCH_USER) else [f"userdel {USER}: {done.stderr.strip()}"]
    )


def _remove_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        return  # it has files of others, or is gone
