"""Findings of a check of log files: what is wrong, how bad it is, and which offsets it concerns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Severity(Enum):
    """Severity of a finding for readers of the log."""

    NOTE = "note"
    """Known and reported before, or harmless."""
    REPAIRABLE = "repairable"
    """The next start puts it right without a loss: an index, a torn tail."""
    DAMAGE = "damage"
    """Acknowledged records may be lost or wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a file."""

    severity: Severity
    path: str
    text: str
    first_offset: int = -1
    last_offset: int = -1


@dataclass(slots=True)
class Totals:
    """Counts of a check."""

    partitions: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    pending_records: int = 0
    """Records in bucket files, cancelled ones included."""
    data_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def worst(self) -> Severity | None:
        """The worst severity among the findings; None: there are none."""
        return next(
            (
                s
                for s in (Severity.DAMAGE, Severity.REPAIRABLE, Severity.NOTE)
                if any(f.severity is s for f in self.findings)
            ),
            None,
        )
