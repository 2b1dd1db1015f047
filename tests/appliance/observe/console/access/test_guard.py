"""Requests that the page refuses: foreign names, other origins, changes without the token."""

from __future__ import annotations

import pytest

from appliance.observe.console.access.guard import SECURITY_HEADERS, refuse_change, refuse_stranger

NAMES = frozenset({"broker.example"})


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:7400", "localhost:7400", "[::1]:7400", "10.1.2.3", "broker.example", "LOCALHOST"],
)
def test_its_own_names_and_addresses_are_served(host: str) -> None:
    assert refuse_stranger({"HTTP_HOST": host}, NAMES) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example:7400", "", "127.0.0.1.evil.example", "localhost.evil.example", "[evil]", "1"],
)
def test_a_name_that_was_rebound_to_this_host_is_refused(host: str) -> None:
    refusal = refuse_stranger({"HTTP_HOST": host}, NAMES)
    assert refusal is not None
    assert refusal.status.startswith("421")
    assert "http.hosts" in refusal.reason


@pytest.mark.parametrize(
    "headers",
    [
        {"HTTP_ORIGIN": "http://evil.example"},
        {"HTTP_ORIGIN": "null"},
        {"HTTP_ORIGIN": "http://localhost:7401"},
        {"HTTP_SEC_FETCH_SITE": "cross-site"},
        {"HTTP_SEC_FETCH_SITE": "same-site"},
    ],
)
def test_a_page_of_another_origin_is_refused(headers: dict[str, str]) -> None:
    refusal = refuse_stranger({"HTTP_HOST": "localhost:7400", **headers}, NAMES)
    assert refusal is not None
    assert refusal.status.startswith("403")


@pytest.mark.parametrize(
    "headers", [{"HTTP_ORIGIN": "http://localhost:7400"}, {"HTTP_SEC_FETCH_SITE": "none"}, {}]
)
def test_its_own_page_and_programs_are_served(headers: dict[str, str]) -> None:
    assert refuse_stranger({"HTTP_HOST": "localhost:7400", **headers}, NAMES) is None


@pytest.mark.parametrize(
    ("given", "status"),
    [(None, "401"), ("Basic abc", "401"), ("Bearer abc", "403"), ("Bearer ", "403")],
)
def test_a_change_without_the_token_is_refused(given: str | None, status: str) -> None:
    refusal = refuse_change({} if given is None else {"HTTP_AUTHORIZATION": given}, "secret")
    assert refusal is not None
    assert refusal.status.startswith(status)
    assert "secret" not in refusal.reason


def test_a_change_with_the_token_is_allowed_and_none_while_there_is_no_token() -> None:
    assert refuse_change({"HTTP_AUTHORIZATION": "Bearer secret"}, "secret") is None
    assert refuse_change({"HTTP_AUTHORIZATION": "Bearer "}, "") is not None


def test_the_policy_lets_no_script_but_the_pages_own_run() -> None:
    policy = dict(SECURITY_HEADERS)["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
