"""The log of an ordinary day has nothing that frightens, is machine-readable where that is asked
for, and names the request that a client's error names.
"""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from tailrace import (
    Admin,
    Consumer,
    NewTopic,
    Producer,
    TailraceError,
    TopicExistsError,
    TopicPartition,
    UnknownTopicError,
    embedded,
)
from tests.kit.appliances.console import console_of, metrics
from tests.kit.appliances.served import served
from tests.kit.processes import HANG_LIMIT_S

_LINE = re.compile(r"\S+ \S+ (?P<level>[A-Z]+) process=tr-[\w-]+ (?P<event>[a-z_]+)(?P<rest>.*)")


def work(address: str) -> None:
    """Do the work of an ordinary client."""
    with Admin(address) as admin, Producer(address) as producer:
        admin.create_topics(NewTopic("orders", 2, {"delay.enabled": "true"}))
        producer.send("orders", b"v").result(HANG_LIMIT_S)
        with Consumer(
            "orders", bootstrap=address, group_id="g", auto_offset_reset="earliest"
        ) as consumer:
            while not consumer.poll(timeout_ms=1_000):
                pass
            consumer.commit()
        admin.delete_topics("orders")


def test_an_ordinary_run_logs_no_warning_and_each_line_is_an_event() -> None:
    with embedded(settings={"http.listen": "127.0.0.1:0"}) as appliance:
        console = console_of(appliance)
        work(appliance.address)
        assert metrics(console)["tailrace_up", frozenset()] == 1
        said = pathlib.Path(appliance.log_path).read_text()
    for line in said.splitlines():
        found = _LINE.fullmatch(line)
        assert found, line
        assert found["level"] == "INFO", line
    assert " ready address=" in said


def test_the_request_that_an_error_names_is_found_in_a_json_log(tmp_path: pathlib.Path) -> None:
    with served(tmp_path, 'log_level = "info"\nslow_operation_ms = 1\n') as plain:
        work(plain.address)
        with Admin(plain.address, client_id="billing") as admin:
            with pytest.raises(UnknownTopicError) as unknown:
                admin.delete_records({TopicPartition("no", 0): 1})
            admin.create_topics(NewTopic("twice"))
            with pytest.raises(TopicExistsError) as exists:
                admin.create_topics(NewTopic("twice"))
        for raised in (unknown.value, exists.value):
            assert isinstance(raised, TailraceError)
            assert re.fullmatch(r"[0-9a-f]+", raised.request_id)
            assert str(raised).endswith(f", request {raised.request_id}]")
            plain.wait_for(f"request={raised.request_id}")


def test_json_lines_have_the_fields_of_each_event(tmp_path: pathlib.Path) -> None:
    with served(tmp_path, 'log_format = "json"\n', at_start='"event":"ready"') as appliance:
        rows = [json.loads(line) for line in appliance.log.splitlines()]
    [ready] = [row for row in rows if row["event"] == "ready"]
    assert (ready["level"], ready["process"]) == ("info", "tr-supervisor-0")
    assert ready["fields"]["address"].startswith("tcp://127.0.0.1:")
    assert ready["fields"]["pid"] == appliance.process.pid
