"""Programs that end without close(), and appliances that end before their clients."""

from __future__ import annotations

import pathlib
import threading

import pytest

from tailrace import Producer
from tailrace.core.errors import ClientClosedError, RequestTimeoutError, TailraceError
from tailrace.embedded_appliance import start_embedded
from tests.kit.hosts.programs import read_values, run_program
from tests.kit.processes import HANG_LIMIT_S

UNCLOSED = """
import sys
from tailrace import Producer
from tailrace.embedded_appliance import start_embedded
appliance = start_embedded(data_dir=sys.argv[1])
producer = Producer(appliance.address, linger_ms=60_000)
for number in range(100):
    producer.send("t", b"%d" % number)
"""


def test_what_an_unclosed_producer_holds_reaches_an_appliance_that_ends_with_the_program(
    tmp_path: pathlib.Path,
) -> None:
    done = run_program(UNCLOSED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    running = start_embedded(data_dir=str(tmp_path))
    try:
        assert read_values(running, "t", 100) == [b"%d" % number for number in range(100)]
    finally:
        running.stop()


def test_flush_and_close_end_in_time_when_the_appliance_is_gone(topic: str) -> None:
    running = start_embedded()
    producer = Producer(running.address, linger_ms=60_000)
    errors: list[TailraceError | None] = []
    producer.send(topic, b"x").result(60)
    running.stop()
    handle = producer.send(topic, b"y", on_delivery=lambda _metadata, error: errors.append(error))
    refused: list[TailraceError] = []

    def send_to_unknown() -> None:
        try:
            producer.send("not-known-yet", b"z")
        except TailraceError as error:
            refused.append(error)

    blocked = threading.Thread(target=send_to_unknown)
    blocked.start()  # waits for metadata, for as long as max_block_ms
    with pytest.raises(RequestTimeoutError):
        producer.flush(0.2)
    closing = threading.Thread(target=producer.close, args=(0.2,))
    closing.start()
    closing.join(HANG_LIMIT_S)
    assert not closing.is_alive(), "close() waits for another thread's metadata"
    assert isinstance(handle.exception(0), ClientClosedError)
    assert [type(error) for error in errors] == [ClientClosedError]
    blocked.join(HANG_LIMIT_S)
    assert [type(error) for error in refused] == [ClientClosedError], (
        "a send that waited for metadata ends with the producer"
    )


UNCLOSED_WITHOUT_APPLIANCE = """
import sys
import tailrace.producer.producer
tailrace.producer.producer.EXIT_TIMEOUT_S = 0.5
from tailrace import Producer
from tailrace.embedded_appliance import start_embedded
appliance = start_embedded()
patience = {"linger_ms": 600_000, "delivery_timeout_ms": 900_000}  # more than the test's
producers = [Producer(appliance.address, **patience) for _ in range(4)]
for producer in producers:
    producer.send("t", b"x").result(60)
appliance.stop()
for producer in producers:
    producer.send("t", b"y")
"""


def test_a_program_ends_in_time_with_unclosed_producers_and_no_appliance() -> None:
    done = run_program(UNCLOSED_WITHOUT_APPLIANCE)
    assert done.returncode == 0, done.stderr
