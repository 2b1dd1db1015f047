"""The console of an appliance that requires users: its token logs in, and nothing else does."""

from __future__ import annotations

import http.client
import pathlib
from typing import Any

import pytest

from appliance.observe.console.access.guard import Refusal
from appliance.observe.console.access.logins import (
    FAILURES_MAX,
    FAILURES_S,
    RECHECK_S,
    SESSION_S,
    SESSIONS_OF_USER_MAX,
    Logins,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.secured import secured
from tests.kit.processes import wait_until

TOKEN = "t" * 43


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def bearer(token: str) -> dict[str, Any]:
    return {"HTTP_AUTHORIZATION": f"Bearer {token}"}


def cookie(found: tuple[str, dict[str, Any]] | Refusal) -> dict[str, Any]:
    assert not isinstance(found, Refusal)
    header, _ = found
    assert "HttpOnly; SameSite=Strict" in header
    return {"HTTP_COOKIE": header.partition(";")[0]}


def test_a_session_lasts_its_time_and_no_other_cookie_is_one() -> None:
    clock = Clock()
    logins = Logins(lambda: TOKEN, clock)
    session = cookie(logins.login(bearer(TOKEN)))
    assert logins.refuse(session) is None
    assert logins.refuse(bearer(TOKEN)) is None
    for stranger in ({}, {"HTTP_COOKIE": "tailrace_session=x"}, {"HTTP_COOKIE": "\x00=;;,"}):
        refusal = logins.refuse(stranger)
        assert refusal is not None
        assert refusal.status.startswith("401")
        assert "`tailrace token add NAME --data-dir DIR`" in refusal.reason
    clock.now_s = SESSION_S
    assert logins.refuse(session) is not None


def test_a_session_ends_with_the_token_that_has_opened_it() -> None:
    clock, tokens = Clock(), [TOKEN]
    logins = Logins(lambda: tokens[0], clock)
    session = cookie(logins.login(bearer(TOKEN)))
    clock.now_s = RECHECK_S
    assert logins.refuse(session) is None
    tokens[0] = "u" * 43
    clock.now_s += RECHECK_S
    assert logins.refuse(session) is not None
    tokens[0] = TOKEN
    assert logins.refuse(session) is not None


def test_wrong_tokens_are_limited_and_the_right_one_is_not() -> None:
    clock = Clock()
    logins = Logins(lambda: TOKEN, clock)
    for _ in range(FAILURES_MAX):
        found = logins.login(bearer("wrong"))
        assert isinstance(found, Refusal)
        assert found.status.startswith("401")
    found = logins.login(bearer("wrong"))
    assert isinstance(found, Refusal)
    assert found.status.startswith("429")
    assert not isinstance(logins.login(bearer(TOKEN)), Refusal)
    clock.now_s = FAILURES_S
    found = logins.login(bearer(""))
    assert isinstance(found, Refusal)
    assert found.status.startswith("401")


def test_sessions_are_bounded_and_an_unreadable_token_lets_nobody_in() -> None:
    logins = Logins(lambda: TOKEN, Clock())
    first = cookie(logins.login(bearer(TOKEN)))
    for _ in range(SESSIONS_OF_USER_MAX):
        logins.login(bearer(TOKEN))
    assert logins.refuse(first) is not None
    assert len(logins._sessions) == SESSIONS_OF_USER_MAX

    def unreadable() -> str:
        raise OSError

    for given in ("", TOKEN):
        assert isinstance(Logins(unreadable, Clock()).login(bearer(given)), Refusal)
    assert isinstance(Logins(lambda: "", Clock()).login(bearer("")), Refusal)


@pytest.mark.parametrize("listen", ["127.0.0.1:0"])
def test_the_real_console_shows_a_stranger_nothing(tmp_path: pathlib.Path, listen: str) -> None:
    with secured(tmp_path, **{"http.listen": listen}) as users:
        address = _console(users.appliance)

        def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode(), response.getheader("Set-Cookie", "")

        assert ask("/health/live")[0] == 200
        for path in ("/metrics", "/api/state", "/api/records?topic=t", "/api/events"):
            status, body, _ = ask(path)
            assert status == 401
            assert "requires users" in body
        assert ask("/api/login", "POST", Authorization="Bearer wrong")[0] == 401
        token = pathlib.Path(users.appliance.data_dir, "console.token").read_text().strip()
        status, _, header = ask("/api/login", "POST", Authorization=f"Bearer {token}")
        assert status == 200
        session = {"Cookie": header.partition(";")[0]}
        assert ask("/api/state", **session)[0] == 200
        assert ask("/api/change/delete_topic", "POST", **session)[0] == 401, "CSRF"
        strange = {"Authorization": f"Bearer {token}", "Origin": "http://evil.example"}
        assert ask("/api/login", "POST", **strange)[0] == 403
        metrics = ask("/metrics", Authorization=f"Bearer {token}")
        assert metrics[0] == 200
        assert "tailrace_" in metrics[1]


def _console(appliance: EmbeddedAppliance) -> str:
    log = pathlib.Path(appliance.log_path)
    wait_until(lambda: "console address=http://" in log.read_text(), "the console listens")
    return log.read_text().split("console address=http://")[1].split()[0]
