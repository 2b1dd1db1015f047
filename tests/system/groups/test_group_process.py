"""The process of groups, for real: started when it is needed, killed at each named place, with
fronts, disks and files that fail around it.
"""

from __future__ import annotations

import os
import pathlib
import resource
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import orjson
import pytest

from shm.crash_points import CRASH_POINT_VARIABLE, CRASH_POINTS
from shm.memory.layout import Role
from tailrace import Admin, Producer
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol.frame import Api
from tests.kit.appliances.orders import create, produce, read, start
from tests.kit.cli import TAILRACE
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.matrices import short
from tests.kit.peers.raw_client import RawClient
from tests.kit.peers.raw_members import RawMember, committed, insist, process_named
from tests.kit.processes import (
    HANG_LIMIT_S,
    children,
    commits_of,
    kill_and_wait_for_successor,
    shared_memory,
    stopped,
    wait_until,
)

FOUR = {("orders", partition): 0 for partition in range(4)}
GROUPS = "tr-groups-0"


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    """An appliance of this test's own, with a topic of four partitions."""
    running = start(tmp_path / "data")
    create(running, 4)
    yield running
    running.stop()


@pytest.fixture
def client(own: EmbeddedAppliance) -> Iterator[RawClient]:
    with RawClient(own.address) as made:
        yield made


def joined(client: RawClient, group: str = "g", count: int = 4, **more: object) -> RawMember:
    member = RawMember(client, group, ["orders"], **more)
    member.settle(count)
    return member


def test_an_appliance_without_groups_has_neither_process_nor_memory_for_them(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    produce(own, 0, 10)
    assert read(own, 10) == list(range(10))
    assert client.ask(Api.LIST_GROUPS, {"after": ""}) == (
        ErrorCode.OK,
        {"groups": [], "next": None},
    )
    assert GROUPS not in children(own)
    assert process_named(client) is None
    assert not [name for name in shared_memory(own) if "groups" in name]
    assert not os.path.exists(f"{own.data_dir}/groups.db")


def test_looking_for_groups_and_completing_their_names_start_no_process(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    """A list that came from the process would be answered when that runs: so once there is an
    answer, there is the process, or there never will be.
    """

    def run(*words: str, **environment: str) -> str:
        done = subprocess.run(
            [TAILRACE, *words],
            env={**os.environ, "TAILRACE_BOOTSTRAP": own.address, **environment},
            capture_output=True,
            timeout=HANG_LIMIT_S,
        )
        assert done.returncode == 0
        return (done.stdout + done.stderr).decode()

    assert (
        run("group", "list")
        == "no groups yet; a consumer with a group_id makes one, or `tailrace consume TOPIC "
        "--group NAME`\n"
    )
    assert orjson.loads(run("group", "list", "--json")) == []
    for line in ("tailrace group describe ", "tailrace consume orders --group b"):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        assert run(_TAILRACE_COMPLETE="bash_complete", **words).strip() == ""
    with Admin(own.address) as admin:
        assert admin.list_groups() == {}
    assert GROUPS not in children(own)
    assert process_named(client) is None
    assert not os.path.exists(f"{own.data_dir}/groups.db")
    joined(client)
    assert GROUPS in children(own)
    asked = {
        "_TAILRACE_COMPLETE": "bash_complete",
        "COMP_WORDS": "tailrace group describe ",
        "COMP_CWORD": "3",
    }
    wait_until(lambda: run(**asked).strip() == "plain,g", "its name is offered")


def test_the_first_request_starts_it_and_a_later_start_finds_everything_again(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    produce(own, 0, 10)
    member = joined(client)
    assert member.commit(FOUR | {("orders", 0): 7}) == (ErrorCode.OK, {"refused": []})
    assert committed(client, "g") == FOUR | {("orders", 0): 7}
    lanes = {name.split("-", 3)[-1] for name in shared_memory(own) if "groups" in name}
    assert lanes == {"controller.groups-0", "front-0.groups-0", "groups-0.front-0"}
    row = process_named(client)
    assert row is not None
    assert row["live"]
    assert os.stat(f"{own.data_dir}/groups.db").st_mode & 0o777 == 0o600
    assert own.stop() == 0
    again = start(pathlib.Path(own.data_dir))
    try:
        wait_until(lambda: GROUPS in children(again), "it is started with the appliance")
        with RawClient(again.address) as anew:
            epoch, member.client = member.epoch, anew
            insist(anew, Api.LIST_GROUPS, {"after": ""})
            assert member.heartbeat() is ErrorCode.OK
            assert (member.epoch, member.count) == (epoch, 4)
            assert committed(anew, "g")["orders", 0] == 7
            member.settle(4)
            assert member.commit({("orders", 0): 8}) == (ErrorCode.OK, {"refused": []})
    finally:
        assert again.stop() == 0
        assert not shared_memory(again)


@contextmanager
def armed(data_dir: pathlib.Path, name: str) -> Iterator[str]:
    """An appliance whose process of groups is killed at a named place; its address."""
    address = f"ipc://{data_dir}.s"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "appliance.supervise.supervisor", "--data-dir", str(data_dir),
        "--listen", address, "--set", "ring_bytes=16777216",
         "--set", "http.listen="],
        env={**os.environ, CRASH_POINT_VARIABLE: name}, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield address
        process.terminate()
        assert process.wait(HANG_LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("visit", short([1, 4]))
@pytest.mark.parametrize(
    "point", short(name for name in CRASH_POINTS if name.startswith("groups."))
)
def test_killed_at_each_named_place_it_keeps_what_it_has_answered(
    tmp_path: pathlib.Path, point: str, visit: int
) -> None:
    data_dir = tmp_path / "data"
    running = start(data_dir)
    create(running, 4)
    produce(running, 0, 10)
    assert running.stop() == 0
    with armed(data_dir, f"{point}:{visit}") as address, RawClient(address) as client:
        member = RawMember(client, "g", ["orders"])
        wait_until(
            lambda: member.heartbeat() is ErrorCode.OK and member.count == 4, "it has joined"
        )
        epoch = member.epoch
        kept = -1
        for offset in range(10):
            code, answer = member.commit({("orders", 0): offset})
            found = committed(client, "g").get(("orders", 0), -1)
            if code is ErrorCode.OK:
                assert answer == {"refused": []}
                assert found == offset
            else:
                assert found in (kept, offset), "whole or not at all"
            kept = found
            assert member.heartbeat() in (ErrorCode.OK, ErrorCode.NOT_READY)
        row = process_named(client)
        assert row is not None
        assert row["restarts"] == 1, f"{point} was not visited {visit} times"
        member.settle(4)
        assert member.epoch == epoch, "a restart moves no partition"


def test_commits_of_many_sessions_that_come_together_share_a_transaction(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    produce(own, 0, 10)
    joined(client)
    before = commits_of(own, Role.GROUPS)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(own.address)) for _ in range(40)]
        pid = children(own)[GROUPS]
        with stopped(pid):
            asked = []
            for number, each in enumerate(clients):
                body = b'{"group":"storm-%d","offsets":[["orders",0,%%d,-1,""]]}' % number
                asked += [
                    (each, each.send(Api.COMMIT_OFFSETS, body % offset)) for offset in range(5)
                ]
            for each in (
                clients * 2
            ):  # what came before is with the process when the second is answered
                assert each.answer(each.send(Api.PING))[0] is ErrorCode.OK
        assert {each.answer(number)[0] for each, number in asked} == {ErrorCode.OK}
        # 200 commits; what the member has begun before may take one of its own
        assert commits_of(own, Role.GROUPS) <= before + 3
        assert {committed(clients[0], f"storm-{number}")["orders", 0] for number in range(40)} == {
            4
        }


def test_a_member_whose_connection_closes_is_gone_and_the_other_one_hears_of_it(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    one = joined(client)
    with RawClient(own.address) as second:
        other = RawMember(second, "g", ["orders"])
        assert other.heartbeat() is ErrorCode.OK
        assert client.pushed(Api.GROUP_HEARTBEAT) == {"group": "g", "member_id": one.member_id}
        one.settle(2)
        other.settle(2)
    assert client.pushed(Api.GROUP_HEARTBEAT)["group"] == "g"
    one.settle(4)


def test_the_sessions_of_a_killed_front_end_for_groups_too(own: EmbeddedAppliance) -> None:
    with RawClient(own.address) as first, RawClient(own.address) as second:
        stays = joined(first, instance_id="one")
        goes = RawMember(second, "g", ["orders"])
        goes.heartbeat()
        stays.settle(2)
        goes.settle(2)
    kill_and_wait_for_successor(own, "tr-front-0")
    with RawClient(own.address) as anew:
        stays.client = anew
        stays.settle(4)


def test_killed_over_and_over_under_commits_it_loses_and_invents_nothing(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    produce(own, 0, 300)
    member = joined(client)
    epoch, acknowledged = member.epoch, -1
    for offset in range(300):
        if offset % 100 == 50:
            kill_and_wait_for_successor(own, GROUPS)
        code, answer = member.commit({("orders", 0): offset})
        if code is ErrorCode.OK:
            assert answer == {"refused": []}
            acknowledged = offset
        else:
            assert code is ErrorCode.NOT_READY
    assert acknowledged == 299
    assert committed(client, "g")["orders", 0] == 299
    member.settle(4)
    assert member.epoch == epoch


def _goes_on(appliance: EmbeddedAppliance, first: int) -> None:
    """Everything but groups does its work."""
    produce(appliance, first, first + 10)
    assert read(appliance, first + 10) == list(range(first + 10))


@pytest.mark.parametrize("damage", short(["torn", "garbage", "a directory", "another version"]))
def test_a_database_that_cannot_be_used_costs_groups_their_answers_until_it_is_mended(
    tmp_path: pathlib.Path, damage: str
) -> None:
    data_dir = tmp_path / "data"
    running = start(data_dir)
    create(running, 4)
    produce(running, 0, 10)
    with RawClient(running.address) as client:
        insist(client, Api.COMMIT_OFFSETS, {"group": "g", "offsets": [["orders", 0, 3, -1, ""]]})
    assert running.stop() == 0
    database, aside = data_dir / "groups.db", tmp_path / "aside.db"
    database.rename(aside)
    if damage == "garbage":
        database.write_bytes(os.urandom(50_000))
    elif damage == "torn":
        database.write_bytes(aside.read_bytes()[:5000])
    elif damage == "a directory":
        database.mkdir()
    else:
        database.write_bytes(aside.read_bytes())
        with sqlite3.connect(database) as connection:
            connection.execute("UPDATE meta SET value = 99 WHERE name = 'schema_version'")
        connection.close()
    again = start(data_dir)
    try:
        _goes_on(again, 10)
        with RawClient(again.address) as client:
            for api in (
                Api.LIST_GROUPS,
                Api.COMMIT_OFFSETS,
                Api.FETCH_OFFSETS,
                Api.GROUP_HEARTBEAT,
            ):
                code, answer = client.ask(api, {"group": "g", "partitions": None})
                assert code is ErrorCode.STORAGE_ERROR
                assert "groups.db" in answer["message"]
                assert "move" in answer["message"]
            row = process_named(client)
            assert row is not None
            assert (row["live"], row["restarts"]) == (True, 0)
            database.rename(tmp_path / "damaged")
            aside.rename(database)
            for suffix in ("-wal", "-shm"):
                pathlib.Path(f"{database}{suffix}").unlink(missing_ok=True)
            wait_until(
                lambda: client.ask(Api.LIST_GROUPS, {"after": ""})[0] is ErrorCode.OK,
                "it is taken up again",
            )
            assert committed(client, "g") == {("orders", 0): 3}
    finally:
        assert again.stop() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
def test_a_database_that_can_only_be_read_refuses_with_a_sentence_until_it_can_be_written(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path / "data")
    database = tmp_path / "data" / "groups.db"
    database.touch()
    subprocess.run(["mount", "--bind", str(database), str(database)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(database)], check=True)
        create(running, 4)
        produce(running, 0, 10)
        with RawClient(running.address) as client:
            code, answer = client.ask(
                Api.COMMIT_OFFSETS, {"group": "g", "offsets": [["orders", 0, 3, -1, ""]]}
            )
            assert code is ErrorCode.STORAGE_ERROR
            assert "Read-only" in answer["message"]
            assert "make it writable" in answer["message"]
            _goes_on(running, 10)
            subprocess.run(["umount", str(database)], check=True)
            member = RawMember(client, "g", ["orders"])
            wait_until(lambda: member.heartbeat() is ErrorCode.OK, "it is taken up")
    finally:
        subprocess.run(["umount", str(database)], check=False, capture_output=True)
        assert running.stop() == 0


def test_a_database_that_another_program_holds_refuses_changes_and_goes_on_afterwards(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    produce(own, 0, 10)
    member = joined(client)
    assert member.commit({("orders", 0): 1})[0] is ErrorCode.OK
    holder = sqlite3.connect(f"{own.data_dir}/groups.db", isolation_level=None)
    try:
        holder.execute("BEGIN IMMEDIATE")
        code, answer = member.commit({("orders", 0): 2})
        assert code is ErrorCode.STORAGE_ERROR
        assert "locked" in answer["message"]
        assert RawMember(client, "g", ["orders"]).heartbeat() is ErrorCode.STORAGE_ERROR
        assert committed(client, "g")["orders", 0] == 1
        assert member.heartbeat() is ErrorCode.OK
        assert member.count == 4, "who could not be kept did not join"
        holder.execute("ROLLBACK")
    finally:
        holder.close()
    assert member.commit({("orders", 0): 3})[0] is ErrorCode.OK
    assert committed(client, "g")["orders", 0] == 3


def test_a_disk_that_refuses_costs_the_commits_and_nothing_else(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    produce(own, 0, 10)
    member = joined(client)
    assert member.commit({("orders", 0): 1})[0] is ErrorCode.OK
    pid = children(own)[GROUPS]
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        code, answer = member.commit({("orders", 0): 2})
        assert code in (ErrorCode.STORAGE_ERROR, ErrorCode.DISK_FULL)
        assert "groups.db" in answer["message"]
        _goes_on(own, 10)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    wait_until(
        lambda: member.commit({("orders", 0): 3})[0] is ErrorCode.OK, "commits are taken again"
    )
    assert committed(client, "g")["orders", 0] == 3
    assert children(own)[GROUPS] == pid


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_refuses_commits_with_a_sentence_and_takes_them_again(
    tmp_path: pathlib.Path,
) -> None:
    with small_file_system(tmp_path, 64) as disk:
        running = start(
            disk / "data",
            ring_bytes=1 << 20,
            lane_bytes=256 << 10,
            credit_bytes=1 << 20,
            journal_bytes=1 << 20,
        )
        try:
            create(running, 4)
            produce(running, 0, 10)
            with RawClient(running.address) as client:
                member = joined(client)
                assert member.commit({("orders", 0): 1})[0] is ErrorCode.OK
                with (disk / "filler").open("wb", buffering=0) as filler:
                    try:
                        while True:
                            filler.write(bytes(4096))
                    except OSError:
                        pass  # full
                codes = {member.commit({("orders", p % 4): 0})[0] for p in range(200)}
                wait_until(
                    lambda: member.commit({("orders", 0): 0})[0] is ErrorCode.DISK_FULL,
                    "the disk is full",
                )
                assert codes <= {ErrorCode.OK, ErrorCode.DISK_FULL}
                assert member.heartbeat() is ErrorCode.OK
                (disk / "filler").unlink()
                wait_until(
                    lambda: member.commit({("orders", 0): 5})[0] is ErrorCode.OK,
                    "commits are taken again",
                )
                assert committed(client, "g")["orders", 0] == 5
        finally:
            assert running.stop() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a /dev/shm of one's own needs root")
def test_without_shared_memory_for_it_requests_are_refused_until_there_is_some(
    tmp_path: pathlib.Path,
) -> None:
    """In a mount namespace of its own, with a /dev/shm that holds the appliance and no more."""
    log = tmp_path / "log"
    command = (
        f"mount -t tmpfs -o size=48m tmpfs /dev/shm && exec {sys.executable} -P -m "
        f"appliance.supervise.supervisor --data-dir {tmp_path}/data"
    )
    command += (
        f" --listen ipc://{tmp_path}/s --set ring_bytes={4 << 20} --set lane_bytes=1048576 "
        "--set ring_descriptors=1024 --set http.listen="
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", command], stdout=file, stderr=file, env=environment
        )
    try:
        wait_until(lambda: " ready " in log.read_text() or process.poll() is not None, "it serves")
        inside = pathlib.Path(f"/proc/{process.pid}/root/dev/shm/filler")
        with inside.open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass  # full
        with RawClient(f"ipc://{tmp_path}/s") as client:
            insist(client, Api.CREATE_TOPICS, {"topics": [{"name": "orders", "partitions": 4}]})
            member = RawMember(client, "g", ["orders"])
            assert member.heartbeat() is ErrorCode.NOT_READY
            code, answer = client.ask(Api.LIST_GROUPS, {"after": ""})
            assert (code, "/dev/shm" in answer["message"]) == (ErrorCode.NOT_READY, True)
            assert "no_process_of_groups" in log.read_text()
            with Producer(f"ipc://{tmp_path}/s") as producer:
                producer.send("orders", b"x").result(60)
            inside.unlink()
            member.settle(4)
    finally:
        process.terminate()
        assert process.wait(HANG_LIMIT_S) == 0


def test_the_console_shows_it_once_it_is_there(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path, **{"http.listen": "127.0.0.1:0"})
    try:
        create(running, 4)
        with RawClient(running.address) as client:
            wait_until(
                lambda: client.ask(Api.DESCRIBE_CLUSTER, {})[1]["console"] is not None,
                "the console listens",
            )
            console = client.ask(Api.DESCRIBE_CLUSTER, {})[1]["console"]

            def scraped() -> str:
                with urllib.request.urlopen(f"{console}/metrics", timeout=HANG_LIMIT_S) as answer:
                    return str(answer.read(), "utf-8")

            assert "groups-0" not in scraped()
            joined(client)
            assert 'tailrace_process_live{process="groups-0"} 1.0' in scraped()
            with urllib.request.urlopen(f"{console}/health/ready", timeout=HANG_LIMIT_S) as answer:
                assert answer.status == 200
    finally:
        assert running.stop() == 0


def test_a_group_sees_topics_that_are_made_grown_and_deleted_later(
    own: EmbeddedAppliance, client: RawClient
) -> None:
    member = RawMember(client, "g", ["orders", "more"])
    member.settle(4)
    insist(
        client,
        Api.CREATE_TOPICS,
        {"topics": [{"name": "more", "partitions": 3, "configs": {"delay.enabled": True}}]},
    )
    member.settle(7)
    insist(client, Api.ALTER_TOPICS, {"topics": [{"name": "more", "partitions": 5}]})
    member.settle(9)
    insist(client, Api.DELETE_TOPICS, {"topics": [{"name": "more"}]})
    member.settle(4)
    with Producer(own.address) as producer:
        producer.send("orders", b"x").result(60)
