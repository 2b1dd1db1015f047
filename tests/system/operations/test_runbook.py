"""The runbook of docs/operations.md: each situation is made, and its commands are run as they stand
there. What the page shows of their output is what they print.
"""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pytest

from appliance.observe.checks.doctor_checks import groups_error
from tailrace import Admin, Consumer, NewTopic, Producer, TopicExistsError, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.directory.data_dir import CATALOG_FILE, GROUPS_FILE
from tailrace.format.directory.partition_metadata import PARTITION_FILE
from tests.kit.appliances import damaged_topics
from tests.kit.appliances.console import console_of, get, metrics
from tests.kit.cli import run
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.hosts.wall_clock import WallClock
from tests.kit.processes import (
    HANG_LIMIT_S,
    children,
    kill_and_wait_for_successor,
    stopped,
    wait_until,
)
from tests.kit.runs.documents import ROOT

DATA_DIR, BACKUPS, SECOND = "/var/lib/tailrace", "/mnt/backup/tailrace", "/disk2/tailrace"
"""As the page names them."""
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


class Step(NamedTuple):
    """A command, and lines that its output has."""

    command: str
    expected: list[str]


def situations() -> dict[str, list[Step]]:
    """Title -> its commands."""
    text = (ROOT / "docs/operations.md").read_text()
    book = text.partition("\n## Runbook\n")[2].partition("\n## ")[0]
    found = {}
    for part in book.split("\n### ")[1:]:
        title, _, rest = part.partition("\n")
        steps: list[Step] = []
        for line in "".join(_BLOCK.findall(rest)).splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:], []))
            else:
                steps[-1].expected.append(line)
        found[title] = steps
    return found


BOOK = situations()


def words(text: str) -> str:
    return " ".join(text.split())


def placed(text: str, data_dir: str) -> str:
    """A text with the paths of this test. Backups lie beside the data directory."""
    text = text.replace(DATA_DIR, data_dir).replace(BACKUPS, f"{data_dir}-backups")
    return text.replace(SECOND, f"{data_dir}-second")


def check(step: Step, appliance: EmbeddedAppliance | None, data_dir: str) -> None:
    """Run a command and look for the page's lines in its output. `...` stands for anything."""
    program, *arguments = shlex.split(placed(step.command, data_dir))
    assert program == "tailrace"
    done = run(appliance, *arguments, status=None)
    shown = words(done.stdout.decode() + done.stderr.decode())
    for line in step.expected:
        wanted = words(placed(line, data_dir))
        pattern = r"\s?.*?\s?".join(re.escape(part.strip()) for part in wanted.split("..."))
        assert re.search(pattern, shown), f"$ {step.command}\nhas no {wanted!r}:\n{shown}"


def follow(
    title: str,
    appliance: EmbeddedAppliance | None,
    data_dir: str,
    before: Mapping[int, Callable[[], object]] | None = None,
) -> None:
    """Run the commands of a situation. `before`: what happens before the command of a number."""
    for number, step in enumerate(BOOK[title]):
        if before and number in before:
            before[number]()
        check(step, appliance, data_dir)


@pytest.fixture(scope="module")
def day() -> Iterator[EmbeddedAppliance]:
    """An appliance on an ordinary day."""
    running = start_embedded(auto_create_topics=False)
    yield running
    assert running.stop() == 0


@pytest.fixture
def orders(day: EmbeddedAppliance) -> Iterator[EmbeddedAppliance]:
    """The day's appliance, with a topic `orders` of 2 partitions and 20 records."""
    with Admin(day.address) as admin, Producer(day.address) as producer:
        admin.create_topics(NewTopic("orders", 2))
        for number in range(20):
            producer.send("orders", b"%d" % number, partition=number % 2)
        producer.flush(HANG_LIMIT_S)
        yield day
        admin.delete_topics("orders")


def test_nothing_answers(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o700)
    follow("Nothing answers", None, str(tmp_path))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_the_disk_fills(tmp_path: pathlib.Path) -> None:
    with small_file_system(tmp_path, 64) as disk:
        data_dir = str(disk / "data")
        running = start_embedded(
            data_dir=data_dir, settings={"journal_bytes": 1 << 20, "ring_bytes": 4 << 20}
        )
        try:
            with Admin(running.address) as admin:
                admin.create_topics(NewTopic("orders"))

                def state() -> str:
                    return str(admin.describe_cluster()["data_dirs"][0]["state"])

                with Producer(running.address, delivery_timeout_ms=2_000, linger_ms=0) as producer:
                    while state() != "FULL":
                        producer.send("orders", os.urandom(500_000)).exception(HANG_LIMIT_S)
                has_room = {4: lambda: wait_until(lambda: state() == "OK", "writing resumes")}
                follow("The disk fills", running, data_dir, has_room)
        finally:
            assert running.stop() == 0


def test_a_consumer_falls_behind(orders: EmbeddedAppliance) -> None:
    with Consumer(
        bootstrap=orders.address, group_id="billing", enable_auto_commit=False,
        auto_offset_reset="earliest",
    ) as consumer:  # fmt: skip
        consumer.subscribe("orders")
        while not consumer.poll(timeout_ms=1_000, max_records=1):
            pass
        [(partition, position)] = [
            (key, at) for key, at in consumer.positions().items() if at
        ]  # fmt: skip
        assert position == 1
        consumer.commit()
    with Admin(orders.address) as admin:
        if partition.partition:  # the page's is the first
            admin.alter_group_offsets("billing", {partition: 0, partition._replace(partition=0): 1})
    follow("A consumer falls behind", orders, orders.data_dir)


def test_acks_are_slow(orders: EmbeddedAppliance) -> None:
    def stop_the_disk() -> None:
        """As a disk does that takes its time."""
        flusher = children(orders)["tr-flusher-0"]
        with stopped(flusher), Producer(orders.address, linger_ms=0) as producer:
            sent = producer.send("orders", b"v", partition=0)
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began > 0.5, "it takes its time")
            os.kill(flusher, signal.SIGCONT)
            sent.result(HANG_LIMIT_S)

    follow("Acks are slow", orders, orders.data_dir, {2: stop_the_disk})
    log = pathlib.Path(orders.log_path)
    wait_until(
        lambda: (
            re.search(r"slow_operation operation=produce ms=\d+ client=", log.read_text())
            is not None
        ),
        "the slow request is logged",
    )


def test_administration_is_refused_by_the_audit_log(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o700)
    settings = {"audit.enabled": "true", "audit.key_file": str(tmp_path / "no-such-key")}
    running = start_embedded(data_dir=str(tmp_path / "data"), settings=settings)
    try:
        follow("Administration is refused by the audit log", running, running.data_dir)
    finally:
        assert running.stop() == 0


def test_a_tenant_is_slowed_or_takes_too_much(day: EmbeddedAppliance) -> None:
    with Admin(day.address, client_id="flood") as admin:
        admin.list_topics()
        follow("A tenant is slowed, or takes too much", day, day.data_dir)


def test_a_process_restarts(tmp_path: pathlib.Path) -> None:
    running = start_embedded(data_dir=str(tmp_path / "data"))
    try:
        kill_and_wait_for_successor(running, "tr-worker-0")
        with Admin(running.address) as admin:
            wait_until(
                lambda: all(p["live"] for p in admin.describe_cluster()["processes"]), "it lives"
            )
        follow("A process restarts", running, running.data_dir)
        assert "ended process=worker-0" in pathlib.Path(running.log_path).read_text()
    finally:
        assert running.stop() == 0


def test_a_client_gets_an_error(orders: EmbeddedAppliance) -> None:
    follow("A client gets an error", orders, orders.data_dir)
    with Admin(orders.address) as admin, pytest.raises(TopicExistsError) as refused:
        admin.create_topics(NewTopic("orders"))
    log = pathlib.Path(orders.log_path)
    wait_until(
        lambda: f"request={refused.value.request_id} " in log.read_text(), "the refusal is logged"
    )


def test_a_kafka_client_cannot_connect() -> None:
    running = start_embedded(settings={"kafka.listen": "127.0.0.1:0"})
    try:
        follow("A Kafka client cannot connect", running, running.data_dir)
        host, _, port = running.kafka_addresses[0].rpartition(":")
        with socket.create_connection((host, int(port)), HANG_LIMIT_S) as client:
            client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01")  # TLS
            assert client.recv(1) == b""
        log = pathlib.Path(running.log_path).read_text()
        assert "kafka_connection_refused peer=127.0.0.1:" in log
    finally:
        assert running.stop() == 0


def test_a_transaction_stays_open(orders: EmbeddedAppliance) -> None:
    with Producer(orders.address, transactional_id="nightly") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("orders", b"v").result(HANG_LIMIT_S)
        with Admin(orders.address) as admin:
            wait_until(
                lambda: admin.describe_transactions("nightly")["nightly"]["state"] == "ongoing",
                "the worker has reported it",
            )
        follow("A transaction stays open", orders, orders.data_dir)


def test_records_are_damaged(tmp_path: pathlib.Path) -> None:
    data_dir = tmp_path / "data"
    damaged_topics.fill(data_dir, "orders")
    damaged_topics.damage(data_dir, "orders", [3], "body")
    running = start_embedded(data_dir=str(data_dir))
    try:
        follow("Records are damaged", running, str(data_dir), {1: running.stop})
    finally:
        assert running.stop() == 0


def test_a_partition_is_not_compacted(tmp_path: pathlib.Path) -> None:
    data_dir = tmp_path / "data"
    damaged_topics.fill(data_dir, "orders")
    damaged_topics.damage(data_dir, "orders", [3], "body")
    running = start_embedded(data_dir=str(data_dir))
    try:
        with Admin(running.address) as admin:
            admin.alter_topics({"orders": {"cleanup.policy": "compact"}})
        follow("A partition is not compacted", running, str(data_dir), {2: running.stop})
    finally:
        assert running.stop() == 0


def test_a_partition_stays_dirty(orders: EmbeddedAppliance) -> None:
    with Admin(orders.address) as admin:
        lag = {"cleanup.policy": "compact", "min.compaction.lag.ms": 3_600_000}
        admin.alter_topics({"orders": lag})
    follow("A partition stays dirty", orders, orders.data_dir)


def test_a_partition_takes_no_writes(tmp_path: pathlib.Path) -> None:
    data_dir = tmp_path / "data"
    damaged_topics.fill(data_dir, "orders")
    file = data_dir / "orders-0" / PARTITION_FILE
    file.rename(tmp_path / "kept")
    file.mkdir()  # as unreadable as on a broken disk
    running = start_embedded(data_dir=str(data_dir), auto_create_topics=False)

    def repair() -> None:
        file.rmdir()
        (tmp_path / "kept").rename(file)

    try:
        with Admin(running.address) as admin:
            wait_until(lambda: bool(admin.describe_cluster()["offline"]), "it is offline")
        follow("A partition takes no writes", running, str(data_dir), {1: repair})
    finally:
        assert running.stop() == 0


def test_a_disk_is_added_or_taken_out(tmp_path: pathlib.Path) -> None:
    data_dir = f"{tmp_path}/data"
    running = start_embedded(
        data_dir=data_dir, settings={"data_dirs": f"{data_dir},{data_dir}-second"}
    )
    try:
        with Admin(running.address) as admin, Producer(running.address) as producer:
            admin.create_topics(NewTopic("orders", 4))
            for number in range(40):
                producer.send("orders", b"%d" % number, partition=number % 4)
            producer.flush(HANG_LIMIT_S)
        follow("A disk is added, or taken out", running, data_dir)
    finally:
        assert running.stop() == 0
    assert len(values_of(data_dir, "orders", 40)) == 40


def test_a_disk_is_lost_for_good(tmp_path: pathlib.Path) -> None:
    data_dir = f"{tmp_path}/data"
    second = pathlib.Path(f"{data_dir}-second")
    both = {"data_dirs": f"{data_dir},{second}"}
    running = start_embedded(data_dir=data_dir, settings=both, auto_create_topics=False)
    try:
        with Admin(running.address) as admin, Producer(running.address) as producer:
            admin.create_topics(NewTopic("orders", 4))
            for number in range(40):
                producer.send("orders", b"%d" % number, partition=number % 4)
            producer.flush(HANG_LIMIT_S)
        run(running, "backup", f"{data_dir}-backups", "--copy")
    finally:
        assert running.stop() == 0
    shutil.rmtree(second)
    second.mkdir(mode=0o700)
    follow("A disk is lost for good", None, data_dir)
    for name in "orders-1", "orders-3":
        (pathlib.Path(f"{data_dir}-restored") / name).rename(second / name)
    assert len(values_of(data_dir, "orders", 40, **both)) == 40


def test_the_catalog_is_damaged(tmp_path: pathlib.Path) -> None:
    data_dir = tmp_path / "data"
    damaged_topics.fill(data_dir, "orders")
    (data_dir / CATALOG_FILE).write_bytes(bytes(8192))
    running = start_embedded(data_dir=str(data_dir), auto_create_topics=False)
    try:
        follow("The catalog is damaged", running, str(data_dir))
    finally:
        assert running.stop() == 0
    assert list(data_dir.glob(f"{CATALOG_FILE}.damaged-*"))


def test_groups_are_not_served(tmp_path: pathlib.Path) -> None:
    data_dir = tmp_path / "data"
    damaged_topics.fill(data_dir, "orders")
    (data_dir / GROUPS_FILE).write_bytes(bytes(range(256)) * 32)
    settings = {"http.listen": "127.0.0.1:0"}
    running = start_embedded(data_dir=str(data_dir), auto_create_topics=False, settings=settings)

    def move_away() -> None:
        for path in data_dir.glob(f"{GROUPS_FILE}*"):
            path.rename(tmp_path / path.name)
        with Admin(running.address) as admin:
            wait_until(lambda: not groups_error(admin), "groups are served")

    try:
        with Admin(running.address) as admin:
            wait_until(lambda: bool(groups_error(admin)), "groups are not served")
        console = console_of(running)
        status, page = get(console, "/health/ready")
        assert (status, "groups.db" in page) == (503, True), page
        assert metrics(console)["tailrace_groups_refused", frozenset()] == 1
        follow("Groups are not served", running, str(data_dir), {2: move_away})
        assert get(console, "/health/ready") == (200, "ready\n")
        assert metrics(console)["tailrace_groups_refused", frozenset()] == 0
        key = TopicPartition("orders", 0)
        with Consumer(bootstrap=running.address, group_id="g") as consumer:
            consumer.assign([key])
            consumer.commit({key: 1})
            assert consumer.committed([key]) == {key: 1}
    finally:
        assert running.stop() == 0


@pytest.mark.slow_because("no timer of the kernel has this clock: it is seen at the next beat")
def test_the_clock_was_set_back(tmp_path: pathlib.Path) -> None:
    clock = WallClock(tmp_path)
    with clock.installed():
        running = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    try:
        with Admin(running.address) as admin, Producer(running.address) as producer:
            admin.create_topics(NewTopic("later", 1, {"delay.enabled": True}))
            clock.jump(3_600)
            in_an_hour = dt.timedelta(hours=1)
            producer.send("later", b"x", deliver_after=in_an_hour).result(HANG_LIMIT_S)
            clock.jump(0)
            follow("The clock was set back", running, running.data_dir)
            clock.jump(7_200)
            with Consumer(
                "later", bootstrap=running.address, auto_offset_reset="earliest"
            ) as reader:
                assert [record.value for record in reader.poll(HANG_LIMIT_S * 1000)] == [b"x"]
    finally:
        assert running.stop() == 0


def test_i_deleted_a_topic(tmp_path: pathlib.Path) -> None:
    running = start_embedded(data_dir=str(tmp_path / "data"))
    try:
        with Admin(running.address) as admin, Producer(running.address) as producer:
            admin.create_topics([NewTopic("payments"), NewTopic("orders")])
            producer.send("payments", b"v").result(HANG_LIMIT_S)
            producer.send("orders", b"v").result(HANG_LIMIT_S)
        run(running, "backup", f"{running.data_dir}-backups")
        follow("I deleted a topic", running, running.data_dir)
        with Consumer("orders", bootstrap=running.address, auto_offset_reset="earliest") as there:
            assert [record.value for record in there.poll(HANG_LIMIT_S * 1000)] == [b"v"]
    finally:
        assert running.stop() == 0
    assert values_of(f"{running.data_dir}-restored", "payments", 1) == [b"v"]


def test_a_backup_fails(tmp_path: pathlib.Path) -> None:
    running = start_embedded(data_dir=str(tmp_path / "data"))
    target = pathlib.Path(f"{running.data_dir}-backups")
    try:
        with Producer(running.address) as producer:
            for _ in range(3):
                producer.send("orders", os.urandom(900_000)).result(HANG_LIMIT_S)
        run(running, "backup", str(target), "--copy")
        objects = target / "objects"
        largest = max(objects.rglob("?" * 64), key=lambda path: path.stat().st_size)
        data = largest.read_bytes()
        largest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        marker = target / "tailrace-backup.json"
        kept = marker.read_bytes()
        marker.write_text("{}")  # as a broken disk leaves it
        run(running, "backup", str(target), status=1)
        marker.write_bytes(kept)
        follow("A backup fails", running, running.data_dir)
    finally:
        assert running.stop() == 0


def test_the_machine_is_replaced(tmp_path: pathlib.Path) -> None:
    data_dir = tmp_path / "data"
    damaged_topics.fill(data_dir, "orders")
    run(None, "backup", f"{data_dir}-backups", "--data-dir", str(data_dir))
    shutil.rmtree(data_dir)
    follow("The machine is replaced", None, str(data_dir))
    values = values_of(f"{data_dir}-restored", "orders", damaged_topics.TOTAL)
    assert len(values) == damaged_topics.TOTAL


def values_of(data_dir: str, topic: str, count: int, **settings: str) -> list[bytes | None]:
    """The values that an appliance on a restored directory serves."""
    running = start_embedded(data_dir=data_dir, settings=settings, auto_create_topics=False)
    try:
        with Consumer(topic, bootstrap=running.address, auto_offset_reset="earliest") as consumer:
            found: list[bytes | None] = []
            while len(found) < count:
                found += [record.value for record in consumer.poll(timeout_ms=1_000)]
            return found
    finally:
        assert running.stop() == 0


def test_every_situation_has_commands_and_a_test() -> None:
    def name(title: str) -> str:
        return "test_" + re.sub(r"\W+", "_", title.lower())

    tests = {found for found in globals() if found.startswith("test_")}
    assert {name(title) for title in BOOK} <= tests
    assert all(BOOK.values()), "a situation without a command"
    alerts = (ROOT / "docs/alerts.md").read_text()
    assert alerts.count("operations.md#") >= 6
