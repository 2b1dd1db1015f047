"""A login that fails is logged and reported."""

from __future__ import annotations

from typing import Any

import pytest

from netfront.kafka.login.login import Logins


def test_the_name_of_a_login_that_failed_is_cut_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate: Any = None
    checks: Any = None
    told: list[str] = []
    logins = Logins(gate, checks, b"secret", {}, lambda user, *_: told.append(user))
    login = logins.login("host", has_tls=True)
    login.user = "n" * 10_000
    login.fail("the user is unknown", 0)
    assert told == [login.user]
    (line,) = caplog.messages
    assert line.startswith(f"kafka_login_failed user='{'n' * 100}' host=host reason=")
