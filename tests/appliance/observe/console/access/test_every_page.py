"""Every address of the console of an appliance with users: who is let in, and who may change."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.observe.console import changes
from appliance.observe.console.access import guard
from appliance.observe.console.access.logins import Logins
from appliance.observe.console.access.user_logins import ConsoleUser, UserLogins
from appliance.observe.console.site import Site
from appliance.observe.http_service import LazySite, pages
from appliance.observe.process_states import ProcessStates

TOKEN, SCRAPER = "t" * 43, "trt_" + "s" * 43
READS = ("state", "topic", "group", "records", "delays", "transactions")
ADDRESSES = [
    ("GET", "/"), ("GET", "/static/app.js"), ("GET", "/health/live"), ("GET", "/health/ready"),
    ("GET", "/metrics"), ("GET", "/nothing"), ("GET", "/api/nothing"), ("GET", "/api/events"),
    *(("GET", f"/api/{name}") for name in READS), ("POST", "/api/sql"), ("POST", "/api/sqlx"),
    ("POST", "/api/change/nothing"), *(("POST", f"/api/change/{name}") for name in changes.CHANGES),
    ("GET", "/static/../metrics"), ("GET", "/health/../api/state"), ("GET", "//metrics"),
    ("HEAD", "/metrics"), ("HEAD", "/api/state"), ("POST", "/api/sql/../change/produce"),
    ("PUT", "/api/change/produce"), ("DELETE", "/api/state"),
]  # fmt: skip
EVERYBODYS = {"/", "/static/app.js", "/health/live", "/health/ready", "/static/../metrics",
              "/health/../api/state"}  # fmt: skip
"""Addresses that show nothing of the appliance. Those with dots are files that do not exist."""
SERVED = b"served"


class Sampler:
    """Samples without end."""

    def state(self, _timeout_s: float) -> dict[str, Any]:
        return {"number": 1, "topics": {}, "secret": SERVED.decode()}

    def wait(self, number: int, _timeout_s: float) -> int:
        return number + 1

    def tick(self, _shown: dict[str, Any]) -> dict[str, str]:
        return {"secret": SERVED.decode()}


class NoMetrics:
    """A collector of nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def collect(self) -> list[Any]:
        return []


class Console:
    """The application with a reader, a user who may change, and one without rights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users = {
            "reader": ConsoleUser("p", True, False),
            "changer": ConsoleUser("p", True, True),
        }
        self.now_s = 0.0
        self.logins = Logins(
            lambda: TOKEN,
            lambda: self.now_s,
            UserLogins(lambda name, _host: self.users.get(name), lambda: self.now_s, str.__eq__),
        )
        site = Site("".format, cast(Any, Sampler()), lambda: TOKEN, frozenset(), lambda: True)
        assert set(site._reads) == set(READS), "a new page needs its row in this table"
        site._reads = {name: lambda _query, _address: SERVED.decode() for name in READS}
        site._queries = cast(Any, SimpleNamespace(run=lambda *_: SERVED.decode()))
        for name in changes.CHANGES:
            monkeypatch.setitem(
                cast(dict[str, Any], changes.CHANGES), name, lambda *_: {"done": SERVED.decode()}
            )
        states = cast(ProcessStates, SimpleNamespace(not_serving=list))
        monkeypatch.setattr(
            "appliance.observe.http_service.make_wsgi_app", lambda _registry: self._metrics
        )
        monkeypatch.setattr("appliance.observe.http_service.StateCollector", NoMetrics)
        self._pages, self._without_users = (
            pages(
                states, "".format, LazySite(lambda: site), 1, logins,
                lambda token: token == SCRAPER, {"broker.example"},
            )
            for logins in (lambda: self.logins, None)
        )  # fmt: skip

    def end_users(self) -> None:
        """Serve as an appliance does that requires no users."""
        self._pages = self._without_users

    @staticmethod
    def _metrics(_environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [SERVED]

    def ask(self, method: str, path: str, **headers: str) -> tuple[str, Iterator[bytes]]:
        """(Status, pieces)."""
        statuses: list[str] = []
        body = b'{"query": "select 1"}'
        environ = {
            "REQUEST_METHOD": method, "PATH_INFO": path, "HTTP_HOST": "localhost",
            "CONTENT_TYPE": "application/json", "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body), "REMOTE_ADDR": "10.0.0.1",
            "tailrace.begin_stream": lambda: True, "tailrace.sent": lambda: None, **headers,
        }  # fmt: skip
        pieces = self._pages(environ, lambda status, _headers: statuses.append(status))
        return statuses[0], iter(pieces)

    def login(self, name: str) -> tuple[dict[str, str], str]:
        """(Headers of the session, its token)."""
        given = {"HTTP_AUTHORIZATION": "Basic " + _basic(name), "REMOTE_ADDR": "10.0.0.1"}
        found = self.logins.login(given)
        assert not isinstance(found, guard.Refusal)
        header, body = found
        return {"HTTP_COOKIE": header.partition(";")[0]}, str(body["token"])


def _basic(name: str) -> str:
    import base64

    return base64.b64encode(f"{name}:p".encode()).decode()


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(monkeypatch)


def is_served(console: Console, method: str, path: str, headers: dict[str, str]) -> bool:
    """True if the answer has something of the appliance, or the request has changed something."""
    status, pieces = console.ask(method, path, **headers)
    content = next(pieces, b"")
    if method == "HEAD":
        return status.startswith("200")
    assert not status.startswith("500"), content
    return SERVED in content


@pytest.mark.parametrize(("method", "path"), ADDRESSES)
def test_a_stranger_is_shown_nothing(console: Console, method: str, path: str) -> None:
    for headers in (
        {}, {"HTTP_AUTHORIZATION": "Bearer wrong"}, {"HTTP_AUTHORIZATION": f"Basic {SCRAPER}"},
        {"HTTP_COOKIE": "tailrace_session=x"}, {guard.MAY_CHANGE.upper(): "1"},
        {"HTTP_TAILRACE.MAY_CHANGE": "1"},
    ):  # fmt: skip
        assert not is_served(console, method, path, headers)
        status, _ = console.ask(method, path, **headers)
        assert status[:3] in (("200", "404") if path in EVERYBODYS else ("401", "405", "429"))


@pytest.mark.parametrize(("method", "path"), ADDRESSES)
def test_a_scraper_reads_the_metrics_alone(console: Console, method: str, path: str) -> None:
    headers = {"HTTP_AUTHORIZATION": f"Bearer {SCRAPER}"}
    assert is_served(console, method, path, headers) == (path == "/metrics")


@pytest.mark.parametrize(("method", "path"), ADDRESSES)
def test_who_may_read_changes_nothing(console: Console, method: str, path: str) -> None:
    session, token = console.login("reader")
    assert token == ""
    known = path == "/metrics" or path in {"/api/sql", "/api/events"} or path[5:] in READS
    reads = known and method in ("GET", "HEAD", "POST")
    assert is_served(console, method, path, session) == reads
    changer, of_changer = console.login("changer")
    assert is_served(console, method, path, changer) == reads, "a cookie alone: of another site"
    stolen = {**session, "HTTP_AUTHORIZATION": f"Bearer {of_changer}"}
    assert not is_served(console, method, path, stolen)
    foreign = {**changer, "HTTP_AUTHORIZATION": f"Bearer {of_changer}"}
    foreign["HTTP_ORIGIN"] = "http://evil.example"
    assert not is_served(console, method, path, foreign)


@pytest.mark.parametrize("requires_users", [True, False])
def test_a_page_that_was_led_here_under_a_foreign_name_reads_no_metrics(
    console: Console, requires_users: bool
) -> None:
    session, _ = console.login("reader")
    scraper = {"HTTP_AUTHORIZATION": f"Bearer {SCRAPER}"}
    if not requires_users:
        console.end_users()
    for host in ("evil.example", "127.0.0.1.evil.example:7400"):
        status, pieces = console.ask("GET", "/metrics", **session, HTTP_HOST=host)
        assert status.startswith("421")
        assert b"http.hosts" in next(pieces)
        assert is_served(console, "GET", "/metrics", {**scraper, "HTTP_HOST": host})
    for host in ("broker.example:7400", "10.1.2.3", "[::1]:7400", ""):
        assert is_served(console, "GET", "/metrics", {**session, "HTTP_HOST": host})
    evil = {**session, "HTTP_ORIGIN": "http://evil.example"}
    assert not is_served(console, "GET", "/metrics", evil)


@pytest.mark.parametrize("name", changes.CHANGES)
def test_who_may_change_does_so_with_the_token_of_the_session(console: Console, name: str) -> None:
    session, token = console.login("changer")
    headers = {**session, "HTTP_AUTHORIZATION": f"Bearer {token}"}
    assert is_served(console, "POST", f"/api/change/{name}", headers)
    console.users["changer"] = ConsoleUser("p", True, False)
    console.now_s += 2
    assert not is_served(console, "POST", f"/api/change/{name}", headers)


@pytest.mark.parametrize("loses", ["right", "password", "time"])
def test_a_stream_ends_with_the_session_that_let_it_in(console: Console, loses: str) -> None:
    session, _ = console.login("reader")
    status, pieces = console.ask("GET", "/api/events", **session)
    assert status.startswith("200")
    assert all(SERVED in next(pieces) for _ in range(5))
    console.now_s += 13 * 3600 if loses == "time" else 2
    if loses != "time":
        changed = ConsoleUser("other", True, False)
        console.users["reader"] = changed if loses == "password" else ConsoleUser("p", False, False)
    assert list(pieces) == []
