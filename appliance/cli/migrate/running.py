"""A run of a migration: signals end it at a record, errors become sentences."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from appliance.migrate.errors import InterruptedSessionError, MigrationError
from tailrace.core.errors import NotReachableError

if TYPE_CHECKING:
    from appliance.cli.migrate.progress import Progress
    from appliance.migrate.migration import Migration

COLLECTED_OBJECTS = 1_000_000


@contextmanager
def sentences() -> Iterator[None]:
    """Turn errors of migrations into those of the command line."""
    try:
        yield
    except MigrationError as error:
        raise click.ClickException(str(error)) from None
    except InterruptedSessionError as error:
        if isinstance(error.__cause__, NotReachableError):
            raise error.__cause__ from None
        raise click.ClickException(str(error)) from None


@contextmanager
def ending_at_signals(migration: Migration, printed: Progress) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the copy at the next record; the second one ends it at once."""

    def stop(_number: int, _frame: object) -> None:
        if migration.is_stopped:
            sys.exit(128 + signal.SIGINT)
        migration.is_stopped = True

    former = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTED_OBJECTS)  # records are no cycles, and looking for some takes a third
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        for number, handler in former.items():
            signal.signal(number, handler)
        printed.end()
        migration.target.end()
