"""Reading a topic with many schema versions, against the same rows in one version, in pairs.

    .venv/bin/python -P bench/reads/schema_versions.py [--versions 30] [--rows 20000] [--pairs 7]

Each version adds a column or reorders, and has `rows` rows in batches of 2,000. The topic with one
version has all columns from the beginning. Prints the median of the ratios (many / one), with their
range, for `poll_arrow`, `poll` and `scan`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import pyarrow as pa

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer

BASE = [(f"n{number}", pa.int64()) for number in range(6)] + [("text", pa.utf8())]
BATCH_ROWS = 2_000


def schemas(count: int) -> list[pa.Schema]:
    """The versions: an added column, then a rotation, in turns."""
    found, fields = [], list(BASE)
    for number in range(count):
        found.append(pa.schema(fields))
        if number % 2:
            fields = [*fields[1:], fields[0]]
        else:
            fields = [*fields, (f"added{number}", pa.float64())]
    return found


def rows(schema: pa.Schema, start: int, count: int) -> pa.Table:
    columns = {}
    for field in schema:
        if field.name == "text":
            texts = [f"text of row {number}" for number in range(start, start + count)]
            columns[field.name] = pa.array(texts)
        elif field.name.startswith("added"):
            columns[field.name] = pa.nulls(count, field.type)
        else:
            columns[field.name] = pa.array(range(start, start + count), pa.int64())
    return pa.table(columns, schema=schema)


def fill(address: str, versions: list[pa.Schema], count: int) -> None:
    with Admin(address) as admin, Producer(address, linger_ms=5) as producer:
        admin.create_topics(
            [NewTopic("many", schema=versions[0]), NewTopic("one", schema=versions[-1])]
        )
        for number, schema in enumerate(versions):
            if number:
                admin.alter_topics(schema={"many": schema})
            for start in range(0, count, BATCH_ROWS):
                for topic, shape in (("many", schema), ("one", versions[-1])):
                    producer.send_arrow(topic, rows(shape, start, min(BATCH_ROWS, count - start)))
            producer.flush()


def arrow(address: str, topic: str, total: int) -> float:
    """Rows a second by poll_arrow."""
    return _consume(address, topic, total, lambda c: sum(map(len, c.poll_arrow(5_000))))


def records(address: str, topic: str, total: int) -> float:
    """Rows a second by poll."""
    return _consume(address, topic, total, lambda c: len(c.poll(5_000, max_records=10_000)))


def _consume(address: str, topic: str, total: int, take: Callable[[Consumer], int]) -> float:
    with Consumer(topic, bootstrap=address, auto_offset_reset="earliest") as consumer:
        taken = take(consumer)
        rest, begun = total - taken, time.perf_counter()
        while taken < total:
            taken += take(consumer)
        return rest / (time.perf_counter() - begun)


def scan(address: str, topic: str, total: int) -> float:
    """Rows a second by scan."""
    begun = time.perf_counter()
    found = sum(batch.num_rows for batch in tailrace.scan(topic, address))
    assert found == total
    return total / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description="Reading many schema versions, in pairs.")
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    total = given.versions * given.rows
    with tailrace.embedded(auto_create_topics=False) as appliance:
        fill(appliance.address, schemas(given.versions), given.rows)
        for measure in (arrow, records, scan):
            ratios, rates, costs = [], [], []
            for pair in range(given.pairs + 1):
                order = ("many", "one") if pair % 2 else ("one", "many")
                rate, cpu = {}, {}
                for topic in order:
                    before = time.process_time()
                    rate[topic] = measure(appliance.address, topic, total)
                    cpu[topic] = time.process_time() - before
                if pair:  # the first warms the caches
                    ratios.append(rate["many"] / rate["one"])
                    rates.append(rate["one"])
                    costs.append(cpu["one"] / cpu["many"])
            print(
                f"{measure.__name__}: {statistics.median(ratios):.2f} of one version's rate "
                f"({min(ratios):.2f} to {max(ratios):.2f}); one version: "
                f"{statistics.median(rates):,.0f} rows/s; by the reader's CPU "
                f"{statistics.median(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})"
            )


if __name__ == "__main__":
    main()
