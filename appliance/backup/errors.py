"""The error of backups: one sentence that says what is wrong and what to do."""

from __future__ import annotations


class BackupError(Exception):
    """A backup, or a restore, cannot be made or read."""


class NotReadyError(BackupError):
    """The appliance is starting or changing: the same may succeed in a moment."""


class TargetLockedError(BackupError):
    """Another backup writes to the target."""
