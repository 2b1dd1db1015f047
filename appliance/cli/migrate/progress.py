"""Progress of a migration: a bar on a terminal, lines elsewhere, or JSON lines."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from appliance.cli.output import complain, counted, human_bytes

if TYPE_CHECKING:
    from appliance.migrate.session import Session

LINE_S = 10.0
JSON_LINE_S = 1.0


class Progress:
    """The progress of one run."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._begun_s = self._line_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def note(self, sentence: str) -> None:
        """Print a sentence beside the progress."""
        if self._bar is not None:
            self._bar.console.print(f"tailrace: {sentence}", highlight=False, markup=False)
        else:
            complain(sentence)

    def progress(self, session: Session, lag: int) -> None:
        """Show how far the copy is."""
        del lag
        if not self._as_json and sys.stderr.isatty():
            self._show_bar(session)
            return
        now_s = time.monotonic()
        if now_s >= self._line_s + (JSON_LINE_S if self._as_json else LINE_S):
            self._line_s = now_s
            self._print_line(session, "copying")

    def caught_up(self, session: Session) -> None:
        """Print that the copy is at the end of the source."""
        if session.journal.switched_ms is None:
            self._print_line(session, "caught up")
        elif self._as_json:
            self._print_line(session, "switched")

    def _print_line(self, session: Session, state: str) -> None:
        import orjson

        counts, seconds = session.counts, max(1e-9, time.monotonic() - self._begun_s)
        if self._as_json:
            row = {
                "state": state, "records": counts.records, "bytes": counts.byte_count,
                "records_in_target": session.record_count,
                "records_per_second": round(counts.records / seconds, 1),
                "refused": list(session.refused.values()),
            }  # fmt: skip
            click.echo(orjson.dumps(row))
            return
        self.note(
            f"{state}: {counted(counts.records, 'record')}, {human_bytes(counts.byte_count)}, "
            f"{counts.records / seconds:,.0f} records/s"
        )

    def _show_bar(self, session: Session) -> None:
        now_s = time.monotonic()
        if self._bar is None:
            from rich import progress as rich
            from rich.console import Console

            self._bar = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.TextColumn("{task.percentage:>3.0f}%"),
                rich.TextColumn("{task.fields[speed]}"),
                rich.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("copying", total=1, speed="")
            self._bar.start()
        elif now_s < self._line_s + 0.5:
            return
        self._line_s = now_s
        counts, seconds = session.counts, max(1e-9, now_s - self._begun_s)
        lag = session.last_lag
        self._bar.update(
            self._task,
            completed=counts.records,
            total=max(1, counts.records + lag) if lag >= 0 else None,
            speed=f"{counts.records:,} records, {human_bytes(counts.byte_count)}, "
            f"{human_bytes(int(counts.byte_count / seconds))}/s",
        )

    def end(self) -> None:
        """Take the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
