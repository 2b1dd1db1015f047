"""Data directories as a kill leaves them: records on the disk, others acknowledged and in shared
memory alone.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import NotReachableError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children


def start(data_dir: pathlib.Path, **settings: Any) -> EmbeddedAppliance:
    return start_embedded(
        data_dir=str(data_dir),
        settings={"ring_bytes": 1 << 20, **settings},
        auto_create_topics=False,
    )


def create(appliance: EmbeddedAppliance, name: str = "orders", **configs: Any) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [NewTopic(name, 1, {key.replace("_", "."): value for key, value in configs.items()})]
        )


def produce(
    appliance: EmbeddedAppliance, first: int, last: int, topic: str = "orders", acks: Any = "all"
) -> None:
    with Producer(appliance.address, acks=acks) as producer:
        handles = [producer.send(topic, b"%d" % number) for number in range(first, last)]
        for handle in handles:
            handle.result(60)


def read(appliance: EmbeddedAppliance, count: int, topic: str = "orders") -> list[int]:
    found: list[int] = []
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while len(found) < count:
            records = consumer.poll(60_000)
            assert records, f"{len(found)} of {count}"
            found += [int(record.value) for record in records]
        assert consumer.poll(100) == []
    return found


def kill_everything(appliance: EmbeddedAppliance) -> None:
    pids = [*children(appliance).values(), appliance.pid]
    for pid in pids:
        os.kill(pid, 19)  # nobody reacts to another's end
    for pid in pids:
        os.kill(pid, 9)
    appliance.stop()


def killed_with_acknowledged_batches_in_the_ring(data_dir: pathlib.Path, **settings: Any) -> None:
    """One record is on the disk, 50 more are acknowledged (acks=1) and lie in the ring alone: the
    flusher was stopped.
    """
    running = start(data_dir, **settings)
    create(running)
    produce(running, 0, 1)
    os.kill(children(running)["tr-flusher-0"], 19)
    produce(running, 1, 51, acks=1)
    kill_everything(running)


def refusal(data_dir: pathlib.Path, **settings: Any) -> str:
    """Message of a start that ends with exit code 73."""
    with pytest.raises(NotReachableError) as caught:
        start(data_dir, **settings).stop()
    assert "exit code 73" in str(caught.value)
    return str(caught.value)
