"""Writing of planned files, and their removal.

Owner: the root user who installs; nothing else writes these files.
Invariants:
- A file that has its planned content is not touched.
- A configuration that somebody changed is kept; the new one is put beside it.
- Another file that somebody changed is replaced, and kept beside it.
Crash: each file is whole, old or new. The next run writes what is missing.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from appliance.install.plan import PlannedFile
from appliance.install.record import Record, write_file

NEW_SUFFIX, OLD_SUFFIX = ".new", ".old"


class Action(Enum):
    """Outcome of a file."""

    CREATE = "created"
    UPDATE = "updated"
    KEEP = "kept"
    REPLACE = "replaced"
    UNCHANGED = "unchanged"
    REMOVE = "removed"


CHANGES = frozenset({Action.CREATE, Action.UPDATE, Action.REPLACE, Action.REMOVE})


class Step(NamedTuple):
    """The action for one file."""

    file: PlannedFile
    action: Action
    note: str = ""


def decide(files: Iterable[PlannedFile], root: str, record: Record) -> list[Step]:
    """The action for each file, by what is there now. Raises OSError."""
    steps = [_decide(file, root, record) for file in files]
    planned = {step.file.path for step in steps}
    configurations = (path for path in record.files if path.startswith("/etc/tailrace/"))
    planned.update(configurations)
    for path in record.files:
        if path not in planned and os.path.lexists(root + path):
            steps.append(Step(PlannedFile(path, ""), Action.REMOVE, "of an older version"))
    return steps


def _decide(file: PlannedFile, root: str, record: Record) -> Step:
    path = root + file.path
    if file.link_to:
        return _decide_link(file, path, record)
    if not os.path.lexists(path):
        return Step(file, Action.CREATE)
    found = read_text(path)
    if found == file.content:
        # tmpfiles gives a configuration its group
        has_mode = stat.S_IMODE(os.stat(path).st_mode) == file.mode
        return Step(file, Action.UNCHANGED if has_mode else Action.UPDATE)
    if found is not None and record.wrote(file.path, found):
        return Step(file, Action.UPDATE)
    if file.is_configuration:
        note = f"was changed here; the new default is in {file.path}{NEW_SUFFIX}"
        return Step(file, Action.KEEP, note)
    return Step(file, Action.REPLACE, f"was changed here; yours is in {file.path}{OLD_SUFFIX}")


def _decide_link(file: PlannedFile, path: str, record: Record) -> Step:
    if not os.path.lexists(path):
        return Step(file, Action.CREATE)
    if os.path.islink(path):
        target = os.readlink(path)
        if target == file.link_to:
            return Step(file, Action.UNCHANGED)
        if record.wrote(file.path, target):
            return Step(file, Action.UPDATE)
    return Step(file, Action.KEEP, f"is another program; this one is {file.link_to}")


def read_text(path: str) -> str | None:
    """Content of a file; None if it is no text. Raises OSError."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        return None


def perform(steps: list[Step], root: str, record: Record) -> None:
    """Carry the steps out. Raises OSError; a second run completes what was interrupted."""
    for step in steps:
        if step.action is not Action.REMOVE:
            record.add(step.file.path, step.file.link_to or step.file.content)
    record.write(root)
    for step in steps:
        _perform(step, root)
    removed = {step.file.path for step in steps if step.action is Action.REMOVE}
    if removed:
        record.files = {path: sums for path, sums in record.files.items() if path not in removed}
        record.write(root)


def _perform(step: Step, root: str) -> None:
    file, path = step.file, root + step.file.path
    if step.action is Action.REMOVE:
        remove(path)
    elif file.link_to:
        if step.action in CHANGES:
            _link(path, file.link_to)
    elif step.action is Action.KEEP:
        write_file(path + NEW_SUFFIX, file.content, file.mode)
    elif step.action in CHANGES:
        if step.action is Action.REPLACE:
            os.replace(path, path + OLD_SUFFIX)
        write_file(path, file.content, file.mode)


def _link(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    beside = f"{path}.tailrace-part"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    os.symlink(target, beside)
    os.replace(beside, path)


def remove(path: str) -> None:
    """Remove a file or link that may be gone already. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
