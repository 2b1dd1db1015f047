"""Users of the console's page in the audit log: their logins, changes and queries have their names
and addresses, and nobody else can act for another one.
"""

from __future__ import annotations

import base64
import http.client
import json
import pathlib
from typing import Any

import pytest

from appliance.audit.verification import read_events
from shm.rights.passwords import fields_of
from tailrace import Admin, NewTopic
from tailrace.client.connections.credentials import acting_address
from tailrace.core.errors import NotAuthenticatedError
from tests.kit.appliances.secured import Users, acl, new_keys, secured
from tests.kit.processes import HANG_LIMIT_S, wait_until

PASSWORD = "correct horse"
BROWSER = {"X-Forwarded-For": "192.0.2.7"}
JSON = {"Content-Type": "application/json"}


def ask(users: Users, path: str, headers: dict[str, str], body: Any = None) -> tuple[int, Any, str]:
    """POST: (status, answer, cookie)."""
    log = pathlib.Path(users.appliance.log_path)
    wait_until(lambda: "console address=http://" in log.read_text(), "the console listens")
    address = log.read_text().split("console address=http://")[1].split()[0].strip("/")
    connection = http.client.HTTPConnection(address, timeout=HANG_LIMIT_S)
    connection.request("POST", path, json.dumps(body or {}), {**BROWSER, **JSON, **headers})
    response = connection.getresponse()
    cookie = response.getheader("Set-Cookie", "").partition(";")[0]
    found = response.status, json.loads(response.read()), cookie
    connection.close()
    return found


def basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def test_lines_of_the_page_have_its_user_and_the_address_of_the_browser(
    tmp_path: pathlib.Path,
) -> None:
    audit = tmp_path / "audit"
    settings = {
        "audit.enabled": "true", "audit.directory": str(audit), "audit.data": "orders",
        "http.listen": "127.0.0.1:0", "http.proxies": "127.0.0.1",
    }  # fmt: skip
    with secured(tmp_path, **settings) as users:
        users.admin.create_topics(NewTopic("orders"))
        users.admin.add_user("alice", **fields_of(PASSWORD))
        users.admin.add_user("nobody", **fields_of(PASSWORD))
        users.admin.add_acls([acl("User:alice", "alter console")])
        assert ask(users, "/api/login", basic("alice", "guessed"))[0] == 401
        assert ask(users, "/api/login", basic("nobody", PASSWORD))[0] == 403
        assert ask(users, "/api/login", {"Authorization": "Bearer guessed"})[0] == 401
        status, answer, cookie = ask(users, "/api/login", basic("alice", PASSWORD))
        assert status == 200
        session = {"Cookie": cookie, "Authorization": f"Bearer {answer['token']}"}
        made = {"name": "made"}
        assert ask(users, "/api/change/create-topic", session, made)[0] == 200
        sent = {"topic": "orders", "value": "v"}
        assert ask(users, "/api/change/produce", session, sent)[0] == 200
        query = {"query": "select count(*) from orders"}
        assert ask(users, "/api/sql", session, query)[0] == 200
        token = pathlib.Path(users.appliance.data_dir, "console.token").read_text().strip()
        assert ask(users, "/api/login", {"Authorization": f"Bearer {token}"})[0] == 200

        def lines() -> set[tuple[str, str, str]]:
            return {
                (event["event"], event["user"], event.get("api", event.get("operation", "")))
                for event in read_events(str(audit))
                if event.get("address") == "192.0.2.7"
            }

        expected = {
            ("denied", "User:alice", ""), ("denied", "User:nobody", ""),
            ("denied", "User:ANONYMOUS", ""), ("login", "User:alice", ""),
            ("request", "User:alice", "CREATE_TOPICS"), ("result", "User:alice", "CREATE_TOPICS"),
            ("access", "User:alice", "write"), ("access", "User:alice", "query"),
            ("login", "User:(appliance)", ""),
        }  # fmt: skip
        wait_until(lambda: lines() >= expected, "every line is written")
        assert lines() == expected
        found = list(read_events(str(audit)))
    (asked,) = (event for event in found if event.get("operation") == "query")
    assert asked["query"] == query["query"]
    assert "guessed" not in json.dumps(found)
    assert PASSWORD not in json.dumps(found)
    logins = [e for e in found if e["event"] == "login" and e["user"] == "User:alice"]
    assert len(logins) == 1, "the page's many connections are one login"


def test_nobody_but_the_appliance_acts_for_another_user(tmp_path: pathlib.Path) -> None:
    audit = tmp_path / "audit"
    settings = {"audit.enabled": "true", "audit.directory": str(audit)}
    with secured(tmp_path, **settings) as users:
        mallory = users.add("mallory", admin=True)
        claimed = {"user": "alice", "address": "192.0.2.7"}
        for event in ("", "login", "denied", "query"):
            with Admin(acting_address(mallory, {**claimed, "event": event})) as admin:
                admin.create_topics(NewTopic(f"made-{event}"))
        stranger = acting_address(users.context("stranger", *new_keys()), claimed)
        with (
            Admin(stranger, connect_timeout_ms=60_000) as admin,
            pytest.raises(NotAuthenticatedError),
        ):
            admin.list_topics()

        def found() -> list[dict[str, Any]]:
            return list(read_events(str(audit)))

        wait_until(
            lambda: any("no user has the key" in event.get("reason", "") for event in found()),
            "the stranger's line is written",
        )
        made = [e for e in found() if e.get("api") == "CREATE_TOPICS" and e["event"] == "request"]
        assert {event["user"] for event in made} == {"User:mallory"}
        assert not [e for e in found() if "alice" in str(e) or e.get("address") == "192.0.2.7"]
        refused = [e for e in found() if "no user has the key" in e.get("reason", "")]
        assert {(e["event"], e["user"], e["address"]) for e in refused} == {
            ("denied", "User:ANONYMOUS", "127.0.0.1")
        }
