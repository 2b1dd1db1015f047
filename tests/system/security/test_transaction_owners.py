"""Transactions of users: nobody writes in, continues or ends the transaction of another one."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.client.connections.credentials import Credentials, resolve
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import checksum_seed
from tailrace.protocol.frame import Api
from tests.kit.appliances.secured import Users, secured
from tests.kit.batches import make_batch
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import kill_and_wait_for_successor, wait_until

PARTITIONS = 8


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    with secured(tmp_path_factory.mktemp("owners"), fronts=2) as found:
        found.admin.create_topics(
            [
                NewTopic("ledger", configs={"delay.enabled": True}),
                NewTopic("wide", PARTITIONS),
            ]
        )
        yield found


def raw(users: Users, context: str) -> RawClient:
    return RawClient(users.appliance.address, credentials=credentials_of(context))


def credentials_of(context: str) -> Credentials:
    found = resolve(context).credentials
    assert found is not None
    return found


def begin(client: RawClient, transactional_id: str) -> dict[str, Any]:
    request = {"transactional_id": transactional_id, "timeout_ms": 60_000}
    code, owner = client.ask(Api.INIT_TRANSACTIONS, request)
    assert code is ErrorCode.OK, owner
    return {
        "transactional_id": transactional_id,
        **{name: owner[name] for name in ("producer_id", "producer_epoch", "owner")},
    }


def write(
    client: RawClient, topic_id: bytes, owner: dict[str, Any], sequence: int = 0,
) -> ErrorCode:  # fmt: skip
    """The outcome of one batch, behind the look-up of its owner."""
    batch = make_batch(
        producer_id=owner["producer_id"], epoch=owner["producer_epoch"], sequence=sequence,
        seed=checksum_seed(topic_id, 0),
    )  # fmt: skip
    codes: list[ErrorCode] = []

    def is_decided() -> bool:
        _, (entry,) = client.produced(client.produce([(topic_id, 0, batch)]))
        codes.append(ErrorCode(entry.error))
        return codes[-1] is not ErrorCode.CONCURRENT_TRANSACTIONS

    wait_until(is_decided, "the owner of the transaction is known")
    return codes[-1]


def topic_id_of(client: RawClient) -> bytes:
    _, answer = client.ask(Api.METADATA, {"topics": ["ledger"]})
    return bytes.fromhex(answer["topics"][0]["topic_id"])


def test_a_guessed_producer_id_does_not_open_the_transaction_of_another_user(users: Users) -> None:
    """Producer ids are numbers in a row, and epochs are small."""
    victim = users.add("victim", "write topic ledger", "write transactional-id victim.")
    thief = users.add("thief", "write topic ledger", "write transactional-id thief.")
    with raw(users, victim) as client, raw(users, thief) as other:
        topic_id = topic_id_of(client)
        owner = begin(client, "victim.1")
        assert write(client, topic_id, owner) is ErrorCode.OK
        assert write(other, topic_id, owner, 3) is ErrorCode.NOT_AUTHORIZED
        nobody = {**owner, "producer_id": owner["producer_id"] + 1_000_000}
        assert write(other, topic_id, nobody) is ErrorCode.PRODUCER_FENCED
        mine = begin(other, "thief.1")
        assert write(other, topic_id, mine) is ErrorCode.OK
        assert write(client, topic_id, owner, 3) is ErrorCode.OK
        code, answer = client.ask(Api.END_TRANSACTION, {**owner, "outcome": "commit"})
        assert (code, answer["outcome"]) == (ErrorCode.OK, "commit")


def test_two_users_of_one_transactional_id_take_it_over_and_write_in_no_others_transaction(
    users: Users,
) -> None:
    rights = "write topic ledger", "write transactional-id shared.", "describe cluster"
    first, second = users.add("first", *rights), users.add("second", *rights)
    with raw(users, first) as client, raw(users, second) as other:
        topic_id = topic_id_of(client)
        owner = begin(client, "shared.1")
        assert write(client, topic_id, owner) is ErrorCode.OK
        assert write(other, topic_id, owner, 3) is ErrorCode.NOT_AUTHORIZED
        _, branches = client.ask(Api.CREATE_BRANCHES, {**owner, "count": 1})
        assert branches == {"count": 1}
        for api, more in (
            (Api.END_TRANSACTION, {"outcome": "commit"}),
            (Api.END_TRANSACTION, {"outcome": "prepare"}),
            (Api.END_TRANSACTION, {"outcome": "prepare", "by_id": True}),
            (Api.CREATE_BRANCHES, {"count": 1}),
            (Api.JOIN_TRANSACTION, {"attempt": "task-1"}),
            (Api.DESCRIBE_TRANSACTION, {}),
        ):
            code, answer = other.ask(api, {**owner, **more, "user": "first"})
            assert code is ErrorCode.NOT_AUTHORIZED, (api, answer)
        taken = begin(other, "shared.1")
        assert taken["producer_id"] != owner["producer_id"], "a producer id has one user for ever"
        assert write(other, topic_id, taken) is ErrorCode.OK
        assert write(client, topic_id, taken, 3) is ErrorCode.NOT_AUTHORIZED
        assert write(client, topic_id, owner, 3) is ErrorCode.PRODUCER_FENCED


def test_a_prepared_transaction_and_a_named_owner_are_not_taken_over_by_another_user(
    users: Users,
) -> None:
    rights = "write topic ledger", "write transactional-id named."
    first, second = users.add("named-1", *rights), users.add("named-2", *rights)
    with raw(users, first) as client, raw(users, second) as other:
        named = {
            "transactional_id": "named.1", "timeout_ms": 60_000, "attempt": "run-7", "shared": True
        }  # fmt: skip
        assert client.ask(Api.INIT_TRANSACTIONS, named)[0] is ErrorCode.OK
        code, answer = other.ask(Api.INIT_TRANSACTIONS, named)
        assert (code, "another user" in answer["message"]) == (ErrorCode.NOT_AUTHORIZED, True)
        owner = begin(client, "named.2")
        assert write(client, topic_id_of(client), owner) is ErrorCode.OK
        code, _ = client.ask(Api.END_TRANSACTION, {**owner, "outcome": "prepare", "tag": "x"})
        assert code is ErrorCode.OK
        code, answer = other.ask(
            Api.INIT_TRANSACTIONS,
            {"transactional_id": "named.2", "timeout_ms": 60_000, "keep_prepared": True},
        )
        assert (code, "another user" in answer["message"]) == (ErrorCode.NOT_AUTHORIZED, True)


def test_a_user_without_the_right_any_more_writes_nothing_more(users: Users) -> None:
    context = users.add("leaver", "write topic ledger", "write transactional-id leaver.")
    with raw(users, context) as client:
        topic_id = topic_id_of(client)
        owner = begin(client, "leaver.1")
        assert write(client, topic_id, owner) is ErrorCode.OK
        users.admin.remove_acls([{"principal": "User:leaver", "resource_type": "transactional-id"}])
        sequences = iter(range(3, 1 << 30, 3))
        wait_until(
            lambda: write(client, topic_id, owner, next(sequences)) is ErrorCode.NOT_AUTHORIZED,
            "the right is gone",
        )


def test_transactions_go_on_over_all_fronts_and_a_killed_coordinator(users: Users) -> None:
    """Each front asks for itself; a restarted coordinator knows the users from its database."""
    context = users.add(
        "steady", "write topic wide", "write transactional-id steady.", "read topic wide",
    )  # fmt: skip
    with Producer(context, transactional_id="steady.1") as producer:
        producer.init_transactions()
        for turn in range(3):
            with producer.transaction():
                for partition in range(PARTITIONS):
                    producer.send("wide", b"steady-%d" % turn, partition=partition)
                if turn == 1:
                    kill_and_wait_for_successor(users.appliance, "tr-groups-0")
                if turn == 2:
                    kill_and_wait_for_successor(users.appliance, "tr-front-1")
    with Consumer(
        "wide", bootstrap=context, auto_offset_reset="earliest",
        isolation_level="read_committed",
    ) as consumer:  # fmt: skip
        found: list[bytes] = []

        def has_all() -> bool:
            records = consumer.poll(timeout_ms=500)
            found.extend(r.value for r in records if r.value and r.value.startswith(b"steady"))
            return len(found) >= 3 * PARTITIONS

        wait_until(has_all, "all transactions are read")
    assert sorted(found) == sorted(b"steady-%d" % n for n in range(3) for _ in range(PARTITIONS))


def test_delayed_records_are_not_changed_in_the_transaction_of_another_user(users: Users) -> None:
    rights = "write topic ledger", "read topic ledger", "describe delay ledger"
    owner = users.add("keeper", *rights, "alter delay ledger", "write transactional-id keeper.")
    other = users.add("meddler", *rights, "alter delay ledger", "write transactional-id meddler.")
    with Producer(owner) as producer:
        handle = producer.send("ledger", b"later", deliver_after=dt.timedelta(days=1))
        token = handle.result(60).delay_id
    with raw(users, owner) as client, raw(users, other) as stranger:
        mine = begin(client, "keeper.1")
        change: dict[str, Any] = {
            "topic": "ledger", "changes": [{"delay_id": token, "due_us": None}],
            "transaction": {
                "producer_id": mine["producer_id"], "producer_epoch": mine["producer_epoch"],
                "number": 1,
            },
        }  # fmt: skip
        assert stranger.ask(Api.CHANGE_DELAYS, change)[0] is ErrorCode.NOT_AUTHORIZED
        nobody = {**change, "transaction": {**change["transaction"], "producer_id": 1 << 62}}
        assert stranger.ask(Api.CHANGE_DELAYS, nobody)[0] is ErrorCode.PRODUCER_FENCED
        code, answer = client.ask(Api.CHANGE_DELAYS, change)
        assert (code, answer["results"][0]["code"]) == (ErrorCode.OK, 0), answer
        assert client.ask(Api.END_TRANSACTION, {**mine, "outcome": "commit"})[0] is ErrorCode.OK
    with Admin(owner) as admin:
        assert list(admin.list_delays("ledger")) == []
