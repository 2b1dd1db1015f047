"""The server's key is rotated while clients work: those that connect between the two steps go on,
and nobody else's key is taken for the appliance's.
"""

from __future__ import annotations

import pathlib
import shutil
import stat
import threading
from collections.abc import Iterator

import orjson
import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.core.errors import NotAuthenticatedError
from tests.kit.appliances.secured import Users, secured
from tests.kit.cli import run
from tests.kit.processes import kill_and_wait_for_successor, wait_until


@pytest.fixture
def users(tmp_path: pathlib.Path) -> Iterator[Users]:
    with secured(tmp_path) as found:
        found.admin.create_topics([NewTopic("orders")])
        yield found


def keys_in(context: str) -> list[str]:
    path = pathlib.Path(context.removeprefix("context:"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys: list[str] = orjson.loads(path.read_bytes())["server_keys"]
    return keys


class Load:
    """A producer in a thread of its own, that waits for each acknowledgement."""

    def __init__(self, context: str) -> None:
        self.offsets: list[int | None] = []
        self._is_ended = threading.Event()
        self._producer = Producer(context)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_ended.is_set():
            self.offsets.append(self._producer.send("orders", b"x").result(120).offset)

    def goes_on(self) -> None:
        before = len(self.offsets)
        wait_until(lambda: len(self.offsets) > before + 10, "records are acknowledged")

    def end(self) -> None:
        self._is_ended.set()
        self._thread.join()
        self._producer.close()


def test_clients_follow_a_rotation_under_load_and_lose_nothing(users: Users) -> None:
    context = users.add("steady", "write topic orders")
    absent = users.add("absent", "write topic orders")
    place = ("--data-dir", users.appliance.data_dir)
    (first,) = keys_in(context)
    load = Load(context)
    try:
        load.goes_on()
        following = orjson.loads(run(None, "server-key", "rotate", *place, "--json").stdout)[
            "public"
        ]
        assert run(None, "server-key", "rotate", *place, status=None).returncode, "one at a time"
        kill_and_wait_for_successor(users.appliance, "tr-front-0")
        load.goes_on()
        assert keys_in(context) == [first, following]
        copied = shutil.copy(
            context.removeprefix("context:"), str(users.directory / "copied.context")
        )
        run(None, "server-key", "finish", *place)
        load.goes_on()
        kill_and_wait_for_successor(users.appliance, "tr-front-0")
        load.goes_on()
    finally:
        load.end()
    assert load.offsets == list(range(len(load.offsets)))
    assert keys_in(context) == [following, first]
    with Producer(f"context:{copied}") as producer:
        producer.send("orders", b"by the next key of an unused context").result(60)
    assert keys_in(f"context:{copied}") == [following, first]
    with (
        Admin(absent, connect_timeout_ms=60_000) as admin,
        pytest.raises(NotAuthenticatedError, match="server key is not that of this context"),
    ):
        admin.list_topics()
    shown = orjson.loads(run(None, "server-key", "show", *place, "--json").stdout)
    assert shown["server_keys"] == [following, first]
    run(None, "server-key", "forget", *place)
    with Producer(context) as producer:
        producer.send("orders", b"by the context of the one that worked").result(60)
    assert keys_in(context) == [following]
    listed = orjson.loads(run(None, "user", "list", *place, "--json").stdout)
    assert listed, "the appliance's own context has it"


def test_fronts_of_both_keys_serve_every_client_until_the_next_rotation(
    tmp_path: pathlib.Path,
) -> None:
    with secured(tmp_path, fronts=2) as users:
        users.admin.create_topics([NewTopic("orders")])
        context = users.add("steady", "write topic orders")
        place = ("--data-dir", users.appliance.data_dir)
        restarted, running = (f"{context}#{each}" for each in users.appliance.addresses)
        run(None, "server-key", "rotate", *place)
        send_by(running)
        run(None, "server-key", "finish", *place)
        kill_and_wait_for_successor(users.appliance, "tr-front-0")
        send_by(restarted)
        send_by(running)
        kill_and_wait_for_successor(users.appliance, "tr-front-1")
        send_by(running)


def send_by(context: str) -> None:
    with Producer(context) as producer:
        producer.send("orders", b"x").result(60)


def test_a_server_with_neither_key_is_refused_after_both_were_tried(users: Users) -> None:
    from tests.kit.appliances.secured import new_keys

    public, secret = new_keys()
    users.admin.add_user("wrong", public_key=public)
    strangers = [new_keys()[0], new_keys()[0]]
    context = users.context("wrong", public, secret, server_keys=strangers)
    with (
        Admin(context, connect_timeout_ms=60_000) as admin,
        pytest.raises(NotAuthenticatedError, match="server key is not that of this context"),
    ):
        admin.list_topics()
    assert keys_in(context) == strangers
