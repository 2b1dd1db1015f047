"""A copy that follows, while the copier and processes of both sides are killed at random."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time

import pytest

from tailrace import Producer, TailraceError
from tests.kit import cli, seeds
from tests.kit.processes import HANG_LIMIT_S, children
from tests.system.migrate.houses import Houses

ROUNDS = 12


def write(houses: Houses, topic: str, stop: threading.Event, rng: random.Random) -> None:
    """Records and transactions, until `stop`; those that a kill takes are of no interest."""
    number = 0
    with Producer(houses.source.address, linger_ms=1) as producer:
        while not stop.is_set():
            for _ in range(rng.randrange(1, 60)):
                producer.send(
                    f"{topic}.plain", b"%d" % number, key=b"%d" % (number % 9),
                    partition=number % 2,
                )  # fmt: skip
                number += 1
            producer.flush()
            try:
                with Producer(
                    houses.source.address, transactional_id=topic, delivery_timeout_ms=20_000
                ) as writer:
                    writer.begin_transaction()
                    for _ in range(rng.randrange(1, 30)):
                        writer.send(f"{topic}.tx", b"%d" % number, partition=0)
                        number += 1
                    if rng.random() < 0.3:
                        writer.abort_transaction()
                    else:
                        writer.commit_transaction()
            except TailraceError:
                pass
            stop.wait(rng.random() / 20)


@pytest.mark.long
@pytest.mark.parametrize("block", seeds.new_blocks(2, 1), ids=seeds.block_name)
def test_every_record_arrives_once_whatever_is_killed(
    houses: Houses, topic: str, block: range
) -> None:
    (seed,) = block
    rng = random.Random(seed)
    topic = f"{topic[:60]}-{seed}"
    houses.name = topic
    houses.create(f"{topic}.plain", 2)
    houses.create(f"{topic}.tx")
    stop = threading.Event()
    writing = threading.Thread(target=write, args=(houses, topic, stop, random.Random(seed)))
    writing.start()
    command = [cli.TAILRACE, "migrate", "--from", houses.address, "--topics", f"{topic}.*",
               "--follow", "--name", houses.name, "--groups", "none",
               "--bootstrap", houses.target.address]  # fmt: skip
    try:
        for _ in range(ROUNDS):
            with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
                time.sleep(rng.uniform(0.8, 4))
                for _ in range(rng.randrange(3)):
                    house = houses.target if rng.random() < 0.7 else houses.source
                    alive = children(house)
                    os.kill(alive[rng.choice(sorted(alive))], signal.SIGKILL)
                    time.sleep(rng.uniform(0, 1))
                running.send_signal(signal.SIGKILL)
                _, err = running.communicate(timeout=HANG_LIMIT_S)
                assert b"Traceback" not in err, err.decode()
    finally:
        stop.set()
        writing.join()
    houses.migrate("--topics", f"{topic}.*", "--groups", "none")
    assert houses.same(f"{topic}.plain", 2)
    assert houses.same_records(f"{topic}.tx")
