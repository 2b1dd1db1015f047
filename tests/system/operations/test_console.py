"""The console over real HTTP: metrics that Prometheus's own parser reads, health that tells the
truth, and an appliance that does not need it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from appliance.config.settings import Settings
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.console import console_of, get, metrics
from tests.kit.processes import (
    HANG_LIMIT_S,
    children,
    kill_and_wait_for_successor,
    stopped,
    wait_until,
)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (Debian: prometheus)"
)
def test_prometheus_own_linter_finds_nothing_in_the_metrics(appliance: EmbeddedAppliance) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("later", 1, {"delay.enabled": True})])
        admin.alter_group_offsets("billing", {TopicPartition("later", 0): 0})
    _, text = get(console_of(appliance), "/metrics")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "tailrace_cluster_info{id=" in text
    assert 'tailrace_group_lag_records{group="billing",' in text


@pytest.fixture
def appliance() -> Iterator[EmbeddedAppliance]:
    running = start_embedded(settings={"http.listen": "127.0.0.1:0"})
    yield running
    running.stop()


def test_metrics_count_what_waits_and_when_it_is_due(appliance: EmbeddedAppliance) -> None:
    address = console_of(appliance)
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("later", 1, {"delay.enabled": True})])
        for after in (
            dt.timedelta(seconds=50),
            dt.timedelta(minutes=50),
            dt.timedelta(hours=20),
            dt.timedelta(days=900),
        ):
            producer.send("later", b"x", deliver_after=after).result(60)
        gone = producer.send("later", b"x", deliver_after=dt.timedelta(days=2)).result(60)
        producer.send("later", b"now").result(60)
        assert gone.delay_id is not None
        assert admin.cancel_delays([gone.delay_id]) == {gone.delay_id: None}
    found = metrics(address)
    later = {("topic", "later"), ("partition", "0")}
    due = {
        bound: found["tailrace_delayed_records_due", frozenset({*later, ("within_seconds", bound)})]
        for bound in ("60", "3600", "86400", "+Inf")
    }
    assert due == {"60": 1, "3600": 2, "86400": 3, "+Inf": 4}
    assert found["tailrace_delayed_records_pending", frozenset(later)] == 4
    assert found["tailrace_delayed_records_cancelled_total", frozenset(later)] == 1
    assert found["tailrace_partition_high_watermark_offset", frozenset(later)] == 1
    assert found["tailrace_partition_online", frozenset(later)] == 1
    assert found["tailrace_up", frozenset()] == 1
    live = {
        name: dict(labels)["process"] for name, labels in found if name == "tailrace_process_live"
    }
    assert live
    assert all(
        found["tailrace_process_resident_memory_bytes", frozenset({("process", p)})] > 1e6
        for p in ("front-0", "worker-0", "console")
    )


def test_every_page_answers_head_as_get_without_a_body_and_no_other_method(
    appliance: EmbeddedAppliance,
) -> None:
    address = console_of(appliance)
    assert get(address, "/")[0] == 200
    for path in ("/", "/metrics", "/health/live", "/nothing"):
        raw = urllib.request.Request(address + path, method="HEAD")
        try:
            answer = urllib.request.urlopen(raw, timeout=HANG_LIMIT_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            assert (answer.status, answer.read()) == (get(address, path)[0], b"")
            assert int(answer.headers["Content-Length"]) > 0
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(
            urllib.request.Request(address + "/metrics", data=b"x", method="POST"),
            timeout=HANG_LIMIT_S,
        )
    with refused.value as answered:
        assert (answered.status, answered.headers["Allow"]) == (405, "GET, HEAD")


def test_a_scrape_may_take_openmetrics_and_some_families_by_name(
    appliance: EmbeddedAppliance,
) -> None:
    address = console_of(appliance)
    names = "name[]=tailrace_up&name[]=tailrace_process_restarts_total"
    _, text = get(address, f"/metrics?{names}")
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert found.keys() == {"tailrace_up", "tailrace_process_restarts"}
    assert all(found.values())
    scrape = urllib.request.Request(
        address + "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(scrape, timeout=120) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = list(openmetrics.text_string_to_metric_families(answer.read().decode()))  # type: ignore[no-untyped-call]
    assert {"tailrace_build", "tailrace_up"} <= {family.name for family in families}


def test_scrapers_that_never_pause_cost_no_record_and_no_health_check(
    appliance: EmbeddedAppliance,
) -> None:
    address = console_of(appliance)

    def scrape(_number: int) -> int:
        return get(address, "/metrics")[0]

    with ThreadPoolExecutor(4) as pool, Producer(appliance.address) as producer:
        scrapes = [pool.submit(scrape, number) for number in range(200)]
        handles = [producer.send("orders", b"%d" % number) for number in range(2_000)]
        assert [handle.result(HANG_LIMIT_S).offset for handle in handles] == list(range(2_000))
        assert get(address, "/health/ready")[0] == 200
        assert {each.result(HANG_LIMIT_S) for each in scrapes} == {200}
    restarts = {
        labels: value
        for (name, labels), value in metrics(address).items()
        if name == "tailrace_process_restarts_total"
    }
    assert restarts
    assert not any(restarts.values())


def test_health_says_who_does_not_serve_and_metrics_go_on_without_a_front(
    appliance: EmbeddedAppliance,
) -> None:
    address = console_of(appliance)
    assert get(address, "/health/live") == (200, "alive\n")
    wait_until(lambda: get(address, "/health/ready") == (200, "ready\n"), "it is ready")
    assert get(address, "/nothing")[0] == 404
    front = children(appliance)["tr-front-0"]
    with stopped(front):
        found = metrics(address)
        assert found["tailrace_up", frozenset()] == 0
        assert found["tailrace_process_live", frozenset({("process", "front-0")})] == 1
    wait_until(lambda: metrics(address)["tailrace_up", frozenset()] == 1, "the front answers")
    kill_and_wait_for_successor(appliance, "tr-front-0")
    wait_until(lambda: get(address, "/health/ready")[0] == 200, "it is ready again")
    assert (
        metrics(address)["tailrace_process_restarts_total", frozenset({("process", "front-0")})]
        == 1
    )


def test_a_killed_console_comes_back_and_garbage_or_silence_stop_it_for_nobody(
    appliance: EmbeddedAppliance,
) -> None:
    first = console_of(appliance)
    host, _, port = first.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))):  # which says nothing
        with socket.create_connection((host, int(port))) as garbage:
            garbage.sendall(os.urandom(4096) + b"\r\n\r\n")
        assert get(first, "/health/live")[0] == 200
    kill_and_wait_for_successor(appliance, "tr-console-0")
    wait_until(lambda: console_of(appliance) != first, "the successor is bound")
    assert get(console_of(appliance), "/health/live")[0] == 200


def test_connections_that_trickle_are_ended_and_stop_nobody(appliance: EmbeddedAppliance) -> None:
    """Each sends a byte, and more than the console has room for: whoever asks is answered, and
    those that never ask are closed.
    """
    address = console_of(appliance)
    host, _, port = address.removeprefix("http://").rpartition(":")
    console = children(appliance)["tr-console-0"]
    with contextlib.ExitStack() as opened:
        slow = [
            opened.enter_context(socket.create_connection((host, int(port)), timeout=HANG_LIMIT_S))
            for _ in range(40)
        ]
        for turn in range(3):
            for connection in slow:
                try:
                    connection.sendall(b"GET"[turn : turn + 1])
                except OSError:
                    pass  # it has been ended
            assert get(address, "/health/live") == (200, "alive\n")
        for connection in slow:
            try:
                assert connection.recv(1) == b""
            except ConnectionResetError:
                pass
    assert children(appliance)["tr-console-0"] == console


def test_a_port_that_is_taken_is_said_and_stops_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        running = start_embedded(settings={"http.listen": address})
        try:
            with Producer(running.address) as producer:
                assert producer.send("t", b"x").result(60).offset == 0

            def is_said() -> bool:
                with open(running.log_path, encoding="utf-8") as log:
                    return f"console_not_bound address={address}" in log.read()

            wait_until(is_said, "it is said")
        finally:
            assert running.stop() == 0


@pytest.fixture
def taken_usual_port() -> Iterator[str]:
    """The console's default address, which a program has: we, or whoever had it before."""
    usual = Settings().http_listen
    host, _, port = usual.rpartition(":")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(socket.create_server((host, int(port))))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        yield usual


def test_the_usual_port_that_is_taken_is_left_to_whoever_has_it_and_the_status_says_where_the_console_is(  # noqa: E501
    taken_usual_port: str,
) -> None:
    running = start_embedded(settings={"http.listen": taken_usual_port})
    try:
        with Admin(running.address) as admin:
            wait_until(lambda: admin.describe_cluster()["console"], "the console listens")
            cluster = admin.describe_cluster()
            assert cluster["console"].startswith("http://127.0.0.1:")
            assert not cluster["console"].endswith(taken_usual_port)
            assert get(cluster["console"], "/health/live") == (200, "alive\n")
            assert all(process["live"] for process in cluster["processes"])
    finally:
        assert running.stop() == 0
