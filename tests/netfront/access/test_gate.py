"""The gate of a front: nobody before the feed, everybody by what is in force now."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import orjson
import pytest
import zmq
from zmq.utils import z85

from netfront.access.gate import Gate
from netfront.access.page_tokens import PageTokens
from netfront.fetch.lookup import metadata_service
from netfront.session.sessions import Session
from netfront.socket.flow_control import Credit
from netfront.socket.zap import TOKEN, Claim, claim_of, decode_claim, encode_claim
from shm.messages.lane_messages import LaneKind
from shm.rights.acl import check_user_name
from shm.rights.authorizer import APPLIANCE
from shm.rights.users import Key, User
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError
from tailrace.protocol.frame import Api, WireError
from tests.kit.stepped.fronts import FakeFront

A, B, OWN = (zmq.curve_keypair()[0] for _ in range(3))


def claim(key: bytes, host: str = "10.0.0.1") -> Claim:
    return Claim(z85.decode(key), -1, host)


def user(name: str, *keys: bytes, **fields: Any) -> dict[str, Any]:
    made = [Key(f"k{number}", key.decode(), 1) for number, key in enumerate(keys)]
    return User(name, keys=tuple(made), **fields).shown()


def acl(number: int, principal: str, operation: str, name: str) -> dict[str, Any]:
    return {
        "number": number, "principal": principal, "resource_type": "topic", "pattern": "literal",
        "name": name, "operation": operation, "permission": "allow", "host": "*",
    }  # fmt: skip


class Clock:
    now_us = 1_000

    def __call__(self) -> int:
        return self.now_us


def gate_with(*users: dict[str, Any], acls: tuple[dict[str, Any], ...] = ()) -> Gate:
    gate = Gate(OWN.decode(), Clock())
    feed(gate, *users, acls=acls)
    return gate


def feed(gate: Gate, *users: dict[str, Any], acls: tuple[dict[str, Any], ...] = ()) -> None:
    gate.on_rights(orjson.dumps({"users": users}), True)
    gate.on_rights(orjson.dumps({"acls": acls}), False)
    gate.on_fed()


def session(gate: Gate, number: int, who: Claim) -> Session:
    made = Session(number, number, b"%d" % number, "c", Credit(), 0)
    made.principal = gate.admit(who)
    gate.note(made, who)
    return made


def refusal(gate: Gate, who: Claim | None) -> str:
    with pytest.raises(WireError) as caught:
        gate.admit(who)
    assert caught.value.code is ErrorCode.NOT_AUTHENTICATED
    return caught.value.detail


def test_nobody_is_let_in_before_the_feed_is_complete() -> None:
    gate = Gate(OWN.decode(), Clock())
    assert not gate.allows(claim(A))
    assert "does not know" in refusal(gate, claim(A))
    gate.on_rights(orjson.dumps({"users": [user("a", A)]}), True)
    assert not gate.allows(claim(A))
    gate.on_fed()
    assert gate.allows(claim(A))
    assert gate.admit(claim(A)).user == "a"
    assert "does not know" in refusal(gate, None)


def test_an_appliance_without_users_lets_its_own_clients_in_alone() -> None:
    gate = Gate(OWN.decode(), Clock())
    gate.on_fed()
    assert gate.allows(claim(OWN))
    assert gate.admit(claim(OWN)).is_admin
    assert gate.admit(claim(OWN)).user == APPLIANCE
    assert not gate.allows(claim(A))


def test_a_later_feed_replaces_everything_when_it_is_complete() -> None:
    gate = gate_with(user("a", A), user("b", B))
    live = session(gate, 1, claim(A))
    gate.on_rights(orjson.dumps({"users": [user("b", B)]}), True)
    assert gate.admit(claim(A)).user == "a", "in force until the feed is complete"
    assert gate.take_ended(0) == []
    gate.on_fed()
    assert [ended for ended, _ in gate.take_ended(0)] == [live]
    assert "unknown" in refusal(gate, claim(A))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"removed_users": ["a"]}, "unknown"),
        ({"users": [user("a", A, is_disabled=True)]}, "disabled"),
        ({"users": [user("a", B)]}, "unknown"),
        ({"removed_users": ["a"], "users": [user("b", A)]}, "another user"),
    ],
)
def test_a_change_of_a_user_ends_its_sessions(change: dict[str, Any], reason: str) -> None:
    gate = gate_with(user("a", A), user("other"))
    live = session(gate, 1, claim(A))
    own = session(gate, 2, claim(OWN))
    gate.on_rights(orjson.dumps(change), False)
    assert gate.check_at_ns == 0
    [(ended, told)] = gate.take_ended(0)
    assert ended is live
    assert reason in told
    gate.forget(live)
    gate.forget(own)
    assert gate._sessions == {}


def test_a_session_follows_the_groups_and_role_of_its_user() -> None:
    gate = gate_with(user("a", A), acls=(acl(1, "Group:g", "read", "t"),))
    live = session(gate, 1, claim(A))
    assert live.principal is not None
    assert not live.principal.may("read", "topic", "t")
    gate.on_rights(orjson.dumps({"users": [user("a", A, groups=("g",))]}), False)
    assert live.principal.may("read", "topic", "t")
    assert not live.principal.may("write", "topic", "t")
    gate.on_rights(orjson.dumps({"users": [user("a", A, is_admin=True)]}), False)
    assert live.principal.may("write", "topic", "t")


def test_a_key_that_expires_ends_its_session_and_no_other() -> None:
    clock = Clock()
    gate = Gate(OWN.decode(), clock)
    end_us = 5_000_000
    both = User("a", keys=(Key("k", A.decode(), 1, end_us), Key("l", B.decode(), 1))).shown()
    feed(gate, both)
    expiring, staying = session(gate, 1, claim(A)), session(gate, 2, claim(B))
    assert gate.take_ended(0) == []
    clock.now_us = end_us
    [(ended, told)] = gate.take_ended(gate.check_at_ns)
    assert ended is expiring
    assert "has expired at 1970-01-01T00:00:05Z" in told
    assert staying.principal is not None
    assert "expired" in refusal(gate, claim(A))


def test_an_account_stands_for_a_user_over_a_unix_socket_alone() -> None:
    gate = gate_with(user("a", accounts=(7,)))
    assert gate.admit(Claim(b"", 7, "")).user == "a"
    other = os.geteuid() + 1
    assert f"account {other} of this host stands for" in refusal(gate, Claim(b"", other, ""))


def test_the_account_of_the_appliance_is_the_appliance_unless_it_stands_for_a_user() -> None:
    own = Claim(b"", os.geteuid(), "")
    gate = Gate(OWN.decode(), Clock())
    assert "does not know" in refusal(gate, own)
    feed(gate, user("a", A))
    assert gate.admit(own).user == APPLIANCE
    feed(gate, user("a", A, accounts=(os.geteuid(),)))
    assert gate.admit(own).user == "a"


def test_users_that_cannot_be_read_are_refused_in_words_and_no_account_is_the_appliance(
    tmp_path: pathlib.Path,
) -> None:
    gate = Gate(OWN.decode(), Clock())
    feed = {"catalog": str(tmp_path / "coordinator.db"), "credentials": False}
    gate.on_rights(orjson.dumps(feed), True)
    gate.on_fed()
    assert gate.allows(claim(A)), "the response to its handshake says why it is refused"
    for who in (
        claim(A), Claim(b"", os.geteuid() + 1, ""), Claim(b"", os.geteuid(), ""),
        Claim(b"", -1, "h", "a", TOKEN),
    ):  # fmt: skip
        assert "cannot read its users" in refusal(gate, who)
    assert gate.admit(claim(OWN)).user == APPLIANCE


def test_no_user_can_have_the_name_of_the_appliance() -> None:
    with pytest.raises(InvalidRequestError):
        check_user_name(APPLIANCE)
    gate = gate_with(user("appliance", A))
    assert gate.admit(claim(OWN)).is_admin
    assert not gate.admit(claim(A)).is_admin


def test_an_api_without_a_rule_is_for_administrators() -> None:
    gate = gate_with(user("a", A), user("root", B, is_admin=True))
    with pytest.raises(WireError, match="API 999 has no rule"):
        gate.check(gate.admit(claim(A)), 999, {}, b"{}")
    assert gate.check(gate.admit(claim(B)), 999, {}, b"{}") == b"{}"


def test_a_member_subscribes_to_what_it_may_see() -> None:
    member = {**acl(2, "User:a", "read", "g"), "resource_type": "group"}
    rules = (acl(1, "User:a", "read", "t"), member)
    gate = gate_with(user("a", A), acls=rules)
    request = {"group": "g", "topics": ["t", "hidden"]}
    body = orjson.dumps(request)
    seen = gate.check(gate.admit(claim(A)), Api.GROUP_HEARTBEAT, request, body)
    assert orjson.loads(seen) == {"group": "g", "topics": ["t"]}
    request = {"group": "g", "topics": ["t"]}
    body = orjson.dumps(request)
    assert gate.check(gate.admit(claim(A)), Api.GROUP_HEARTBEAT, request, body) is body


# ---- ZAP -----------------------------------------------------------------------------------------


def zap(mechanism: bytes, *credentials: bytes, address: bytes = b"10.0.0.1") -> list[bytes]:
    return [b"1.0", b"1", b"tailrace", address, b"id", mechanism, *credentials]


def test_a_claim_is_what_libzmq_has_checked() -> None:
    key = bytes(range(32))
    assert claim_of(zap(b"CURVE", key)) == Claim(key, -1, "10.0.0.1")
    assert claim_of(zap(b"NULL", address=b"localhost:1000:100:77")) == Claim(b"", 1000, "")
    for found in (Claim(key, -1, "10.0.0.1"), Claim(b"", 7, ""), Claim(key, -1, "fe80::1/x")):
        assert decode_claim(encode_claim(found).decode()) == found


@pytest.mark.parametrize(
    "request_frames",
    [
        zap(b"CURVE"), zap(b"CURVE", b"short"), zap(b"CURVE", bytes(32), b"more"),
        zap(b"PLAIN", b"user", b"password"), zap(b"GSSAPI", b"x"),
        [b"2.0", *zap(b"CURVE", bytes(32))[1:]],
        [*zap(b"CURVE", bytes(32))[:2], b"other", *zap(b"CURVE", bytes(32))[3:]],
        zap(b"NULL", address=b"localhost:-1:0:1"), zap(b"NULL", address=b"10.0.0.1"),
        zap(b"NULL", address=b""), zap(b"NULL", address=b"::ffff:10.0.0.1"), zap(b""),
    ],
)  # fmt: skip
def test_other_mechanisms_and_domains_make_no_claim(request_frames: list[bytes]) -> None:
    assert claim_of(request_frames) is None


def test_requests_of_members_have_the_user_whom_the_client_cannot_name() -> None:
    gate = gate_with(user("a", A))
    principal = gate.admit(claim(A))
    given = {
        "group": "g", "user": "b", "acknowledgements": [{"group": "g", "user": "b"}, 7],
        "offsets": [{"group": "g"}, ["t", 0, 1]],
    }  # fmt: skip
    body = gate.with_user(principal, Api.END_TRANSACTION, orjson.dumps(given))
    assert orjson.loads(body) == {
        "group": "g", "user": "a", "acknowledgements": [{"group": "g", "user": "a"}, 7],
        "offsets": [{"group": "g", "user": "a"}, ["t", 0, 1]],
    }  # fmt: skip
    for api in (
        Api.SHARE_ACQUIRE, Api.SHARE_ACKNOWLEDGE, Api.GROUP_HEARTBEAT, Api.COMMIT_OFFSETS,
        Api.LEASE_OFFSETS,
    ):  # fmt: skip
        assert orjson.loads(gate.with_user(principal, api, b'{"user":"b"}')) == {"user": "a"}
    assert gate.with_user(principal, Api.LIST_GROUPS, b"{}") == b"{}"


@pytest.mark.parametrize(
    ("api", "rows", "field", "token"),
    [
        (
            Api.LIST_DELETED_TOPICS, {"topics": [{"name": "t"}, {"name": "secret"}]}, "next",
            "secret",
        ),
        (Api.LIST_DELETED_TOPICS, {"topics": []}, "next", "secret"),
        (
            Api.DESCRIBE_DELAYS, {"partitions": [{"topic": "secret", "partition": 7}]}, "after",
            ["secret", 7],
        ),
        (Api.FETCH_OFFSETS, {"offsets": [["secret", 3, 9]]}, "next", ["secret", 3]),
        (Api.LIST_DELETED_TOPICS, {"topics": [{"name": "t"}]}, "next", "secret"),
    ],
)  # fmt: skip
def test_a_page_token_tells_no_name_that_its_reader_may_not_see(
    api: Api, rows: dict[str, Any], field: str, token: Any
) -> None:
    gate = gate_with(user("a", A), acls=(acl(1, "User:a", "describe", "t"),))
    principal = gate.admit(claim(A))
    shown = gate.shown(principal, api, orjson.dumps({**rows, field: token}))
    assert b"secret" not in shown
    request = {field: orjson.loads(shown)[field]}
    assert gate.opened(principal, api, request)
    assert request == {field: token}
    later = gate_with(user("a", A))
    with pytest.raises(WireError, match="begin the list again"):
        later.opened(principal, api, {field: orjson.loads(shown)[field]})


def test_a_page_token_that_names_a_shown_row_stays_as_it_is() -> None:
    gate = gate_with(user("a", A), acls=(acl(1, "User:a", "describe", "t"),))
    principal = gate.admit(claim(A))
    for api, answer in (
        (Api.LIST_DELETED_TOPICS, {"topics": [{"name": "t"}], "next": "t"}),
        (Api.DESCRIBE_DELAYS, {"partitions": [{"topic": "t"}], "after": ["t", 0]}),
        (Api.LIST_DELETED_TOPICS, {"topics": [{"name": "t"}], "next": None}),
    ):
        assert orjson.loads(gate.shown(principal, api, orjson.dumps(answer))) == answer
    assert not gate.opened(principal, Api.LIST_DELETED_TOPICS, {"next": "t"})


@pytest.mark.parametrize("token", ["\0", "\0x", "\0" + "A" * 80, "\0\u20ac", "\0====", "\0A"])
def test_a_token_that_was_not_sealed_here_is_refused(token: str) -> None:
    with pytest.raises(WireError, match="begin the list again"):
        PageTokens(b"secret").open(token)


@pytest.mark.parametrize("name", ["", "x", "\u20ac" * 80, "\0", "x" * 249])
def test_tokens_are_opened_by_whoever_has_the_secret_and_differ_each_time(name: str) -> None:
    tokens = PageTokens(b"secret")
    first, second = tokens.seal(name), tokens.seal(name)
    assert first != second
    assert PageTokens(b"secret").open(first) == PageTokens(b"secret").open(second) == name
    changed = first[:30] + ("A" if first[30] != "A" else "B") + first[31:]
    with pytest.raises(WireError):
        tokens.open(changed)


def test_pages_of_topic_names_tell_no_hidden_name_and_miss_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_service, "TOPICS_AT_ONCE_MAX", 2)
    world = FakeFront()
    for name in ("a", "hidden-1", "b", "hidden-2", "hidden-3", "z"):
        world.add_topic(name, 1)
    gate = gate_with(user("a", A), acls=tuple(
        acl(number, "User:a", "describe", name) for number, name in enumerate("abz", 1)
    ))  # fmt: skip
    world.front._metadata_service.tokens = gate.tokens
    client = world.connect(b"c")
    made = world.front._sessions.by_identity(b"c")
    assert made is not None
    made.principal = gate.admit(claim(A))
    after: str | None = ""
    found: list[str] = []
    tokens: list[str | None] = []
    while after is not None:
        request = {"topics": None, "names_only": True, "after": after}
        code, answer = client.ask(Api.METADATA, request)
        assert code is ErrorCode.OK
        found += [topic["name"] for topic in answer["topics"]]
        after = answer["after"]
        tokens.append(after)
    assert found == ["a", "b", "z"]
    assert len(tokens) == 3
    assert "hidden" not in str(tokens)


@pytest.mark.parametrize("is_caught_up", [False, True])
def test_no_request_is_handled_behind_the_change_that_ends_its_session(is_caught_up: bool) -> None:
    """The front reads the change at the beginning of its step, or before a request."""
    gate = Gate(OWN.decode(), Clock())
    gate.on_rights(orjson.dumps({"users": [user("a", A), user("b", B)]}), True)
    world = FakeFront(gate=gate)
    world.transport.claims = {b"one": claim(A), b"other": claim(B)}
    one, other = world.connect(b"one"), world.connect(b"other")
    lane = world.controller.answers
    change = orjson.dumps({"users": [user("a", A, is_disabled=True)]})
    asked = [one.send(Api.PING), other.send(Api.PING)]
    if is_caught_up:
        read, world.front._forwarding.step = world.front._forwarding.step, lambda: 0  # type: ignore[method-assign]
    assert lane.try_write(LaneKind.RIGHTS, 0, 0, 0, 0, 0, (change,))
    lane.commit()
    world.step()
    if is_caught_up:
        world.front._forwarding.step = read  # type: ignore[method-assign]
    assert one.heard()[asked[0]][0] is ErrorCode.SESSION_UNKNOWN
    assert other.heard()[asked[1]][0] is ErrorCode.OK
    assert world.transport.closed == {b"one": "user 'a' is disabled"}
