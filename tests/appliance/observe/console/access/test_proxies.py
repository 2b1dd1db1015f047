"""The address of a client behind proxies: what a stranger writes into the header counts nothing."""

from __future__ import annotations

import pytest

from appliance.config.relations import checked_plan
from appliance.config.settings import Settings
from appliance.config.topology import read_topology
from appliance.observe.console.access.proxies import client_address, networks_of
from tailrace.core.errors import InvalidSettingError

PROXIES = networks_of(["127.0.0.1", "10.1.0.0/16", "fd00::/8"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),
        ("127.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "192.0.2.66, 198.51.100.1", "198.51.100.1"),
        ("127.0.0.1", "192.0.2.66,198.51.100.1, 10.1.2.3", "198.51.100.1"),
        ("127.0.0.1", "10.1.0.1, 10.1.2.3", "10.1.0.1"),
        ("127.0.0.1", "198.51.100.1:4711", "198.51.100.1"),
        ("127.0.0.1", "[2001:db8::7]:4711", "2001:db8::7"),
        ("127.0.0.1", "2001:db8::7", "2001:db8::7"),
        ("::ffff:127.0.0.1", "::ffff:198.51.100.1", "198.51.100.1"),
        ("fd00::1", "198.51.100.1", "198.51.100.1"),
        ("127.0.0.1", "192.0.2.66, unknown", "127.0.0.1"),
        ("127.0.0.1", "192.0.2.66, nonsense, 10.1.2.3", "10.1.2.3"),
        ("", "198.51.100.1", ""),
    ],
)
def test_the_last_address_that_is_no_proxys_counts(peer: str, forwarded: str, found: str) -> None:
    environ = {"REMOTE_ADDR": peer, "HTTP_X_FORWARDED_FOR": forwarded}
    assert client_address(environ, PROXIES) == found
    assert client_address(environ, []) == peer


@pytest.mark.parametrize("wrong", ["proxy.example", "10.0.0.1/8", "10.0.0.1:80", "", "*"])
def test_what_is_no_address_is_refused_at_the_start(wrong: str) -> None:
    settings = Settings(http_proxies=["127.0.0.1", wrong])
    with pytest.raises(InvalidSettingError, match=r"http\.proxies has .* write the address"):
        checked_plan(settings, read_topology())
