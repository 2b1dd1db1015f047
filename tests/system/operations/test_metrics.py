"""Metrics of what an appliance does, and the alerts and the dashboard that read them."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics import parser as openmetrics

from tailrace import Admin, Consumer, NewTopic, Producer, UnknownTopicError
from tailrace.core.error_codes import ErrorCode
from tailrace.core.records import Record
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.console import console_of, get, metrics
from tests.kit.hosts.ports import free_port
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import HANG_LIMIT_S, wait_until

ROOT = pathlib.Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (Debian: prometheus)"
)


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    running = start_embedded(settings={"http.listen": "127.0.0.1:0", "metrics.topics": 2})
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(name, 1) for name in ("a", "b", "c", "d")])
            with pytest.raises(UnknownTopicError):
                admin.describe_topics(["nothing"])
        with Consumer(
            "a", bootstrap=running.address, group_id="g", auto_offset_reset="earliest"
        ) as consumer:
            consumer.poll(timeout_ms=0)
            with Producer(running.address) as producer:
                for number in range(100):
                    producer.send("a", b"%d" % number)
                    producer.send("c", b"x")
                    producer.send("d", b"x")
            records: list[Record] = []
            while len(records) < 50:
                records += consumer.poll(timeout_ms=60_000, max_records=50)
            consumer.commit()
        yield running
    finally:
        running.stop()


def test_durations_requests_and_bytes_are_counted(appliance: EmbeddedAppliance) -> None:
    found = metrics(console_of(appliance))
    front, flusher = ("process", "front-0"), ("process", "flusher-0")
    for name, process in (("produce", front), ("fetch", front), ("sync", flusher)):
        count = found[f"tailrace_{name}_duration_seconds_count", frozenset({process})]
        total = found[f"tailrace_{name}_duration_seconds_sum", frozenset({process})]
        assert count > 0
        assert total > 0
    assert found["tailrace_commit_duration_seconds_count", frozenset({("process", "groups-0")})] > 0
    assert found["tailrace_requests_total", frozenset({front, ("api", "PRODUCE")})] > 0
    assert found["tailrace_requests_total", frozenset({front, ("api", "FETCH")})] > 0
    topic = frozenset({("topic", "a"), ("partition", "0")})
    assert found["tailrace_partition_appended_records_total", topic] == 100
    assert found["tailrace_partition_appended_batches_total", topic] > 0
    appended = found["tailrace_partition_appended_bytes_total", topic]
    assert appended > 200
    assert found["tailrace_partition_fetched_bytes_total", topic] > 0
    assert found["tailrace_partition_fetched_records_total", topic] > 0
    assert found["tailrace_group_lag_records", topic | {("group", "g")}] == 50
    assert found["tailrace_group_lag_seconds", topic | {("group", "g")}] > 0
    assert found["tailrace_process_cpu_seconds_total", frozenset({front})] > 0
    assert found["tailrace_process_open_fds", frozenset({front})] > 0


def test_a_scrape_of_openmetrics_leads_from_a_slow_request_to_its_trace(
    appliance: EmbeddedAppliance,
) -> None:
    provider = TracerProvider()
    address = console_of(appliance)
    with (
        Producer(appliance.address, tracing=provider, acks="all") as producer,
        provider.get_tracer("program").start_as_current_span("order") as span,
    ):
        producer.send("b", b"traced").result(HANG_LIMIT_S)
    trace_id = f"{span.get_span_context().trace_id:032x}"
    scrape = urllib.request.Request(
        f"{address}/metrics?name[]=tailrace_produce_duration_seconds_bucket",
        headers={"Accept": "application/openmetrics-text; version=1.0.0"},
    )
    with urllib.request.urlopen(scrape, timeout=HANG_LIMIT_S) as answer:
        text = answer.read().decode()
    (family,) = openmetrics.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    (sample,) = (
        sample
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": trace_id}
    )
    assert 0 < sample.exemplar.value <= float(sample.labels["le"])
    assert trace_id not in get(address, "/metrics")[1]  # its text has no place for it


def test_the_occupancy_of_rings_lanes_and_credit_is_within_their_sizes(
    appliance: EmbeddedAppliance,
) -> None:
    found = metrics(console_of(appliance))
    for name, process in (("ring", "worker-0"), ("lane", "worker-0"), ("credit", "front-0")):
        labels = frozenset({("process", process)})
        used, size = (found[f"tailrace_{name}_{kind}_bytes", labels] for kind in ("used", "size"))
        assert 0 <= used <= size, name
        assert size > 0, name
    assert found["tailrace_credit_waiting_connections", frozenset({("process", "front-0")})] == 0


def test_topics_above_the_limit_are_summed(appliance: EmbeddedAppliance) -> None:
    found = metrics(console_of(appliance))
    topics = {
        dict(labels)["topic"]
        for name, labels in found
        if name == "tailrace_partition_appended_records_total"
    }
    assert len(topics) == 3
    assert "_other" in topics
    other = frozenset({("topic", "_other"), ("partition", "")})
    assert found["tailrace_partition_appended_records_total", other] >= 200
    assert found["tailrace_topics_summed", frozenset()] >= 2


def test_a_refused_request_is_counted_by_its_code(appliance: EmbeddedAppliance) -> None:
    labels = frozenset({("process", "front-0"), ("code", "UNKNOWN_API")})
    with RawClient(appliance.address) as client:
        code, _ = client.ask(63, {})
    assert code is ErrorCode.UNKNOWN_API
    assert metrics(console_of(appliance))["tailrace_request_errors_total", labels] == 1


@needs_promtool
def test_prometheus_accepts_the_metrics_and_the_rules_and_the_rules_do_what_they_say(
    appliance: EmbeddedAppliance,
) -> None:
    _, text = get(console_of(appliance), "/metrics")
    for command, data in (
        (["promtool", "check", "metrics"], text),
        (["promtool", "check", "rules", str(RULES / "tailrace.rules.yml")], ""),
        (["promtool", "test", "rules", str(RULES / "tailrace.rules.test.yml")], ""),
        (["promtool", "check", "config", str(RULES / "prometheus.yml")], ""),
    ):
        done = subprocess.run(
            command, input=data, capture_output=True, text=True, check=False, cwd=RULES
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "tailrace_sync_duration_seconds_bucket" in text


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian: prometheus")
def test_a_real_prometheus_scrapes_the_appliance(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    target = urllib.parse.urlsplit(console_of(appliance)).netloc
    config = (RULES / "prometheus.yml").read_text().replace("127.0.0.1:7400", target)
    (tmp_path / "prometheus.yml").write_text(config.replace("15s", "1s"))
    (tmp_path / "tailrace.rules.yml").write_text((RULES / "tailrace.rules.yml").read_text())
    port = free_port()
    with subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as prometheus:
        try:

            def value() -> list[object]:
                query = urllib.parse.quote("tailrace_up")
                try:
                    status, text = get(f"http://127.0.0.1:{port}", f"/api/v1/query?query={query}")
                except OSError:
                    return []
                return list(json.loads(text)["data"]["result"]) if status == 200 else []

            wait_until(lambda: bool(value()), "Prometheus has a sample")
            _, text = get(f"http://127.0.0.1:{port}", "/api/v1/targets")
            (scraped,) = json.loads(text)["data"]["activeTargets"]
            assert (scraped["health"], scraped["lastError"]) == ("up", "")
        finally:
            prometheus.terminate()
            prometheus.wait(HANG_LIMIT_S)


def test_each_alert_has_its_section_and_each_metric_of_rules_and_dashboard_exists(
    appliance: EmbeddedAppliance,
) -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", page, re.MULTILINE)
    }
    rules = (RULES / "tailrace.rules.yml").read_text()
    named = re.findall(r"runbook: docs/alerts\.md#(\S+)", rules)
    assert len(named) == rules.count("- alert:")
    assert set(named) == anchors
    _, text = get(console_of(appliance), "/metrics")
    exported = {
        name
        for family in re.findall(r"^# TYPE (\w+) \w+$", text, re.MULTILINE)
        for name in (family, f"{family}_bucket", f"{family}_count", f"{family}_sum")
    }
    source = (ROOT / "appliance" / "observe").glob("metrics/*.py")
    later = set(re.findall(r"\"(tailrace_\w+)\"", "".join(path.read_text() for path in source)))
    dashboard = (ROOT / "deploy" / "grafana" / "tailrace.json").read_text()
    used = set(re.findall(r"tailrace_\w+", rules + dashboard)) - {"tailrace_rules"}
    known = exported | later | {f"{name}{end}" for name in later for end in ("_total", "_bucket")}
    assert used - known == set()
    panels = json.loads(dashboard)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
