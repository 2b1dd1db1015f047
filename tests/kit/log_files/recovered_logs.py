"""Recovery of one log of a test's directory.

Owner: one test.
"""

from __future__ import annotations

import pathlib

from tailrace.format.directory.partition_metadata import PartitionMetadata
from workers.log.recovery.decision import Hints
from workers.log.recovery.log_recovery import RecoveredLog, recover_log
from workers.segment.checkpoint import CHECKPOINT_FILES
from workers.segment.files import DiskFiles


def recover(
    path: pathlib.Path,
    *,
    checkpoint: bool = False,
    hints: Hints | None = None,
    files: DiskFiles | None = None,
) -> RecoveredLog:
    """Recover the log of `path`; without its checkpoints, unless they are wanted."""
    for name in () if checkpoint else CHECKPOINT_FILES:
        path.with_name(name).unlink(missing_ok=True)
    known = PartitionMetadata.decode(path.with_name("partition.json").read_bytes())
    assert known is not None
    return recover_log(files or DiskFiles(), str(path.parent), known, hints or Hints())
