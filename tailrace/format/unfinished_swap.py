"""Segments of a swap that was not finished, as readers take them that do not finish it.

`workers.segment.segment_swap` decides that a cleaned segment takes the place of a run, and carries
it out. From the rename of the cleaned segment on, those of the run that are still there have
records that are in it, too.

Owner: none. Files are only read.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from typing import Any

from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import SWAP_FILE
from tailrace.format.segments.segment import file_name

CLEANED_SUFFIX = ".cleaned"
"""Suffix of a cleaned segment that has not taken its place."""


def replaced_segments(directory: str, names: Collection[str]) -> frozenset[int]:
    """Bases of the segments whose records are in a cleaned one that has taken its place. `names`:
    the files of the partition's directory. Raises OSError.
    """
    if SWAP_FILE not in names:
        return frozenset()
    path = f"{directory}/{SWAP_FILE}"
    try:
        content: Any = checked_json.decode(checked_json.read(path))
    except FileNotFoundError:  # it was finished meanwhile
        return frozenset()
    try:
        if file_name(content["base"], CLEANED_SUFFIX) in names:
            return frozenset()  # nothing has changed yet
        return frozenset(base for base, _ in content["replaced"][1:])
    except (TypeError, KeyError, ValueError):
        raise OSError(
            errno.EBADMSG, "it is damaged: start the appliance, whose log says what to do", path
        ) from None
