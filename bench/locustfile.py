"""Load by locust: producers, consumers and both, over the SDK under gevent. `make load USERS=50
SECONDS=30`, or `locust -f bench/locustfile.py`.

A producer user sends one record at a time and waits for its acknowledgement; a consumer user
follows the topic, and its times are from the record's `send` until it has it; a mixed user does
both in turn. Each user has a connection of its own.

What the generator itself delays is measured beside it: a greenlet that wants to wake every 10 ms
notes how late it was (`generator lag`). Latencies below that lag are the generator's, not the
appliance's; the summary says so. Settings: TAILRACE_BOOTSTRAP, LOAD_TOPIC, LOAD_BYTES, LOAD_ACKS.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import gevent  # type: ignore[import-untyped]
from locust import User, between, events, task

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import TailraceError, TopicExistsError
from tailrace.kernel.reference_arrow import default_rows

BOOTSTRAP = os.environ.get("TAILRACE_BOOTSTRAP", "tcp://127.0.0.1:7420")
TOPIC = os.environ.get("LOAD_TOPIC", "load")
VALUE_BYTES = int(os.environ.get("LOAD_BYTES", "100"))
ACKS: Any = {"0": 0, "1": 1, "all": "all"}[os.environ.get("LOAD_ACKS", "all")]
LAG_INTERVAL_S = 0.01


@events.test_start.add_listener
def make_topic(environment: Any, **_: Any) -> None:
    """Once, before the first user; and begin to look at the generator itself."""
    default_rows(
        [0], [None], [b""], None
    )  # loads pandas where there is one, a second in which no user could do anything
    with Admin(BOOTSTRAP) as admin:
        try:
            admin.create_topics([NewTopic(TOPIC, 4)])
        except TopicExistsError:
            pass
    gevent.spawn(_measure_lag, environment)


def _measure_lag(environment: Any) -> None:
    while environment.runner is not None and environment.runner.state not in ("stopped", "cleanup"):
        begun = time.perf_counter()
        gevent.sleep(LAG_INTERVAL_S)
        _fire(
            environment,
            "generator",
            "lag",
            (time.perf_counter() - begun - LAG_INTERVAL_S) * 1000,
            0,
            None,
        )


@events.quitting.add_listener
def report_saturation(environment: Any, **_: Any) -> None:
    """The generator's share of what was measured."""
    stats = environment.stats
    lag = stats.get("lag", "generator")
    if lag.num_requests:
        p95 = lag.get_response_time_percentile(0.95)
        shown = [
            entry
            for entry in stats.entries.values()
            if entry.method != "generator" and entry.num_requests
        ]
        least = min((entry.get_response_time_percentile(0.95) for entry in shown), default=0.0)
        verdict = (
            "more than half of what was measured: use fewer users, or more generators"
            if p95 > least / 2
            else "the figures are the appliance's"
        )
        print(f"generator lag: p50 {lag.median_response_time:.1f} ms, p95 {p95:.1f} ms; {verdict}")


def _fire(
    environment: Any,
    kind: str,
    name: str,
    milliseconds: float,
    length: int,
    error: TailraceError | None,
) -> None:
    environment.events.request.fire(
        request_type=kind,
        name=name,
        response_time=milliseconds,
        response_length=length,
        exception=error,
        context={},
    )


class _Client(User):
    """Measurement of a call, shared by all users."""

    abstract = True
    wait_time = between(0.001, 0.01)

    def timed(self, kind: str, act: Callable[[], int]) -> None:
        """Do something, and tell locust how long it took and how many bytes it moved."""
        begun, error, length = time.perf_counter(), None, 0
        try:
            length = act()
        except TailraceError as failure:
            error = failure
        _fire(self.environment, kind, TOPIC, (time.perf_counter() - begun) * 1000, length, error)


class _Sending(_Client):
    abstract = True

    def on_start(self) -> None:
        self.producer = Producer(BOOTSTRAP, acks=ACKS, linger_ms=0)
        self._filler = b"x" * max(0, VALUE_BYTES - 8)

    def on_stop(self) -> None:
        self.producer.close(5)

    def send_one(self) -> int:
        value = time.time_ns().to_bytes(8, "big") + self._filler
        self.producer.send(TOPIC, value).result(30)
        return len(value)


class ProducerUser(_Sending):
    """Sends, and waits for each acknowledgement."""

    weight = 3

    @task
    def produce(self) -> None:
        self.timed("produce", self.send_one)


class _Reading(_Client):
    abstract = True

    def on_start(self) -> None:
        super().on_start()
        self.consumer = Consumer(TOPIC, bootstrap=BOOTSTRAP, auto_offset_reset="latest")

    def on_stop(self) -> None:
        self.consumer.close()
        super().on_stop()  # type: ignore[no-untyped-call]

    def read_some(self) -> None:
        """Each record's time is its own: from `send` to here."""
        try:
            records = self.consumer.poll(100)
        except TailraceError as error:
            _fire(self.environment, "consume", TOPIC, 0.0, 0, error)
            return
        now_ns = time.time_ns()
        for record in records:
            assert isinstance(record.value, bytes)
            _fire(
                self.environment,
                "consume",
                TOPIC,
                (now_ns - int.from_bytes(record.value[:8], "big")) / 1e6,
                len(record.value),
                None,
            )


class ConsumerUser(_Reading):
    """Follows the topic."""

    weight = 1

    @task
    def consume(self) -> None:
        self.read_some()


class MixedUser(_Reading, _Sending):
    """Sends one, reads what there is."""

    weight = 1

    @task
    def produce_and_consume(self) -> None:
        self.timed("produce", self.send_one)
        self.read_some()
