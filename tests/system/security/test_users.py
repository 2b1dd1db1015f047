"""Users of a running appliance: who is let in, what they may do, and what strangers are told."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import pathlib
import socket
import stat
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import zmq

from appliance.cli.commands.users.common import served_at
from tailrace import (
    Admin,
    Consumer,
    NewTopic,
    Producer,
    ShareConsumer,
    TailraceError,
    TopicPartition,
)
from tailrace.client.connections.credentials import resolve
from tailrace.client.connections.steps import call
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    NotAuthenticatedError,
    NotAuthorizedError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import start_embedded
from tailrace.protocol.fetch_messages import FetchEntry, FetchRequest
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_json
from tests.kit.appliances.secured import Users, acl, admin_address, new_keys, secured
from tests.kit.batches import make_batch
from tests.kit.peers.needs import CASES
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import kill_and_wait_for_successor, wait_until

WAIT_MS = 60_000


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    directory = tmp_path_factory.mktemp("users")
    socket_path = directory / "tailrace.sock"
    with secured(directory, ["tcp://127.0.0.1:0", f"ipc://{socket_path}"]) as found:
        found.admin.create_topics([NewTopic("orders", 2), NewTopic("secret")])
        yield found


def refusal(address: str) -> str:
    """The sentence that a client at this address gets."""
    with (
        Admin(address, connect_timeout_ms=WAIT_MS) as admin,
        pytest.raises(NotAuthenticatedError) as caught,
    ):
        admin.list_topics()
    return caught.value.detail


def poll_until_refused(consumer: Consumer | ShareConsumer) -> None:
    while True:
        consumer.poll(timeout_ms=1_000)


# ---- who -----------------------------------------------------------------------------------------


def test_the_first_start_makes_keys_that_their_owner_alone_can_read(users: Users) -> None:
    for name in ("server.key", "own.context", "admin.context"):
        mode = os.stat(f"{users.appliance.data_dir}/{name}").st_mode
        assert stat.S_IMODE(mode) == 0o600


def test_every_file_of_the_data_directory_is_for_its_owner_alone(tmp_path: pathlib.Path) -> None:
    before = os.umask(0o022)
    try:
        appliance = start_embedded(
            data_dir=str(tmp_path / "data"), settings={"security.enabled": True}
        )
    finally:
        os.umask(before)
    try:
        with (
            Admin(admin_address(appliance)) as admin,
            Producer(admin_address(appliance)) as producer,
        ):
            admin.create_topics([NewTopic("t", 1, {"delay.enabled": True})])
            producer.send("t", b"x").result(60)
        found = {}
        for directory, names, files in os.walk(appliance.data_dir):
            for path in (os.path.join(directory, name) for name in ("", *names, *files)):
                found[path] = os.lstat(path).st_mode
    finally:
        appliance.stop()
    assert len(found) > 20
    assert [
        (path, stat.filemode(mode))
        for path, mode in found.items()
        if mode & 0o077 and not stat.S_ISLNK(mode)
    ] == []


def test_a_client_without_a_key_is_told_to_get_one(users: Users) -> None:
    assert "this client has no key" in refusal(users.appliance.address)


def test_an_unknown_key_is_refused_with_a_sentence(users: Users) -> None:
    address = users.context("stranger", *new_keys())
    assert "does not know the key" in refusal(address)


def test_a_key_without_its_secret_tells_nothing_of_who_has_it(users: Users) -> None:
    """The handshake fails before the appliance looks for the key, whether a user has it or not."""
    known, _ = new_keys()
    users.admin.add_user("public", public_key=known)
    unknown, _ = new_keys()
    told = {
        refusal(users.context(name, public, new_keys()[1]))
        for name, public in (("guesser", known), ("other-guesser", unknown))
    }
    assert len(told) == 1
    assert "public" not in told.pop()


def test_another_appliances_server_key_is_refused_with_a_sentence(users: Users) -> None:
    public, secret = new_keys()
    users.admin.add_user("wrong-server", public_key=public)
    address = users.context("wrong-server", public, secret, server_keys=[new_keys()[0]])
    assert "its server key is not that of this context" in refusal(address)


def test_a_context_at_an_appliance_without_users_is_told_so(
    users: Users, tmp_path: pathlib.Path
) -> None:
    from tailrace.embedded_appliance import start_embedded

    plain = start_embedded()
    try:
        path = users.add("misled").removeprefix("context:")
        assert "takes no encrypted connections" in refusal(f"context:{path}#{plain.address}")
        assert not os.path.exists(f"{plain.data_dir}/server.key")
    finally:
        plain.stop()


def test_a_disabled_user_is_told_so_and_its_live_session_ends(users: Users) -> None:
    address = users.add("ada", "describe topic orders")
    with Admin(address) as live:
        assert live.list_topics() == ["orders"]
        users.admin.disable_user("ada")
        assert "user 'ada' is disabled" in refusal(address)
        with pytest.raises(NotAuthenticatedError, match="'ada' is disabled"):
            live.list_topics()
    users.admin.enable_user("ada")
    with Admin(address) as admin:
        assert admin.list_topics() == ["orders"]


def test_a_deleted_users_key_is_unknown_and_its_live_session_ends(users: Users) -> None:
    address = users.add("bob", "describe topic orders")
    with Admin(address) as live:
        live.list_topics()
        users.admin.delete_user("bob")
        with pytest.raises(NotAuthenticatedError, match="does not know the key"):
            live.list_topics()


def test_a_key_expires_while_it_is_in_use(users: Users) -> None:
    end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=2)
    address = users.add("eve", "describe topic orders", expires=end)
    with Admin(address) as live:
        live.list_topics()

        def has_ended() -> bool:
            try:
                live.list_topics()
            except NotAuthenticatedError as error:
                return "has expired" in error.detail
            return False

        wait_until(has_ended, "the session ends with its key")


def test_a_user_has_several_keys_and_loses_one(users: Users) -> None:
    first = users.add("kim", "describe topic orders")
    public, secret = new_keys()
    users.admin.add_user_key("kim", "second", public)
    second = users.context("kim-2", public, secret)
    with Admin(first) as one, Admin(second) as other:
        assert one.list_topics() == other.list_topics() == ["orders"]
        users.admin.remove_user_key("kim", "first")
        with pytest.raises(NotAuthenticatedError):
            one.list_topics()
        assert other.list_topics() == ["orders"]


def test_a_unix_socket_knows_the_account_at_its_other_end(users: Users) -> None:
    address = users.appliance.addresses[-1]
    if not address.startswith("ipc://"):
        address = f"ipc://{users.directory}/tailrace.sock"
    with Admin(address) as admin:
        assert "secret" in admin.list_topics(), "the appliance's own account may do everything"
    users.admin.add_user("local", accounts=[os.getuid()])
    users.allow("User:local", "describe topic orders")
    with Admin(address) as admin:
        assert admin.list_topics() == ["orders"]
    users.admin.delete_user("local")


def test_the_contexts_are_of_use_where_a_unix_socket_is_the_first_address(
    tmp_path: pathlib.Path,
) -> None:
    with secured(tmp_path, [f"ipc://{tmp_path}/first.sock", "tcp://127.0.0.1:0"]) as found:
        over_tcp, data_dir = found.appliance.addresses[1], found.appliance.data_dir
        for name in ("own", "admin"):
            bootstrap = orjson.loads(pathlib.Path(data_dir, f"{name}.context").read_bytes())[
                "bootstrap"
            ]
            assert bootstrap.startswith("tcp://")
            for address in (over_tcp, found.appliance.addresses[0]):
                with Admin(f"context:{data_dir}/{name}.context#{address}") as admin:
                    assert admin.list_topics() == []
        served = served_at(data_dir)
        assert served is not None
        assert served.endswith(over_tcp)


def test_a_user_with_the_name_of_the_appliance_has_no_rights_of_it(users: Users) -> None:
    own = f"context:{users.appliance.data_dir}/own.context#{users.appliance.address}"
    with Admin(own) as admin:
        assert "secret" in admin.list_topics()
    with Admin(users.add("appliance", "describe topic orders")) as admin:
        assert admin.list_topics() == ["orders"]
    with pytest.raises(InvalidRequestError):
        users.admin.add_user("(appliance)", public_key=new_keys()[0])


def test_the_console_and_metrics_work(users: Users) -> None:
    """The appliance's own clients have a context of their own."""
    path = f"{users.appliance.data_dir}/own.context#{users.appliance.address}"
    with Admin(f"context:{path}") as admin:
        assert "secret" in admin.list_topics()


# ---- what they may do ----------------------------------------------------------------------------


def test_a_producer_and_a_consumer_with_the_rights_of_their_roles(users: Users) -> None:
    writer = users.add("writer", "write topic orders")
    reader = users.add("reader", "read topic orders", "read group billing.")
    with Producer(writer) as producer:
        for number in range(10):
            producer.send("orders", b"%d" % number)
        producer.flush()
        with pytest.raises(TailraceError):
            producer.send("secret", b"x").result(60)
    with Consumer(
        "orders", bootstrap=reader, group_id="billing.1", auto_offset_reset="earliest"
    ) as consumer:
        values: list[bytes] = []
        while len(values) < 10:
            values += [bytes(record.value or b"") for record in consumer.poll(timeout_ms=1_000)]
        consumer.commit()
    assert sorted(values) == [b"%d" % number for number in range(10)]
    with (
        Consumer("orders", bootstrap=writer, auto_offset_reset="earliest") as consumer,
        pytest.raises(NotAuthorizedError, match="may not read topic 'orders'"),
    ):
        poll_until_refused(consumer)
    with Producer(reader) as producer, pytest.raises(NotAuthorizedError):
        producer.send("orders", b"x").result(60)


CALLS: list[tuple[str, Callable[[Admin], object]]] = [
    ("create", lambda admin: admin.create_topics(NewTopic("mine"))),
    ("delete", lambda admin: admin.delete_topics("secret")),
    ("alter", lambda admin: admin.create_partitions({"secret": 3})),
    ("alter-configs", lambda admin: admin.alter_topics({"secret": {"retention.ms": 1}})),
    ("describe", lambda admin: admin.describe_cluster()),
    ("describe-configs", lambda admin: admin.describe_quotas()),
    ("describe-configs", lambda admin: admin.config_state()),
    ("describe", lambda admin: admin.list_users()),
    ("alter", lambda admin: admin.delete_user("admin")),
    ("alter", lambda admin: admin.alter_user("nobody-else", admin=True)),
    ("alter", lambda admin: admin.add_acls([acl("User:x", "read topic x")])),
    ("describe", lambda admin: admin.describe_groups("g")),
    ("delete", lambda admin: admin.delete_groups("g")),
    ("write", lambda admin: admin.abort_transaction("t")),
]


def test_a_user_without_rights_sees_nothing_and_may_do_nothing(users: Users) -> None:
    address = users.add("nobody-else")
    with Admin(address) as admin:
        assert admin.list_topics() == []
        assert admin.list_groups() == {} or not admin.list_groups()
        for operation, call in CALLS[:1] + CALLS[4:]:
            with pytest.raises(NotAuthorizedError, match=f"may not {operation}"):
                call(admin)
        for name in ("secret", "missing"):
            with pytest.raises(UnknownTopicError, match=f"there is no topic '{name}'"):
                admin.topic_info(name)
    with (
        Producer(address, max_block_ms=500) as producer,
        pytest.raises(TailraceError),
    ):
        producer.send("secret", b"x").result(60)


def test_a_topic_that_one_may_not_see_looks_like_a_missing_one(users: Users) -> None:
    """To the byte, in every answer about it."""
    address = users.add("curious")
    with Admin(address) as admin:

        def answer(name: str, call: Callable[[str], object]) -> str:
            try:
                return str(call(name))
            except TailraceError as error:
                return f"{error.code.name} {error.detail}".replace(name, "NAME")

        for call in (
            lambda name: admin.topic_info(name),
            lambda name: admin.describe_topics(name),
            lambda name: admin.delete_topics(name),
            lambda name: admin.alter_topics({name: {"retention.ms": 1}}),
            lambda name: list(admin.list_delays(name)),
            lambda name: admin.undelete_topic(name),
        ):
            assert answer("secret", call) == answer("absent", call)


def test_a_change_of_rules_is_in_force_for_open_connections(users: Users) -> None:
    address = users.add("max")
    with Admin(address) as admin:
        assert admin.list_topics() == []
        users.allow("User:max", "describe topic secret")
        assert admin.list_topics() == ["secret"]
        users.admin.add_acls([acl("User:max", "all topic *", "deny")])
        assert admin.list_topics() == []
        users.admin.remove_acls([{"principal": "User:max", "permission": "deny"}])
        assert admin.list_topics() == ["secret"]
        users.admin.alter_user("max", admin=True)
        assert admin.list_topics() == ["orders", "secret"]
        users.admin.alter_user("max", admin=False, groups=["auditors"])
        users.allow("Group:auditors", "describe topic orders")
        assert admin.list_topics() == ["orders", "secret"]


def test_a_waiting_reader_loses_its_right(users: Users) -> None:
    """A fetch that waits for records is answered when its right ends."""
    users.admin.create_topics(NewTopic("waited"))
    address = users.add("wim", "read topic waited")
    with Consumer(
        "waited", bootstrap=address, auto_offset_reset="earliest", fetch_max_wait_ms=60_000
    ) as consumer:
        assert consumer.poll(timeout_ms=200) == []
        users.admin.add_acls([acl("User:wim", "read topic waited", "deny")])
        with pytest.raises(NotAuthorizedError):
            poll_until_refused(consumer)


def test_a_share_member_locks_nothing_more_without_the_right_to_its_topic(users: Users) -> None:
    """It named its topic when it joined; its later requests name none."""
    users.admin.create_topics([NewTopic("jobs")])
    context = users.add("sharer", "read topic jobs", "read group sharers")
    with (
        Producer(admin_address(users.appliance)) as producer,
        ShareConsumer(
            "jobs", bootstrap=context, group_id="sharers", auto_offset_reset="earliest"
        ) as queue,
    ):
        for value in (b"before", b"behind a front that has forgotten"):
            producer.send("jobs", value).result(60)
            found: list[bytes | None] = []
            while not found:
                records = queue.poll(timeout_ms=WAIT_MS)
                found += [record.value for record in records]
            queue.commit()
            assert found == [value]
            kill_and_wait_for_successor(users.appliance, "tr-front-0")
        users.admin.remove_acls([{"principal": "User:sharer", "resource_type": "topic"}])
        producer.send("jobs", b"after").result(60)
        with pytest.raises(NotAuthorizedError, match="may not read topic 'jobs'"):
            poll_until_refused(queue)


def test_a_disabled_users_batches_in_flight_are_whole_or_refused(users: Users) -> None:
    users.admin.create_topics(NewTopic("flight"))
    address = users.add("pia", "write topic flight")
    with Producer(address, linger_ms=0, batch_size=1024) as producer:
        handles = [producer.send("flight", b"%06d" % number * 10) for number in range(3_000)]
        users.admin.disable_user("pia")
        handles += [producer.send("flight", b"late" * 15) for _ in range(50)]
        outcomes, told = [], set[str]()
        for handle in handles:
            error = handle.exception(60)
            outcomes.append(None if error is not None else handle.result(60).offset)
            told |= {str(error)} if error is not None else set()
    assert outcomes[-1] is None, "refused"
    assert all("'pia' is disabled" in text for text in told)
    stored = [offset for offset in outcomes if offset is not None]
    assert stored == sorted(stored)
    own = f"context:{users.appliance.data_dir}/admin.context#{users.appliance.address}"
    with Consumer("flight", bootstrap=own, auto_offset_reset="earliest") as consumer:
        offsets: list[int] = []
        while not set(stored) <= set(offsets):
            records = consumer.poll(timeout_ms=WAIT_MS)
            assert records, "nothing acknowledged is lost"
            offsets += [record.offset for record in records]
    assert offsets == list(range(len(offsets)))


def test_two_tenants_with_the_same_names_do_not_touch_each_other(users: Users) -> None:
    """The same client id, and the other's group, transactional id and delay token."""
    one = users.add(
        "one", "all topic one.", "read group one.", "write transactional-id one.",
        "alter delay one.",
    )  # fmt: skip
    two = users.add(
        "two", "all topic two.", "read group two.", "write transactional-id two.",
        "alter delay two.",
    )  # fmt: skip
    with Admin(one) as admin:
        admin.create_topics(NewTopic("one.t", configs={"delay.enabled": True}))
    with Producer(one, client_id="same", transactional_id="one.id") as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send("one.t", b"x")
    with Producer(one, client_id="same") as producer:
        handle = producer.send("one.t", b"later", deliver_after=dt.timedelta(days=1))
        token = handle.result(60).delay_id
        assert token is not None
    with Admin(two, client_id="same") as admin:
        for call in (
            lambda: admin.cancel_delays([token]),
            lambda: list(admin.list_delays("one.t")),
            lambda: admin.abort_transaction("one.id"),
            lambda: admin.alter_group_offsets("one.g", {TopicPartition("two.t", 0): 0}),
            lambda: admin.delete_records({TopicPartition("one.t", 0): -1}),
        ):
            with pytest.raises((NotAuthorizedError, InvalidRequestError)):
                call()
    with Producer(two, transactional_id="one.id") as producer, pytest.raises(NotAuthorizedError):
        producer.init_transactions()
    with (
        pytest.raises(UnknownTopicError),
        ShareConsumer("one.t", bootstrap=two, group_id="one.share") as queue,
    ):
        poll_until_refused(queue)
    with Admin(one) as admin:
        assert admin.cancel_delays([token])


def test_rules_outlive_a_topic_and_every_restart(users: Users) -> None:
    users.admin.create_topics(NewTopic("again"))
    address = users.add("rex", "write topic again")
    users.admin.delete_topics("again")
    users.admin.create_topics(NewTopic("again"))
    for name in ("tr-controller-0", "tr-front-0"):
        kill_and_wait_for_successor(users.appliance, name)
        with Producer(address) as producer:
            producer.send("again", b"x").result(60)
        users.admin.close()
        users.admin = Admin(f"context:{users.appliance.data_dir}/admin.context#{_address(users)}")
    assert "does not know the key" in refusal(users.context("unknown", *new_keys()))


def _address(users: Users) -> str:
    return users.appliance.address


# ---- strangers -----------------------------------------------------------------------------------


def test_a_stranger_who_speaks_before_during_and_after_the_handshake(users: Users) -> None:
    host, _, port = users.appliance.address.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)
    for data in (
        b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + bytes(300), greeting,
        greeting.replace(b"CURVE", b"PLAIN"), greeting.replace(b"CURVE", b"NULL\0"),
        greeting + b"\x04\xc8\x05HELLO" + bytes(194), greeting + b"\x04\x05\x05READY" * 50,
        greeting + b"\x00\x18" + b"TRRQ" + bytes(20), os.urandom(2_000),
    ):  # fmt: skip
        with (
            socket.create_connection((host, int(port)), 60) as stranger,
            contextlib.suppress(OSError),  # it may be cut off at any byte
        ):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    assert users.admin.list_topics()


def test_half_a_handshake_many_times(users: Users) -> None:
    host, _, port = users.appliance.address.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)
    held = []
    for _ in range(300):
        stranger = socket.create_connection((host, int(port)), 60)
        stranger.sendall(greeting)
        held.append(stranger)
    assert users.admin.list_topics()
    for stranger in held:
        stranger.close()
    assert users.admin.list_topics()


def test_a_client_cannot_name_its_own_user(users: Users) -> None:
    """ZMTP metadata is the client's; who it is comes from its key alone."""
    public, secret = new_keys()
    users.admin.add_user("mallory", public_key=public)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.METADATA, b"X-User-Id:admin")
        dealer.curve_serverkey = _server_key(users)
        dealer.curve_publickey, dealer.curve_secretkey = public.encode(), secret.encode()
        dealer.connect(users.appliance.address)
    with Admin(users.context("mallory", public, secret)) as admin:
        assert admin.list_topics() == []


def _server_key(users: Users) -> bytes:
    from tests.kit.appliances.secured import server_key

    return server_key(users.appliance).encode()


# ---- the table -----------------------------------------------------------------------------------

MADE_UP = ("orders", "letters")
"""Topics of the table that the appliance does not have: it finds no name for their ids."""
REAL_CASES = [
    (
        api, request,
        [
            need for need in needs
            if need.split(" ")[-1] not in MADE_UP
            and not (api == Api.GROUP_HEARTBEAT and " topic " in need)
        ],
    )
    for api, request, needs in CASES
]  # fmt: skip
"""A member may subscribe to a topic that it may not see, as to one that does not exist."""


def outcome(admin: Admin, api: Api, request: dict[str, Any]) -> ErrorCode:
    """The code of the response to a request as it is."""
    steps = call(admin._connection, api, [encode_json(request)], 60_000, returns_errors=True)
    return admin._run_steps(steps).code


def test_every_api_allows_each_kind_of_user_exactly_what_the_table_says(users: Users) -> None:
    """Nobody, one with all rights but one, one with exactly the rights, an administrator."""
    address = users.add("table")
    with Admin(address) as admin:
        for api, request, needs in REAL_CASES:
            if not needs:
                continue
            for missing in (*needs, None):
                held = [need for need in needs if need != missing]
                users.allow("User:table", *(need.replace(" any", " *") for need in held))
                refused = outcome(admin, api, request) is ErrorCode.NOT_AUTHORIZED
                assert refused is (missing is not None), (api, request, held)
                if held:
                    users.admin.remove_acls([{"principal": "User:table"}])
            assert outcome(admin, api, request) is ErrorCode.NOT_AUTHORIZED, (api, request)
    # changes of the appliance itself are left out: they would end the others' tests
    harmless = [case for case in REAL_CASES if case[0] not in (Api.ALTER_CONFIGS,)]
    for api, request, _ in harmless:
        assert outcome(users.admin, api, request) is not ErrorCode.NOT_AUTHORIZED


# ---- attacks -------------------------------------------------------------------------------------


def credentials_of(context: str) -> Any:
    return resolve(context).credentials


def test_a_user_with_the_identity_of_another_connection_has_no_session(users: Users) -> None:
    """The session of whoever had the identity before was found by the identity alone."""
    address = users.appliance.address
    reader = users.add("identity-reader", "describe topic secret")
    stranger = users.add("identity-stranger")
    question = orjson.dumps({"topics": ["secret"]})
    for number in range(3):
        # libzmq ignores a connection while an earlier one that is closing has its identity
        identity = b"chosen-%d" % number
        first = RawClient(address, credentials=credentials_of(reader), identity=identity)
        code, body = first.answer(first.send(Api.METADATA, question))
        assert code is ErrorCode.OK
        assert b"secret" in body[0]
        first.close()

        codes: list[ErrorCode] = []

        def is_answered() -> bool:
            second = RawClient(
                address, credentials=credentials_of(stranger), identity=identity,  # noqa: B023
                handshake=False, timeout_ms=500,
            )  # fmt: skip
            with second, contextlib.suppress(zmq.Again):
                codes.append(second.answer(second.send(Api.METADATA, question))[0])  # noqa: B023
            return bool(codes)  # noqa: B023

        wait_until(is_answered, "the second client has the identity")
        assert codes == [ErrorCode.SESSION_UNKNOWN]


def test_batches_of_transactions_need_a_transactional_id(users: Users) -> None:
    """With a producer id, which is a number that can be guessed, a user could write into the
    transaction of another one.
    """
    address = users.appliance.address
    context = users.add("guesser", "write topic orders")
    transactional = make_batch(producer_id=1 << 62)
    with RawClient(address, credentials=credentials_of(context)) as client:
        _, answer = client.ask(Api.METADATA, {"topics": ["orders"]})
        topic_id = bytes.fromhex(answer["topics"][0]["topic_id"])
        for batches in ([transactional], [make_batch(), transactional]):
            code, entries = client.produced(
                client.produce([(topic_id, 0, batch) for batch in batches])
            )
            assert code is ErrorCode.OK
            assert entries[-1].error == ErrorCode.NOT_AUTHORIZED
            assert all(entry.error != ErrorCode.NOT_AUTHORIZED for entry in entries[:-1])
        users.allow("User:guesser", "write transactional-id mine")

        def is_passed_on() -> bool:
            _, entries = client.produced(client.produce([(topic_id, 0, transactional)]))
            return bool(entries[0].error != ErrorCode.NOT_AUTHORIZED)

        wait_until(is_passed_on, "the right is in force")


def test_delayed_records_are_not_fetched_without_the_right_to_see_them(users: Users) -> None:
    users.admin.create_topics([NewTopic("later", configs={"delay.enabled": True})])
    context = users.add("fetcher", "read topic later")
    with RawClient(users.appliance.address, credentials=credentials_of(context)) as client:

        def fetch_code(topic_id: bytes) -> int:
            _, found = client.fetched(
                client.fetch(
                    FetchRequest(0, 1, 1 << 20, 0, [FetchEntry(topic_id, 0, -1, 0, 1 << 20)])
                )
            )
            return int(found[0][0].error)

        _, answer = client.ask(Api.METADATA, {"topics": ["later"]})
        topic = answer["topics"][0]
        delay_log = bytes.fromhex(topic["delay_log"]["topic_id"])
        assert fetch_code(bytes.fromhex(topic["topic_id"])) == ErrorCode.OK
        assert fetch_code(delay_log) == ErrorCode.NOT_AUTHORIZED
        users.allow("User:fetcher", "describe delay later")
        wait_until(
            lambda: fetch_code(delay_log) != ErrorCode.NOT_AUTHORIZED, "the right is in force"
        )
