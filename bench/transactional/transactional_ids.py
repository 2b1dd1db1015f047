"""Many transactional ids and many producers at once: the part of `make bench-transactions` that
starts appliances and client processes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import orjson

from bench.at_rest.footprint import SETTLE_S, cpu_seconds, processes
from bench.measure import private_memory_mb
from bench.peers.servers import in_child
from bench.transactional import transactional_work as work
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded
from tailrace.format.directory.data_dir import GROUPS_FILE
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS

Figure = tuple[str, str, float, float | None]
"""(name, unit, value, the most that it may be)."""


def commits_together(
    address: str, topic: str, count: int, threads: int, seconds: float, lead_s: float,
    servers: list[int],
) -> tuple[float, float, float]:  # fmt: skip
    """Commits a second of `count` processes with so many producers each, and the CPU of a commit in
    microseconds: of the clients, of the `servers`. All begin together, after `lead_s`, or a
    multiple of it where that is too early for one.
    """
    while True:
        found, used = _together(address, topic, count, threads, seconds, lead_s, servers)
        if all(commits >= 0 for commits, _ in found):
            break
        lead_s *= 2
    commits = sum(one[0] for one in found)
    clients = sum(one[1] for one in found)
    return commits / seconds, clients / max(1, commits) * 1e6, used / max(1, commits) * 1e6


def _together(
    address: str, topic: str, count: int, threads: int, seconds: float, lead_s: float,
    servers: list[int],
) -> tuple[list[tuple[int, float]], float]:  # fmt: skip
    """(commits, CPU seconds) of each process, and the CPU seconds of the servers."""
    start_at = time.time() + lead_s
    arguments = (address, topic, threads, seconds, start_at)
    with ThreadPoolExecutor(count) as pool:
        coming = [pool.submit(in_child, work.commits_of_threads, *arguments) for _ in range(count)]
        time.sleep(max(0.0, start_at - time.time()))
        used = cpu_seconds(servers)
        time.sleep(max(0.0, start_at + seconds - time.time()))
        used = cpu_seconds(servers) - used
        return [one.result() for one in coming], used


def measure(open_count: int, used_count: int, starts: int) -> Iterator[Figure]:
    """Starts of three appliances in turn: with one id, with many registered ones, with very many
    that were used once.
    """
    with tempfile.TemporaryDirectory(
        prefix="tailrace-ids-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        kinds = {"one": (0, 0), "open": (open_count, 1), "used": (used_count, 0)}
        disk: dict[str, int] = {}
        for kind, (count, is_registered) in kinds.items():
            path = f"{directory}/{kind}"
            _start(path)
            if count:
                in_child(add_ids, f"{path}/{GROUPS_FILE}", count, is_registered)
            disk[kind] = os.path.getsize(f"{path}/{GROUPS_FILE}")
        for _ in range(starts):
            found = {kind: _start(f"{directory}/{kind}") for kind in kinds}
            for kind, label in (
                ("open", f"{open_count:,} registered ids"), ("used", f"{used_count:,} used once")
            ):  # fmt: skip
                count = kinds[kind][0]
                more = [one - base for one, base in zip(found[kind], found["one"], strict=True)]
                yield f"{label}: first ack of others, more than with one id", "ms", more[0], 50
                yield f"{label}: first commit, more than with one id", "ms", more[1], 50
                yield f"{label}: memory of all processes, each", "B", more[2] * 1e6 / count, 300
                yield f"{label}: acks of others, p50, more", "us", more[3], None
        for kind, label in (("open", "registered"), ("used", "used once")):
            each = (disk[kind] - disk["one"]) / kinds[kind][0]
            yield f"ids {label}: database, each", "B", each, 300


def _start(path: str) -> tuple[float, float, float, float]:
    """(ms to the first ack, ms to the first commit, private MB of all processes, p50 of an ack in
    microseconds) of an appliance on this directory, which ends.
    """
    begun = time.perf_counter()
    running = start_embedded(data_dir=path, auto_create_topics=False)
    try:
        with Admin(running.address) as admin:
            if "t" not in admin.list_topics():
                admin.create_topics([NewTopic("t")])
        with Producer(running.address, acks="all", linger_ms=0) as producer:
            producer.send("t", b"x").result(30)
            acked = time.perf_counter()
            with Producer(running.address, transactional_id="first") as transactional:
                transactional.begin_transaction()
                transactional.send("t", b"x")
                transactional.commit_transaction()
            committed = time.perf_counter()
            time.sleep(SETTLE_S)
            memory, _ = private_memory_mb(processes(running.pid))
            times = []
            for _ in range(200):
                sent = time.perf_counter()
                producer.send("t", b"x").result(30)
                times.append((time.perf_counter() - sent) * 1e6)
        return (acked - begun) * 1e3, (committed - begun) * 1e3, memory, sorted(times)[100]
    finally:
        running.stop()


def add_ids(path: str, count: int, is_registered: int) -> None:
    """Add ids to the database of an appliance that is stopped, as if so many had been used."""
    from appliance.groups.store.group_store import GroupStore
    from appliance.groups.store.schema import TransactionalIdRow
    from appliance.groups.store.transaction_rows import TransactionRows

    store = GroupStore(path)
    try:
        rows = TransactionRows(store)
        first, ordinal = rows.last_id_number() + 1, rows.last_ordinal() + 1
        ended = orjson.dumps(
            [[1, TRANSACTIONAL_PRODUCER_IDS, epoch, 1, "producer", 1_700_000_000_000 + epoch]
             for epoch in (2, 1)]
        ).decode()  # fmt: skip
        rows.put_ids(
            TransactionalIdRow(
                first + number, f"billing-{number:07}", TRANSACTIONAL_PRODUCER_IDS + 1_000 + number,
                2, ordinal + number, ordinal + number, 60_000, 1, 1_700_000_000_000, is_registered,
                "billing", ended,
                f"{number:032x}",
            )
            for number in range(count)
        )  # fmt: skip
        store.commit()
        store.read("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        store.close()


def measure_unused() -> Iterator[tuple[str, str, float]]:
    """An appliance with a topic and acks, and without a transaction."""
    with tempfile.TemporaryDirectory(
        prefix="tailrace-unused-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        running = start_embedded(data_dir=directory, auto_create_topics=False)
        try:
            with Admin(running.address) as admin:
                admin.create_topics([NewTopic("t")])
            with Producer(running.address) as producer:
                producer.send("t", b"x").result(30)
            groups = sum(
                "groups" in open(f"/proc/{pid}/comm", encoding="ascii").read()  # noqa: SIM115
                for pid in processes(running.pid)
            )
            yield "never used: processes of groups and transactions", "", groups
            found = [name for _, _, names in os.walk(directory) for name in names]
            yield (
                "never used: files of transactions", "",
                sum(name.startswith(GROUPS_FILE) or "txn" in name for name in found),
            )  # fmt: skip
        finally:
            running.stop()
