"""`tailrace top`: frames of a running appliance in pipes, as JSON and on a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.cli.top.frame import frame
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import on_terminal, run
from tests.kit.processes import HANG_LIMIT_S


@pytest.fixture
def busy(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic with records, and a group of its name that lags behind."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, 2))
        for number in range(7):
            producer.send(topic, b"%d" % number, partition=number % 2).result(HANG_LIMIT_S)
    with Consumer(
        topic, bootstrap=appliance.address, group_id=topic, auto_offset_reset="earliest",
        enable_auto_commit=False,
    ) as consumer:  # fmt: skip
        while not (records := consumer.poll(timeout_ms=1_000, max_records=1)):
            pass
        consumer.commit()
        assert len(records) == 1
    return topic


def test_json_has_what_the_page_and_the_metrics_have(
    appliance: EmbeddedAppliance, busy: str
) -> None:
    state = json.loads(run(appliance, "top", "--json", "--interval", "50ms").stdout)
    assert state["error"] == state["note"] == ""
    [row] = [row for row in state["topics"] if row["topic"] == busy]
    assert (row["partitions"], row["records"], row["offline"]) == (2, 7, 0)
    [group] = [group for group in state["groups"] if group["group"] == busy]
    assert (group["lag"], group["members"]) == (6, 0)
    processes = {row["process"]: row for row in state["processes"]}
    assert {"supervisor", "controller", "front-0", "worker-0", "flusher-0", "groups-0"} <= set(
        processes
    )
    for row in processes.values():
        assert row["state"] == "live"
        assert row["pss_bytes"] > 0
        assert row["cpu_percent"] >= 0
    assert set(state["latencies"]) == {"produce", "fetch", "delivery", "sync"}


def test_a_pipe_gets_one_plain_frame_with_what_is_wrong_first(
    appliance: EmbeddedAppliance, busy: str
) -> None:
    shown = run(appliance, "top", "--interval", "50ms").stdout.decode()
    assert "\x1b" not in shown
    first, second, *rest = shown.splitlines()
    assert appliance.address in first
    # other tests of this appliance may have killed a process of it
    assert second == "nothing is wrong" or second.startswith(("warning: ", "problem: "))
    text = "\n".join(rest)
    assert busy in text
    assert text.index("TOPIC ") < text.index("GROUP ") < text.index("PROCESS ")


def test_a_terminal_is_watched_until_q_and_left_as_it_was(
    appliance: EmbeddedAppliance, busy: str
) -> None:
    status, shown = on_terminal(
        appliance, "top", "--interval", "100ms", typed="nsq", columns=120, term="xterm"
    )
    assert status == 0
    assert shown.count("q: quit") >= 3, "a frame for each key"
    assert "tailrace tcp://" in shown
    assert shown.index("\x1b[?1049h") < shown.index("q: quit") < shown.index("\x1b[?1049l")


def test_once_on_a_terminal_is_one_frame(appliance: EmbeddedAppliance, busy: str) -> None:
    status, shown = on_terminal(
        appliance, "top", "--once", "--sort", "name", "--interval", "50ms", columns=200
    )
    assert (status, "q: quit" in shown, busy in shown) == (0, False, True)


def test_without_an_appliance_the_status_says_so() -> None:
    assert b"no appliance answers" in run(None, "top", "--once", status=3).stderr


def state_of(topics: int, groups: int, problems: int = 0, error: str = "") -> dict[str, Any]:
    return {
        "time_ms": 0, "interval_s": 2.0, "error": error, "note": "",
        "problems": [{"level": "problem", "check": "c", "detail": f"p{n}"}
                     for n in range(problems)],
        "rates": {"records_per_s": 1.0, "produce_requests_per_s": None,
                  "fetch_requests_per_s": 2.0, "refused_per_s": 0.0, "sent_bytes_per_s": None},
        "latencies": {"produce": {"count": 0, "p50_ms": None, "p99_ms": 1.234, "p999_ms": 99.9}},
        "topics": [
            {"topic": f"t{n:03}", "records_per_s": float(n), "records": n, "bytes": 1000 - n,
             "partitions": 1, "offline": 0} for n in range(topics)
        ],
        "groups": [
            {"group": f"g{n:03}", "lag": n, "members": 1, "state": "Stable", "kind": "consumer"}
            for n in range(groups)
        ],
        "processes": [
            {"process": "front-0", "pid": 1, "state": "live", "cpu_percent": None,
             "pss_bytes": None, "cores": None, "restarts": 0, "errors": 0}
        ],
    }  # fmt: skip


@pytest.mark.parametrize("height", [24, 40, 100])
@pytest.mark.parametrize(("topics", "groups"), [(0, 0), (1_000, 0), (1_000, 300), (2, 300)])
def test_a_frame_fits_the_terminal_and_counts_what_it_leaves_out(
    height: int, topics: int, groups: int
) -> None:
    lines = frame(state_of(topics, groups), "tcp://h:1", "rate", height)
    assert len(lines) <= height
    text = "\n".join(line.text for line in lines)
    assert "nothing is wrong" in text
    assert f"and {topics:,} more" not in text
    assert (" more" in text) is (topics + groups > 100)
    if topics:
        assert f"t{topics - 1:03}" in text
    if topics + groups < 2_000:
        assert "front-0" in text


def test_topics_are_ordered_as_asked_and_problems_are_cut() -> None:
    def first_topic(sort: str) -> str:
        lines = [line.text for line in frame(state_of(5, 0, 20), "a", sort, None)]
        assert lines[1] == "problem: c: p0"
        assert "and 13 more: tailrace doctor" in lines
        return lines[next(n for n, line in enumerate(lines) if line.startswith("TOPIC")) + 1][:4]

    assert [first_topic(sort) for sort in ("rate", "size", "name")] == ["t004", "t000", "t000"]


def test_a_front_that_does_not_answer_is_the_first_line() -> None:
    lines = frame(state_of(0, 0, error="no appliance\nanswers"), "a", "rate", 24)
    assert lines[1].text == "no front answers: no appliance\\x0aanswers"
