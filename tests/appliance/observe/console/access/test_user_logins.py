"""Users log in to the console with a password: who may, how often they may fail, until when."""

from __future__ import annotations

import base64
import http.client
import json
import pathlib
import shutil
from typing import Any

import pytest

from appliance.observe.console.access.guard import Refusal
from appliance.observe.console.access.logins import (
    RECHECK_S,
    SESSIONS_MAX,
    SESSIONS_OF_USER_MAX,
    Logins,
)
from appliance.observe.console.access.user_logins import (
    FAILURES_MAX,
    FAILURES_S,
    ConsoleUser,
    UserLogins,
)
from shm.rights.passwords import fields_of
from tests.kit.appliances.secured import Users, acl, secured
from tests.kit.processes import HANG_LIMIT_S, wait_until

PASSWORD = "correct horse"
CHROMIUM = shutil.which("chromium")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def basic(name: str, password: str, address: str = "10.0.0.1") -> dict[str, Any]:
    given = base64.b64encode(f"{name}:{password}".encode()).decode()
    return {"HTTP_AUTHORIZATION": f"Basic {given}", "REMOTE_ADDR": address}


class Bench:
    """Logins of users whose hashes are their passwords."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.users = {
            "root": ConsoleUser("r", True, True), "reader": ConsoleUser("p", True, False),
            "nobody": ConsoleUser("n", False, False), "keys": ConsoleUser("", True, True),
        }  # fmt: skip
        self.checked: list[str] = []
        found = UserLogins(lambda name, _host: self.users.get(name), self.clock, self._check)
        self.logins = Logins(lambda: "t" * 43, self.clock, found)

    def _check(self, password: str, stored: str) -> bool:
        self.checked.append(password)
        return bool(stored) and password == stored

    def session(self, name: str, password: str) -> tuple[dict[str, Any], str]:
        """(environment with the cookie, token)."""
        found = self.logins.login(basic(name, password))
        assert not isinstance(found, Refusal), found
        cookie, body = found
        assert body["user"] == name
        return {"HTTP_COOKIE": cookie.partition(";")[0]}, body["token"]


def with_token(session: dict[str, Any], token: str) -> dict[str, Any]:
    return {**session, "HTTP_AUTHORIZATION": f"Bearer {token}"}


def test_a_session_reads_and_its_token_changes() -> None:
    bench = Bench()
    session, token = bench.session("root", "r")
    assert bench.logins.refuse(session) is None
    assert not bench.logins.may_change(session), "another site's page can make the browser send it"
    assert bench.logins.refuse(with_token(session, token)) is None
    assert bench.logins.may_change(with_token(session, token))
    assert not bench.logins.may_change(with_token({}, token))
    other, _ = bench.session("root", "r")
    assert not bench.logins.may_change(with_token(other, token))
    assert bench.logins.refuse(with_token(session, "x")) is not None
    session, token = bench.session("reader", "p")
    assert token == ""
    assert bench.logins.refuse(session) is None
    assert not bench.logins.may_change(with_token(session, token))


def test_a_session_ends_with_the_right_or_the_password_of_its_user() -> None:
    bench = Bench()
    for change in (None, ConsoleUser("other", True, True), ConsoleUser("r", False, False)):
        bench.users["root"] = ConsoleUser("r", True, True)
        session, token = bench.session("root", "r")
        if change is None:
            del bench.users["root"]
        else:
            bench.users["root"] = change
        bench.clock.now_s += RECHECK_S
        assert bench.logins.refuse(session) is not None
        assert not bench.logins.may_change(with_token(session, token))
    bench.users["root"] = ConsoleUser("r", True, True)
    session, token = bench.session("root", "r")
    bench.users["root"] = ConsoleUser("r", True, False)
    bench.clock.now_s += RECHECK_S
    assert bench.logins.refuse(session) is None
    assert not bench.logins.may_change(with_token(session, token))


def test_a_user_who_logs_in_for_ever_ends_its_own_sessions_alone() -> None:
    bench = Bench()
    root, _ = bench.session("root", "r")
    first, _ = bench.session("reader", "p")
    for _ in range(SESSIONS_OF_USER_MAX):
        newest, _ = bench.session("reader", "p")
    assert bench.logins.refuse(root) is None
    assert bench.logins.refuse(first) is not None
    assert bench.logins.refuse(newest) is None


def test_sessions_of_all_users_are_bounded() -> None:
    bench = Bench()
    first, _ = bench.session("root", "r")
    for number in range(SESSIONS_MAX):
        bench.users[f"u{number}"] = ConsoleUser("p", True, False)
        bench.session(f"u{number}", "p")
    assert bench.logins.refuse(first) is not None
    assert len(bench.logins._sessions) == SESSIONS_MAX


def test_who_is_not_let_in_is_told_alike_and_after_a_check() -> None:
    bench = Bench()
    told = set()
    for name, password in (("root", "x"), ("missing", "x"), ("keys", ""), ("", "")):
        found = bench.logins.login(basic(name, password))
        assert isinstance(found, Refusal)
        told.add(found)
    assert len(told) == 1
    assert len(bench.checked) == 4
    found = bench.logins.login(basic("nobody", "n"))
    assert isinstance(found, Refusal)
    assert found.status.startswith("403")


@pytest.mark.parametrize(
    "given", ["Basic ", "Basic ?", "Basic gA==", "Basic YQ==", "Basic " + "A" * 9000]
)
def test_a_malformed_header_lets_nobody_in(given: str) -> None:
    found = Bench().logins.login({"HTTP_AUTHORIZATION": given})
    assert isinstance(found, Refusal)


def test_failures_of_an_address_are_limited_and_others_are_not_kept_out() -> None:
    bench = Bench()
    for _ in range(FAILURES_MAX):
        found = bench.logins.login(basic("root", "x"))
        assert isinstance(found, Refusal)
        assert found.status.startswith("401")
    found = bench.logins.login(basic("root", "r"))
    assert isinstance(found, Refusal)
    assert found.status.startswith("429")
    assert len(bench.checked) == FAILURES_MAX
    assert not isinstance(bench.logins.login(basic("root", "r", "10.0.0.2")), Refusal)
    bench.clock.now_s = FAILURES_S
    for _ in range(2 * FAILURES_MAX):
        assert not isinstance(bench.logins.login(basic("root", "r")), Refusal)


# ---- a real console ------------------------------------------------------------------------------


def console_address(users: Users) -> str:
    log = pathlib.Path(users.appliance.log_path)
    wait_until(lambda: "console address=http://" in log.read_text(), "the console listens")
    return log.read_text().split("console address=http://")[1].split()[0].strip("/")


def ask(
    users: Users, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(console_address(users), timeout=HANG_LIMIT_S)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def test_a_user_logs_in_changes_something_and_is_disabled(tmp_path: pathlib.Path) -> None:
    settings = {"http.listen": "127.0.0.1:0", "http.proxies": "127.0.0.1"}
    with secured(tmp_path, **settings) as users:
        users.admin.add_user("root", admin=True, **fields_of(PASSWORD))
        users.admin.add_user("viewer", **fields_of(PASSWORD))
        users.admin.add_acls([acl("User:viewer", "read console")])

        def header(name: str) -> dict[str, str]:
            return {"Authorization": str(basic(name, PASSWORD)["HTTP_AUTHORIZATION"])}

        kind = {"Content-Type": "application/json"}

        status, headers, body = ask(users, "POST", "/api/login", header("root"))
        assert status == 200
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        token = json.loads(body)["token"]
        assert ask(users, "GET", "/api/transactions", cookie)[0] == 200
        made = json.dumps({"name": "made", "partitions": 1}).encode()
        change = "/api/change/create-topic"
        assert ask(users, "POST", change, {**cookie, **kind}, made)[0] == 401
        status, _, body = ask(
            users, "POST", change, {**cookie, **kind, "Authorization": f"Bearer {token}"}, made
        )
        assert (status, "made" in users.admin.list_topics()) == (200, True), body
        status, headers, body = ask(users, "POST", "/api/login", header("viewer"))
        viewer = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        assert json.loads(body)["token"] == ""
        assert ask(users, "GET", "/api/transactions", viewer)[0] == 200
        assert ask(users, "POST", change, {**viewer, **kind}, made)[0] == 401
        assert ask(users, "POST", "/api/login", header("nobody"))[0] == 401
        guesser, other = ({"X-Forwarded-For": f"192.0.2.1, 10.0.0.{n}"} for n in (1, 2))
        for _ in range(FAILURES_MAX):
            assert ask(users, "POST", "/api/login", {**header("nobody"), **guesser})[0] == 401
        assert ask(users, "POST", "/api/login", {**header("root"), **guesser})[0] == 429
        assert ask(users, "POST", "/api/login", {**header("root"), **other})[0] == 200
        users.admin.disable_user("root")
        wait_until(
            lambda: ask(users, "GET", "/api/transactions", cookie)[0] == 401, "the session ends"
        )
        assert ask(users, "POST", "/api/login", header("root"))[0] == 401


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_the_page_has_a_form_for_a_user(tmp_path: pathlib.Path) -> None:
    from playwright.sync_api import sync_playwright

    with secured(tmp_path, **{"http.listen": "127.0.0.1:0"}) as users, sync_playwright() as started:
        users.admin.add_user("root", admin=True, **fields_of(PASSWORD))
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            tab = browser.new_page()
            tab.set_default_timeout(HANG_LIMIT_S * 1000)
            tab.goto(f"http://{console_address(users)}/")
            tab.wait_for_selector("#login:not([hidden])")
            tab.fill("#login [name=user]", "root")
            tab.fill("#login [name=password]", "wrong")
            tab.click("#login button")
            tab.wait_for_selector("#login [role=alert]:has-text('unknown or the password')")
            tab.fill("#login [name=password]", PASSWORD)
            tab.click("#login button")
            tab.wait_for_selector("#link.live")
            assert tab.is_hidden("#login")
            assert tab.inner_text("#access") == "Changes allowed"
        finally:
            browser.close()
