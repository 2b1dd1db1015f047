"""Users and ACLs of a data directory that no appliance serves, through `Admin`'s own methods.

Owner: the command that holds the directory's lock.
Invariants:
- Nothing is changed while an appliance serves the directory.
Crash: SQLite recovers the catalog; a change is there or not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from appliance.catalog.catalog import Catalog
from appliance.control.users.user_commands import UserCommands
from appliance.data.data_dir_lock import take
from appliance.data.directory_errors import refuse_without_catalog
from tailrace.admin.users import UserAdmin
from tailrace.client.connections.steps import Steps, run_at_once
from tailrace.core.errors import TailraceError
from tailrace.format.directory.data_dir import CATALOG_FILE
from tailrace.protocol.frame import Api

T = TypeVar("T")
_SLOTS = 1 << 20


class _Open:
    """Connection as `UserAdmin` expects it."""

    def check_usable(self) -> None:
        """It is."""


class OfflineUsers(UserAdmin):
    """The methods of `Admin` for users and ACLs, on an open catalog."""

    _connection = _Open()  # type: ignore[assignment]

    def __init__(self, commands: UserCommands) -> None:
        self._commands = commands

    def _run_steps(self, steps: Steps[T], /) -> T:
        return run_at_once(steps)

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        yield from ()
        answers: list[dict[str, Any]] = []
        errors: list[TailraceError] = []
        answer = self._commands.take(api, request, answers.append, errors.append)
        if errors:
            raise errors[0]
        return answers[0] if answer is None else answer


@contextmanager
def offline_users(data_dir: str) -> Iterator[OfflineUsers]:
    """Take the directory and open its catalog. Raises DataDirectoryError."""
    refuse_without_catalog(data_dir)
    lock = take(data_dir)
    try:
        catalog = Catalog(f"{data_dir}/{CATALOG_FILE}", _SLOTS)
        try:
            yield OfflineUsers(
                UserCommands(
                    catalog,
                    lambda _change, _with_credentials: None,
                    lambda: time.time_ns() // 1_000,
                )
            )
        finally:
            catalog.close()
    finally:
        for fd in lock.lock_fds:
            os.close(fd)
