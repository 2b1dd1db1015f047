"""Addresses of clients, as sockets show them and as rules name them, are one."""

from __future__ import annotations

import pytest

from shm.rights.acl import TOPIC, checked_acl
from shm.rights.authorizer import AclTable, Principal
from shm.rights.client_hosts import network_of, plain_host

ALLOW = {
    "principal": "User:a", "resource_type": TOPIC, "name": "orders", "operation": "read",
}  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "plain", "network"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("::FFFF:a00:1", "10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1", "fe80::/64"),
        ("2001:db8:0:0::7", "2001:db8::7", "2001:db8::/64"),
        ("2001:db8::1:0:0:7", "2001:db8::1:0:0:7", "2001:db8::/64"),
        ("::1", "::1", "::/64"),
        ("", "", ""),
        ("name:of:no:host", "name:of:no:host", "name:of:no:host"),
    ],
)
def test_an_address_is_plain(shown: str, plain: str, network: str) -> None:
    assert (plain_host(shown), network_of(shown)) == (plain, network)


@pytest.mark.parametrize(
    ("rule", "client"),
    [
        ("10.0.0.1", "::ffff:10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1", "fe80::1%eth0"),
        ("fe80::1%eth1", "fe80::1"),
    ],
)
def test_a_denial_of_a_host_is_not_passed_by_over_another_kind_of_socket(
    rule: str, client: str
) -> None:
    table = AclTable()
    table.add(checked_acl(ALLOW, 1))
    table.add(checked_acl({**ALLOW, "permission": "deny", "host": rule}, 2))
    assert not Principal("a", (), client, table, is_admin=False).may("read", TOPIC, "orders")
    assert Principal("a", (), "10.0.0.2", table, is_admin=False).may("read", TOPIC, "orders")
