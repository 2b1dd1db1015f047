"""Signals of a timer, which come when they come, over a real appliance: beside the points that are
met one by one.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance

COUNT = 400
EACH_S = 0.003
ENOUGH_S = 60


# What a handler raises inside a destructor, Python ignores.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_each_three_milliseconds_costs_no_record_that_was_accepted(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """2,001 of 2,001 accepted records were not delivered: an answer was taken off the socket and
    thrown away.
    """

    armed = {"is": False}

    def raises(*_: Any) -> None:
        if armed["is"]:
            raise KeyboardInterrupt

    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic))
    accepted: list[bytes] = []
    handles: list[Any] = []
    before = signal.signal(signal.SIGALRM, raises)
    try:
        with Producer(appliance.address, buffer_memory=65536, linger_ms=1) as producer:
            producer.send(topic, b"00000").result(ENOUGH_S)
            for number in range(1, COUNT + 1):
                value = (b"%05d" % number).ljust(3_000, b".")
                signal.setitimer(signal.ITIMER_REAL, EACH_S)
                try:
                    armed["is"] = True
                    handle = producer.send(topic, value)
                    accepted.append(value[:5])
                    handles.append(handle)
                    if number % 5 == 0:
                        producer.flush()
                except KeyboardInterrupt:
                    pass
                finally:
                    armed["is"] = False
            for handle in handles:
                handle.result(ENOUGH_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        end = handles[-1].result(0).offset + 1
        found = [record.value[:5] for record in consumer.consume(end, timeout=ENOUGH_S)]
    assert found == sorted(set(found))
    assert set(accepted) <= set(found)
