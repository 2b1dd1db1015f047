"""Directories that must lie apart: those of the appliance, and the target of its backups.

A target in a data directory is lost with it, and is taken for a topic. A data directory in a target
is in the way of `--keep`.

Owner: pure but for the resolution of links.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from appliance.backup.errors import BackupError


def refuse_overlap(target: str | None, directories: Iterable[str]) -> None:
    """Raise BackupError if the target is one of the data directories, in one, or around one.
    `target`: a directory of this host, or None.
    """
    if target is None:
        return
    place = os.path.realpath(target)
    for directory in directories:
        data = os.path.realpath(directory)
        if place == data or place.startswith(f"{data.rstrip('/')}/"):
            raise BackupError(
                f"{target} lies in the data directory {directory}, and would be lost with it: "
                "choose a target outside."
            )
        if data.startswith(f"{place.rstrip('/')}/"):
            raise BackupError(
                f"the data directory {directory} lies in {target}: choose a directory for backups "
                "alone, or keep the data elsewhere."
            )
