"""Conversion of Kafka's record batches: millions of records a second of one core, in and out.

`python -P -m bench.stages.kafka_records [--seconds 1] [--records 7000] [--json]`. The records have
100 bytes of JSON, a key, a time and one header. Counted is CPU time, the best of several rounds.
The rows:

- *in*, *out*: the whole conversion as the gateway calls it, with checksums and compression.
- *out again*: the same for a second reader, of batches that were packed for the first.
- *pack alone*, *unpack alone*: the library's compression. It bounds *out*.
- *reference*: the same with the kernel's Python twin.
- *numpy*: lengths found by a loop in Python, the values gathered by numpy, nothing else. It is what
  a conversion without compiled code can do at best.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson

from bench.measure import machine
from netfront.kafka.apis.records.conversion import convert_outgoing
from netfront.kafka.apis.records.tail_cache import TailCache
from netfront.kafka.records import batch_layout, incoming, outgoing
from netfront.kafka.records.compression import CODECS, pack, release, unpack
from tailrace.format.record_batch.arrow_metadata import read_schema
from tailrace.format.record_batch.batch_header import checksum_seed
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.kernel import keep_message, reference_kafka

MAX_BYTES = 4 << 20
LAYOUT = read_schema(to_message(DEFAULT_SCHEMA))
ROUTE: Any = SimpleNamespace(
    topic_id=b"t" * 16, partition=0, typed=False, settings={}, older_schemas={},
    schema=to_message(DEFAULT_SCHEMA), schema_id=0, created_us=0,
)  # fmt: skip
SEED = checksum_seed(ROUTE.topic_id, ROUTE.partition)
START_MS = 1_700_000_000_000
ROUNDS = 5
GOALS = {"in": 20.0, "out": 25.0}
"""Million records a second with lz4."""


def payload(count: int) -> bytes:
    """The unpacked records of a batch."""
    chance, out = random.Random(7), bytearray()
    for row in range(count):
        value = b'{"user":"u%05d","amount":%d,"city":"%s","at":%d,"note":"' % (
            chance.randrange(100_000), chance.randrange(10_000),
            chance.choice((b"Bern", b"Paris", b"Oslo", b"Rome")), START_MS + row,
        )  # fmt: skip
        value += b"x" * (98 - len(value)) + b'"}'
        record = bytearray(1)
        for number in (row, row):
            reference_kafka.put_zigzag(record, number)
        for cell in (b"u%05d" % chance.randrange(100_000), value):
            reference_kafka.put_cell(record, cell)
        reference_kafka.put_zigzag(record, 1)
        for cell in (b"trace-id", chance.randbytes(8)):
            reference_kafka.put_cell(record, cell)
        reference_kafka.put_zigzag(out, len(record))
        out += record
    return bytes(out)


def kafka_batch(records: bytes, count: int, codec: int) -> bytes:
    """The records as a producer of Kafka sends them."""
    batch = bytearray(batch_layout.HEADER_BYTES) + pack(codec, memoryview(records))
    batch_layout.write_kafka_header(
        batch,
        batch_layout.KafkaHeader(
            attributes=codec, last_offset_delta=count - 1, base_ms=START_MS,
            max_ms=START_MS + count - 1, record_count=count,
        ),
    )  # fmt: skip
    return bytes(batch)


def numpy_values(records: bytes, count: int) -> bytes:
    """The values of the records, gathered by numpy."""
    starts, lengths, at = np.empty(count, np.int64), np.empty(count, np.int64), 0
    reader = reference_kafka.RecordReader(memoryview(records))
    for row in range(count):
        length = reader.varint(5, reader.end)
        end = reader.at + length
        reader.at += 1
        reader.varint(10, end)
        reader.varint(5, end)
        key_length = reader.varint(5, end)
        reader.at += max(key_length, 0)
        lengths[row] = reader.varint(5, end)
        starts[row] = reader.at
        reader.at = at = end
    assert at == len(records)
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return bytes(np.frombuffer(records, np.uint8)[places])


def unpack_and_release(codec: int, packed: memoryview) -> None:
    """Unpack records and release them, as the conversion does, without converting."""
    release(unpack(codec, packed, MAX_BYTES))


def rate(count: int, seconds: float, call: Callable[[], Any]) -> float:
    """Million records a second of CPU, the best of ROUNDS."""
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        calls, started = 0, time.process_time()
        while (spent := time.process_time() - started) < seconds / ROUNDS or not calls:
            call()
            calls += 1
        best = min(best, spent / max(calls, 1))
    return count / best / 1e6


def measure(count: int, seconds: float) -> dict[str, dict[str, float]]:
    """Rates by row, then by direction or codec."""
    records = payload(count)
    view = memoryview(records)
    found: dict[str, dict[str, float]] = {}
    for codec, name in enumerate(CODECS):
        sent = kafka_batch(records, count, codec)
        packed = memoryview(sent)[batch_layout.HEADER_BYTES :]

        def take(sent: bytes = sent) -> None:
            (batch,) = incoming.to_batches(sent, seed=SEED, now_us=0, max_message_bytes=MAX_BYTES)
            keep_message(batch.data)  # its memory is used again, as after a lane has the batch

        data = incoming.to_batches(sent, seed=SEED, now_us=0, max_message_bytes=MAX_BYTES)[0].data

        def give(data: bytearray = data, name: str = name) -> Any:
            return outgoing.from_batch(data, seed=SEED, schema=LAYOUT, compression=name)

        found[name] = {"in": rate(count, seconds, take), "out": rate(count, seconds, give)}
        if codec:
            cache, batches = TailCache(), memoryview(data)

            def again(
                cache: TailCache = cache, batches: memoryview = batches, name: str = name
            ) -> Any:
                return convert_outgoing(ROUTE, batches, MAX_BYTES, name, cache)

            found[name]["out again"] = rate(count, seconds, again)
            found[name]["unpack alone"] = rate(
                count, seconds, partial(unpack_and_release, codec, packed)
            )
            found[name]["pack alone"] = rate(count, seconds, partial(pack, codec, view))
    found["numpy"] = {"in": rate(count, seconds, lambda: numpy_values(records, count))}
    sent = kafka_batch(records, count, 0)
    with (
        patch.object(incoming, "batches_from_kafka", reference_kafka.batches_from_kafka),
        patch.object(outgoing, "plain_batch_to_kafka", reference_kafka.plain_batch_to_kafka),
        patch.object(outgoing, "records_to_kafka", reference_kafka.records_to_kafka),
    ):
        data = incoming.to_batches(sent, seed=SEED, now_us=0, max_message_bytes=MAX_BYTES)[0].data
        found["reference"] = {
            "in": rate(
                count,
                seconds,
                lambda: incoming.to_batches(sent, seed=SEED, now_us=0, max_message_bytes=MAX_BYTES),
            ),
            "out": rate(
                count, seconds, lambda: outgoing.from_batch(data, seed=SEED, schema=LAYOUT)
            ),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.stages.kafka_records", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time of each number")
    parser.add_argument("--records", type=int, default=7_000, help="records of a batch")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.records, arguments.seconds)
    if arguments.json:
        print(orjson.dumps({"machine": machine(), "million_records_a_second": found}).decode())
        return 0
    reference = found["reference"]
    for name, rates in found.items():
        for row, million in rates.items():
            line = f"{name:10} {row:13} {million:8.2f} M records/s"
            if row in reference and name != "reference":
                line += f"  {million / reference[row]:6.0f} x reference"
            if row == "in" and name not in ("numpy", "reference"):
                line += f"  {million / found['numpy']['in']:6.0f} x numpy"
            if name == "lz4" and row in GOALS:
                line += f"  goal {GOALS[row]:.0f}"
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
