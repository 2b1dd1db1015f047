"""Consumers that are killed anywhere, again and again, and begin anew until all is read: `python -P
-m tests.kit.members.killed_consumers '{...}'`.

One process that has no client forks a victim for each life. A life ends with SIGKILL at a step that
the seed chooses (before or after an effect, a mark, a commit), or at whatever instruction the
process is in when a timer of the seed's runs out. A victim that has read everything ends by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tailrace import CommitFailedError, Consumer, Record, ShareConsumer, TopicPartition
from tailrace.idempotent import (
    DedupTable,
    OffsetsMovedError,
    RedisGuard,
    SqlSink,
    update_if_version,
)

GROUP = "billing"
AT_ONCE = 17


@dataclasses.dataclass(frozen=True)
class Plan:
    """Work of the victims, and how often they are killed."""

    mode: str
    address: str
    topic: str
    path: str
    seed: int
    lives: int = 8
    """Lives that are to end early; the next is left alone."""
    side_by_side: int = 1
    """Victims at once, each with so many lives."""
    redis_socket: str = ""
    count: int = 600
    """Records in the topic."""


def run(plan: Plan) -> int:
    """Live all lives; how many ended early."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "tests.kit.members.killed_consumers",
        json.dumps(dataclasses.asdict(plan)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


class Fate:
    """End of this life."""

    def __init__(self, plan: Plan, slot: int, life: int) -> None:
        chance = random.Random(f"{plan.seed}/{slot}/{life}")
        self._steps_left = -1
        self._after_s = 0.0
        if life < plan.lives and life % 2:
            self._after_s = chance.uniform(0.0005, 0.01)
        elif life < plan.lives:
            self._steps_left = chance.randint(1, 20)

    def begin(self) -> None:
        """The victim stands before its first record."""
        if self._after_s:
            signal.signal(
                signal.SIGALRM, signal.SIG_DFL
            )  # ends the process as SIGKILL does: no handler, no cleaning up
            signal.setitimer(signal.ITIMER_REAL, self._after_s)

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _connect(plan: Plan) -> sqlite3.Connection:
    connection = sqlite3.connect(plan.path, timeout=60)
    connection.execute(
        "PRAGMA synchronous=OFF"
    )  # what a killed process has written is in the page cache
    return connection


def _assigned(plan: Plan) -> Consumer:
    consumer = Consumer(bootstrap=plan.address, auto_offset_reset="earliest")
    consumer.assign(
        [TopicPartition(plan.topic, number) for number in consumer.partitions_for(plan.topic)]
    )
    return consumer


def _each_record_again(plan: Plan, fate: Fate, handle: Callable[[Record], None]) -> None:
    """Everything from the beginning, as a consumer that has committed nothing."""
    with _assigned(plan) as consumer:
        left = sum(consumer.end_offsets(consumer.assignment()).values())
        fate.begin()
        while left:
            for record in consumer.poll(1000, AT_ONCE):
                handle(record)
                left -= 1


def _sink(plan: Plan, fate: Fate, connection: Any) -> None:
    sink = SqlSink(connection, GROUP)
    with _assigned(plan) as consumer:
        ends = consumer.end_offsets(consumer.assignment())
        sink.seek(consumer)
        fate.begin()
        while sink.positions(list(ends)) != ends:
            _apply_next(sink, consumer, fate)


def apply_batch(sink: SqlSink, records: list[Record], fate: Fate) -> None:
    with sink.transaction(records) as tx:
        for record in tx.records:
            fate.step()
            sale = (record.partition, record.offset, int(record.value))
            execute = (
                tx.cursor.exec_driver_sql
                if hasattr(tx.cursor, "exec_driver_sql")
                else tx.cursor.execute
            )
            execute("INSERT INTO sales VALUES (?, ?, ?)", sale)
            fate.step()
    fate.step()


def _apply_next(sink: SqlSink, consumer: Consumer, fate: Fate) -> None:
    try:
        apply_batch(sink, consumer.poll(100, AT_ONCE), fate)
    except OffsetsMovedError:
        sink.seek(consumer)


def _in_a_group(plan: Plan, fate: Fate) -> None:
    sink = SqlSink(_connect(plan), GROUP)
    with Consumer(
        bootstrap=plan.address, group_id=f"of-{plan.topic}", auto_offset_reset="earliest"
    ) as consumer:
        ends = consumer.end_offsets(
            [TopicPartition(plan.topic, number) for number in consumer.partitions_for(plan.topic)]
        )
        consumer.subscribe([plan.topic], listener=sink.listener(consumer))
        fate.begin()
        while sink.positions(list(ends)) != ends:
            _apply_next(sink, consumer, fate)


def _in_a_loop(plan: Plan, fate: Fate) -> None:
    asyncio.run(_in_a_group_of_a_loop(plan, fate))


async def _in_a_group_of_a_loop(plan: Plan, fate: Fate) -> None:
    from tailrace.aio import AsyncConsumer

    sink = SqlSink(_connect(plan), GROUP)
    async with AsyncConsumer(
        bootstrap=plan.address, group_id=f"of-{plan.topic}", auto_offset_reset="earliest"
    ) as consumer:
        ends = await consumer.end_offsets(
            [
                TopicPartition(plan.topic, number)
                for number in await consumer.partitions_for(plan.topic)
            ]
        )
        await consumer.subscribe([plan.topic], listener=sink.listener(consumer))
        fate.begin()
        while sink.positions(list(ends)) != ends:
            records = await consumer.poll(100, AT_ONCE)
            try:
                apply_batch(sink, records, fate)
            except OffsetsMovedError:
                await sink.seek_async(consumer)


def _in_order(plan: Plan, fate: Fate, order: str) -> None:
    """The recipes of docs/groups.md. An effect is a line in a file: one write, there as soon as it
    is made.
    """
    file = os.open(plan.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    commits_by_itself = order == "auto commit"
    with Consumer(
        plan.topic, bootstrap=plan.address, group_id=f"of-{plan.topic}",
        auto_offset_reset="earliest", enable_auto_commit=commits_by_itself,
        auto_commit_interval_ms=20,
    ) as consumer:  # fmt: skip
        ends = consumer.end_offsets(
            [TopicPartition(plan.topic, number) for number in consumer.partitions_for(plan.topic)]
        )
        fate.begin()
        while any(consumer.committed(key) != end for key, end in ends.items()):
            records = consumer.poll(100, AT_ONCE)
            try:
                if order == "commit first":
                    consumer.commit()
                    fate.step()
                for record in records:
                    fate.step()
                    os.write(file, b"%b\n" % record.value)
                    fate.step()
                if order == "effect first":
                    consumer.commit()
            except CommitFailedError:
                continue  # the partition is another's: so are these records


def _with_sqlite3(plan: Plan, fate: Fate) -> None:
    _sink(plan, fate, _connect(plan))


def _with_sqlalchemy(plan: Plan, fate: Fate) -> None:
    import sqlalchemy

    _sink(
        plan, fate, sqlalchemy.create_engine(f"sqlite:///{plan.path}", connect_args={"timeout": 60})
    )


def _with_dedup(plan: Plan, fate: Fate) -> None:
    connection = _connect(plan)
    table = DedupTable(connection)

    def handle(record: Record) -> None:
        fate.step()
        try:
            if table.first_time(record.value):
                fate.step()
                connection.execute(
                    "INSERT INTO sales VALUES (?, ?, ?)",
                    (record.partition, record.offset, int(record.value)),
                )
            fate.step()
            connection.commit()
        except sqlite3.IntegrityError:  # two asked at once: the other's transaction has it
            connection.rollback()

    _each_record_again(plan, fate, handle)


def _from_a_queue(plan: Plan, fate: Fate) -> None:
    connection = _connect(plan)
    table = DedupTable(connection)
    with ShareConsumer(
        plan.topic,
        bootstrap=plan.address,
        group_id=f"queue-{plan.topic}",
        auto_offset_reset="earliest",
    ) as consumer:
        fate.begin()
        while connection.execute("SELECT count(*) FROM sales").fetchone() != (plan.count,):
            for record in consumer.poll(100, AT_ONCE):
                fate.step()
                if table.first_time(record):
                    connection.execute(
                        "INSERT INTO sales VALUES (?, ?, ?)",
                        (record.partition, record.offset, int(record.value)),
                    )
                connection.commit()
                fate.step()
                consumer.acknowledge(record)


def _with_versions(plan: Plan, fate: Fate) -> None:
    """Record n asks to make version n of its partition's account version n + 1, worth what all
    before it are worth and n.
    """
    connection = _connect(plan)

    def handle(record: Record) -> None:
        fate.step()
        worth = record.offset * (record.offset + 1) // 2
        if update_if_version(
            connection, "accounts", record.partition, record.offset, {"balance": worth}
        ):
            fate.step()
            connection.execute(
                "INSERT INTO sales VALUES (?, ?, ?)",
                (record.partition, record.offset, int(record.value)),
            )
        fate.step()
        connection.commit()

    _each_record_again(plan, fate, handle)


def _with_redis(plan: Plan, fate: Fate, order: str) -> None:
    import redis

    client = redis.Redis(unix_socket_path=plan.redis_socket)
    guard = RedisGuard(client, f"{plan.topic}:")
    file = os.open(plan.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(record: Record) -> None:
        if order == "effect first":
            if guard.seen(record):
                return
        elif not guard.first_time(record):
            return
        fate.step()
        os.write(file, b"%b\n" % record.value)
        fate.step()
        if order == "effect first":
            guard.mark(record)

    _each_record_again(plan, fate, handle)


def _in_redis(plan: Plan, fate: Fate) -> None:
    import redis

    client = redis.Redis(unix_socket_path=plan.redis_socket)
    guard = RedisGuard(client, f"{plan.topic}:")

    def handle(record: Record) -> None:
        if not guard.seen(record):
            fate.step()
            effect = client.pipeline(transaction=True)
            effect.rpush(plan.topic, record.value)
            guard.mark(record, effect)
            fate.step()
            effect.execute()
            fate.step()

    _each_record_again(plan, fate, handle)


MODES: dict[str, Callable[[Plan, Fate], None]] = {
    "sqlite3": _with_sqlite3,
    "sqlalchemy": _with_sqlalchemy,
    "group": _in_a_group,
    "group in a loop": _in_a_loop,
    "commit first": lambda plan, fate: _in_order(plan, fate, "commit first"),
    "effect first": lambda plan, fate: _in_order(plan, fate, "effect first"),
    "auto commit": lambda plan, fate: _in_order(plan, fate, "auto commit"),
    "dedup": _with_dedup,
    "queue": _from_a_queue,
    "versions": _with_versions,
    "redis, guard first": lambda plan, fate: _with_redis(plan, fate, "guard first"),
    "redis, effect first": lambda plan, fate: _with_redis(plan, fate, "effect first"),
    "in redis": _in_redis,
}

IMPORTS = {
    "sqlalchemy": "sqlalchemy",
    "group in a loop": "tailrace.aio",
    "redis, guard first": "redis",
    "redis, effect first": "redis",
    "in redis": "redis",
}
"""Modules that a mode needs, and that take long to import: once, before the first life."""


def _victim(plan: Plan, slot: int, life: int) -> NoReturn:
    code = 1
    try:
        MODES[plan.mode](plan, Fate(plan, slot, life))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def main(plan: Plan) -> int:
    if plan.mode in IMPORTS:
        importlib.import_module(IMPORTS[plan.mode])
    running: dict[int, tuple[int, int]] = {}
    killed = 0

    def start(slot: int, life: int) -> None:
        pid = os.fork()
        if pid == 0:
            _victim(plan, slot, life)
        running[pid] = slot, life

    for slot in range(plan.side_by_side):
        start(slot, 0)
    while running:
        pid, status = os.wait()
        slot, life = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code in (-signal.SIGKILL, -signal.SIGALRM):
            killed += 1
            start(slot, life + 1)
        elif code:
            raise SystemExit(f"life {life} of {slot} ended with {code}")
    return killed


if __name__ == "__main__":
    print(main(Plan(**json.loads(sys.argv[1]))))
