"""Cleaning job: the order of a flusher to its cleaner, and the cleaner's report. Checked JSON files
in the data directory, replaced whole.

    flusher                                cleaner
    writes cleaner.job, CLEANING = number  reads it, writes <base>.cleaned beside the segments
    swaps the runs that are reported       writes cleaner.report after each run, counts it
    CLEANING = 0 or another number         leaves the job

Owner: the flusher writes the job, the cleaner the report.

Invariants:
- A report belongs to the job with its number. Numbers are not used twice.
- A run is in the report when its files are synced. Runs are reported in their order.

Crash: a job or report that is missing or damaged is none. A cleaner that finds a report of its job
by a predecessor ends the job: segments that it has to read may be gone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tailrace.format.directory import checked_json
from workers.segment.files import Files, read_whole, write_durably
from workers.segment.segment_swap import CleanedRun

JOB_FILE = "cleaner.job"
REPORT_FILE = "cleaner.report"
RUNNING, DONE, FAILED, UNREADABLE = "running", "done", "failed", "unreadable"
"""States of a job. UNREADABLE: the log has a batch that cannot be read; the others are tried again.
"""


class JobSegment(NamedTuple):
    """A segment that a job reads."""

    base: int
    end: int
    """Start of the next segment. Batches from here on are not part of the log."""
    size: int
    is_cleaned: bool
    has_transactions: bool
    schema_id: int = -1
    """The schema of its batches, -1 if it is not known."""


class CleaningJob(NamedTuple):
    """A pass over a log."""

    number: int
    directory: str
    topic: str
    topic_id: str
    partition: int
    schemas: dict[str, str]
    """Schema id -> schema message (base64) of each version of the topic's schema."""
    schema_id: int
    """The newest version."""
    typed: bool
    key_column: str
    compression: str
    max_message_bytes: int
    delete_retention_ms: int
    runs: list[list[JobSegment]]
    """Segments in order; those of a run have one schema, and become one segment."""
    jumps: list[list[int]]
    """Jumps of the wall clock (`WallJumps`)."""
    dedupe_bytes: int
    bytes_per_second: int
    """0: as fast as it goes."""
    keep_free_bytes: int = 0
    """Room of the disk that the cleaner leaves."""
    is_merge: bool = False
    """True: small batches are merged, and every record stays. Each run is one segment."""
    made_us: int = 0
    """Wall clock when `jumps` were read, 0 in jobs of builds that did not say so."""
    made_ns: int = 0
    """Monotonic clock then."""
    united_bytes: int = 0
    """Successive runs may become one segment up to this size. 0: each run becomes one."""


class CleaningReport(NamedTuple):
    """Progress of a job."""

    number: int
    state: str = RUNNING
    reason: str = ""
    runs: tuple[CleanedRun, ...] = ()
    bytes_in: int = 0
    bytes_out: int = 0
    records_in: int = 0
    records_out: int = 0
    tombstones_since_us: int = 0
    """Time when the oldest tombstones that stay were first in a cleaned segment. 0: none."""
    stopped_base: int = -1
    """UNREADABLE: base of the segment that cannot be read."""


def write_job(files: Files, data_dir: str, job: CleaningJob) -> None:
    """Write a job. Raises OSError."""
    content = {**job._asdict(), "runs": [[list(each) for each in run] for run in job.runs]}
    write_durably(files, data_dir, JOB_FILE, checked_json.encode(content), sync=False)


def read_job(files: Files, data_dir: str, number: int) -> CleaningJob | None:
    """Return the job of this number, None if it is not there. Raises OSError."""
    content = _read(files, f"{data_dir}/{JOB_FILE}", number)
    if content is None:
        return None
    try:
        content["runs"] = [[JobSegment(*each) for each in run] for run in content["runs"]]
        return CleaningJob(**content)
    except (TypeError, KeyError):
        return None


def write_report(files: Files, data_dir: str, report: CleaningReport) -> None:
    """Write a report. Raises OSError."""
    content = {**report._asdict(), "runs": [run._asdict() for run in report.runs]}
    write_durably(files, data_dir, REPORT_FILE, checked_json.encode(content), sync=False)


def read_report(files: Files, data_dir: str, number: int) -> CleaningReport | None:
    """Return the report on the job of this number, None if it is not there. Raises OSError."""
    content = _read(files, f"{data_dir}/{REPORT_FILE}", number)
    if content is None:
        return None
    try:
        content["runs"] = tuple(CleanedRun(**run) for run in content["runs"])
        return CleaningReport(**content)
    except (TypeError, KeyError):
        return None


def remove_files(files: Files, data_dir: str) -> None:
    """Remove job and report. Raises OSError."""
    for name in (JOB_FILE, REPORT_FILE):
        if files.exists(f"{data_dir}/{name}"):
            files.unlink(f"{data_dir}/{name}")


def _read(files: Files, path: str, number: int) -> dict[str, Any] | None:
    if not files.exists(path):
        return None
    content: Any = checked_json.decode(read_whole(files, path))
    return content if isinstance(content, dict) and content.get("number") == number else None
