"""Quotas on a running appliance: set live by every face, durable, and kept against tenants who
reconnect and change their names. A rate is shown by the time that its excess takes at least.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

import tailrace
from tailrace import (
    Admin,
    Consumer,
    NewTopic,
    Producer,
    QuotaEntity,
    QuotaExceededError,
    TailraceError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run
from tests.kit.processes import kill_and_wait_for_successor, wait_until

KIB = 1 << 10
USER = QuotaEntity(user="ANONYMOUS")


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    with tailrace.embedded() as running:
        yield running


@pytest.fixture
def admin(appliance: EmbeddedAppliance) -> Iterator[Admin]:
    with Admin(appliance.address, client_id="operator") as client:
        yield client
        client.alter_quotas(dict.fromkeys(client.describe_quotas()))


def cli(appliance: EmbeddedAppliance, *arguments: str) -> str:
    return run(appliance, "quota", *arguments).stdout.decode()


def test_a_producer_is_slowed_to_its_rate_loses_nothing_and_knows_of_it(
    appliance: EmbeddedAppliance, admin: Admin
) -> None:
    admin.alter_quotas({QuotaEntity(client="slow"): {"producer_byte_rate": "200KiB"}})
    admin.create_topics(NewTopic("slowed"))
    begun = time.monotonic()
    with Producer(appliance.address, client_id="slow", batch_size=20 * KIB) as producer:
        for number in range(500):
            producer.send("slowed", value=number.to_bytes(2, "big") + bytes(KIB))
        producer.flush()
        metrics = producer.metrics()
    lasted = time.monotonic() - begun
    assert lasted > 500 / 200 - 1 - 0.3, "a second's burst, then the rate"
    assert metrics["throttled"] > 0
    assert metrics["throttled_ms"] > 100
    assert metrics["errors"] == 0
    assert admin.describe_cluster()["processes"]
    [row] = [row for row in admin.quota_usage() if row["quota"] == "producer_byte_rate"]
    assert (row["client"], row["throttled_ms"] > 100) == ("slow", True)
    with Consumer("slowed", bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        read: list[int] = []
        while len(read) < 500:
            read += [int.from_bytes(r.value[:2], "big") for r in consumer.poll(timeout_ms=1_000)]
    assert read == list(range(500))


def test_a_consumer_is_slowed_to_its_rate_and_reads_everything(
    appliance: EmbeddedAppliance, admin: Admin
) -> None:
    with Producer(appliance.address, batch_size=20 * KIB) as producer:
        admin.create_topics(NewTopic("read"))
        for _ in range(600):
            producer.send("read", value=bytes(KIB))
    admin.alter_quotas({QuotaEntity(client="reader"): {"consumer_byte_rate": "200KiB"}})
    begun = time.monotonic()
    count = 0
    with Consumer(
        "read", bootstrap=appliance.address, client_id="reader", auto_offset_reset="earliest"
    ) as consumer:
        while count < 600:
            count += len(consumer.poll(timeout_ms=1_000))
        metrics = consumer.metrics()
    assert time.monotonic() - begun > 600 / 200 - 1 - 0.5
    assert metrics["throttled"] > 0


def test_a_user_shares_one_rate_over_reconnects_and_client_ids(
    appliance: EmbeddedAppliance, admin: Admin
) -> None:
    admin.create_topics(NewTopic("shared"))
    admin.alter_quotas({USER: {"producer_byte_rate": "100KiB"}})
    begun = time.monotonic()
    for number in range(10):
        with Producer(appliance.address, client_id=f"name-{number}") as producer:
            for _ in range(30):
                producer.send("shared", value=bytes(KIB))
    assert time.monotonic() - begun > 300 / 100 - 1 - 0.5


def test_sums_are_refused_with_a_sentence(appliance: EmbeddedAppliance, admin: Admin) -> None:
    admin.alter_quotas({QuotaEntity(prefix="tenant."): {"topics_max": 2, "partitions_max": 5}})
    admin.create_topics(NewTopic("tenant.a", partitions=3))
    with pytest.raises(QuotaExceededError, match=r"prefix=tenant\. has 3 of 5 partitions"):
        admin.create_topics(NewTopic("tenant.b", partitions=3))
    admin.create_topics(NewTopic("tenant.b", partitions=2))
    with pytest.raises(QuotaExceededError, match="2 of 2 topics"):
        admin.create_topics(NewTopic("tenant.c"))
    with pytest.raises(QuotaExceededError, match="needs 1 more"):
        admin.create_partitions({"tenant.b": 3})
    admin.create_topics(NewTopic("tenant"))
    admin.delete_topics("tenant.a")
    admin.create_topics(NewTopic("tenant.c"))
    admin.delete_topics(["tenant", "tenant.b", "tenant.c"])


def test_a_full_prefix_takes_no_more_until_records_are_deleted(
    appliance: EmbeddedAppliance, admin: Admin
) -> None:
    admin.create_topics(NewTopic("full.t", configs={"segment.bytes": 1 << 20}))
    admin.alter_quotas({QuotaEntity(prefix="full."): {"stored_bytes_max": 300 * KIB}})
    with Producer(appliance.address, batch_size=20 * KIB, compression_type="none") as producer:

        def is_refused() -> bool:
            try:
                producer.send("full.t", value=bytes(10 * KIB)).result()
            except QuotaExceededError:
                return True
            return False

        wait_until(is_refused, "the prefix is full")
        admin.delete_records({tailrace.TopicPartition("full.t", 0): -1})
        wait_until(lambda: not is_refused(), "there is room again")


def test_a_refused_connection_says_which_quota_it_was(
    appliance: EmbeddedAppliance, admin: Admin
) -> None:
    admin.alter_quotas({QuotaEntity(client="one"): {"connections_max": 1}})
    with Admin(appliance.address, client_id="one") as first:
        first.list_topics()
        with (
            Admin(appliance.address, client_id="one", connect_timeout_ms=5_000) as second,
            pytest.raises(TailraceError, match="connections_max is 1"),
        ):
            second.list_topics()


def test_the_command_line_sets_lists_and_removes(
    appliance: EmbeddedAppliance, admin: Admin
) -> None:
    cli(appliance, "set", "--user", "*", "--client", "a b", "request_rate=500")
    cli(appliance, "set", "--user", "*", "--client", "a b", "producer_byte_rate=1MiB")
    cli(appliance, "set", "--prefix", "x.", "topics_max=7", "--validate")
    assert json.loads(cli(appliance, "list", "--json")) == [
        {"user": "*", "client": "a b", "quota": "producer_byte_rate", "value": 1 << 20},
        {"user": "*", "client": "a b", "quota": "request_rate", "value": 500},
    ]
    assert "1,048,576" in cli(appliance, "list")
    wait_until(lambda: not cli(appliance, "list", "--usage"), "what others used is forgotten")
    both = ("--user", "*", "--client", "a b")
    other = run(appliance, "quota", "remove", *both, "request_rate", "topics_max", status=1)
    assert b"has no topics_max; nothing was removed" in other.stderr
    cli(appliance, "remove", "--user", "*", "--client", "a b", "request_rate")
    assert admin.describe_quotas() == {QuotaEntity("*", "a b"): {"producer_byte_rate": 1 << 20}}
    cli(appliance, "remove", "--user", "*", "--client", "a b")
    assert b"no quotas" in run(appliance, "quota", "list").stderr
    gone = run(appliance, "quota", "remove", "--user", "x", status=1)
    assert b"has no quotas" in gone.stderr
    wrong = run(appliance, "quota", "set", "--user", "x", "topics_max=1", status=1)
    assert b"is a quota of a prefix" in wrong.stderr


def test_quotas_survive_the_end_of_front_and_controller(
    appliance: EmbeddedAppliance, admin: Admin
) -> None:
    admin.alter_quotas({USER: {"producer_byte_rate": "100MiB", "connections_max": 50}})
    for process in ("tr-controller-0", "tr-front-0"):
        kill_and_wait_for_successor(appliance, process)
    assert admin.describe_quotas() == {
        USER: {"producer_byte_rate": 100 << 20, "connections_max": 50}
    }
    wait_until(lambda: bool(admin.quota_usage()), "the new front uses them")
    admin.alter_quotas({USER: {"connections_max": None}})
    assert admin.describe_quotas() == {USER: {"producer_byte_rate": 100 << 20}}


def test_status_shows_a_quota_that_is_used_up(appliance: EmbeddedAppliance, admin: Admin) -> None:
    admin.alter_quotas({QuotaEntity(prefix="empty."): {"topics_max": 3, "stored_bytes_max": 0}})
    wait_until(
        lambda: b"quotas reached: empty. stored_bytes_max" in run(appliance, "status").stdout,
        "status shows the quota that is used up",
    )
