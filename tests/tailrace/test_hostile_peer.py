"""Strangers at an appliance's address, and malformed responses of a front: a sentence each, and
never a hang, a crash or memory without bound.
"""

from __future__ import annotations

import base64
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zmq

from appliance.config import topic_config
from tailrace import Admin, Consumer, Producer, TopicPartition, kernel
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.errors import (
    CorruptBatchError,
    MalformedRequestError,
    NotReachableError,
    RecordTooLargeError,
    RequestTimeoutError,
    TailraceError,
)
from tailrace.format.record_batch.batch_header import header_position, verify_batch
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.kernel import reference
from tailrace.kernel.reference_arrow import default_rows
from tailrace.protocol import fetch_messages
from tailrace.protocol import json_messages as requests
from tailrace.protocol.fetch_messages import FetchedEntry
from tailrace.protocol.frame import API_VERSIONS, Api, decode_request_header, encode_response
from tailrace.scanning import reader
from tailrace.scanning.columns import chosen_columns
from tailrace.scanning.scan_plan import PartitionRange, ScanPlan
from tests.kit.batches import SEED, TOPIC_ID, make_batch, reseal, stamped

GIB = 1 << 30
SETTINGS = topic_config.complete({}, ring_bytes=1 << 26, lane_bytes=1 << 22)
KEY = TopicPartition("t", 0)

Answer = Callable[[int, list[bytes]], list[bytes] | None]
"""(API, body) -> the body of the answer; None: none is given."""


class Front:
    """A front that says what a test wants: a ROUTER in a thread, with a handshake and one topic,
    whose batches are given.
    """

    def __init__(
        self,
        batches: list[bytearray],
        schema: pa.Schema = DEFAULT_SCHEMA,
        answer: Answer | None = None,
    ) -> None:
        self.batches = batches
        self._schema = schema
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._is_over = threading.Event()
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            if not self._socket.poll(10):
                continue
            identity, header_bytes, *body = self._socket.recv_multipart()
            header = decode_request_header(header_bytes)
            answered = (
                self._own_answer(header.api, body)
                if self._answer is None
                else self._answer(header.api, body)
            )
            if answered is None:
                answered = self._own_answer(header.api, body)
            self._socket.send_multipart(
                [
                    identity,
                    *encode_response(header.api, 1, header.correlation_id, 0, 1 << 30, 1, answered),
                ]
            )

    def _own_answer(self, api: int, body: list[bytes]) -> list[bytes]:
        if api == Api.HANDSHAKE:
            return [
                requests.encode_json(
                    {
                        "versions": {str(int(a)): v[1] for a, v in API_VERSIONS.items()},
                        "cluster_id": "x",
                    }
                )
            ]
        if api == Api.METADATA:
            described = {
                "name": "t", "topic_id": TOPIC_ID.hex(), "version": 1,
                "typed": self._schema is not DEFAULT_SCHEMA, "schema_id": 1,
                "schema": base64.b64encode(to_message(self._schema)).decode(), "settings": SETTINGS,
                "partitions": [{}],
            }  # fmt: skip
            return [requests.encode_json({"topics": [described]})]
        if api == Api.LIST_OFFSETS:
            offset = (
                1 << 40 if requests.decode_json(body[0])["partitions"][0]["at"] == "latest" else 0
            )
            return [
                requests.encode_json(
                    {"offsets": [{"topic": "t", "partition": 0, "code": 0, "offset": offset}]}
                )
            ]
        if api == Api.FETCH:
            requested = fetch_messages.decode_fetch(body[0]).entries[0]
            data = b"".join(
                bytes(b)
                for b in self.batches
                if verify_batch(memoryview(b), SEED).next_offset > requested.offset
            )
            return [
                fetch_messages.encode_fetched(
                    [FetchedEntry(TOPIC_ID, 0, 0, 0, len(data), 1 << 40, 0, -1)]
                ),
                data,
            ]
        return [requests.encode_json({})]


@contextmanager
def front(
    batches: list[bytearray], schema: pa.Schema = DEFAULT_SCHEMA, answer: Answer | None = None
) -> Iterator[Front]:
    made = Front(batches, schema, answer)
    try:
        yield made
    finally:
        made.close()


def peak_bytes() -> int:
    """The largest resident size so far since `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def forget_peak() -> int:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return peak_bytes()


def bomb(base_offset: int) -> bytearray:
    """A batch of a few bytes with right checksums, one buffer of which claims to unpack to a
    GiB.
    """
    data = make_batch(100, compression="zstd")
    for at in range(header_position(data) + 136, len(data) - 8, 8):
        if 0 < struct.unpack_from("<q", data, at)[0] < 100_000:
            struct.pack_into("<q", data, at, GIB)
            break
    return stamped(reseal(data), base_offset)


def empty_rows(base_offset: int, count: int) -> tuple[pa.Schema, bytearray]:
    """A batch whose rows take no bytes: a struct without fields."""
    schema = pa.schema([pa.field("a", pa.struct([]))])
    array = pa.Array.from_buffers(pa.struct([]), count, [None])
    batch = pa.RecordBatch.from_arrays([array], schema=schema)
    data = arrow_batch.encode(
        batch, schema_id=1, seed=SEED, compression="none", first_timestamp_us=0, max_timestamp_us=0
    )
    return schema, stamped(data, base_offset)


def read_poll(address: str, **settings: Any) -> None:
    with Consumer("t", bootstrap=address, auto_offset_reset="earliest", **settings) as consumer:
        while True:
            consumer.poll(5000)


def read_arrow(address: str, **settings: Any) -> None:
    with Consumer("t", bootstrap=address, auto_offset_reset="earliest", **settings) as consumer:
        while True:
            consumer.poll_arrow(5000)


def read_trusting(address: str) -> None:
    read_arrow(address, validate_batches=False)


def read_times(address: str) -> None:
    with Consumer(bootstrap=address) as consumer:
        consumer.offsets_for_times({KEY: 4_000_000_000_000})


def read_scan(address: str) -> None:
    """As `tailrace.scan` and Spark's tasks read over ZeroMQ."""
    columns = chosen_columns("t", DEFAULT_SCHEMA, ["value"], typed=False)
    part = PartitionRange("t", TOPIC_ID, 0, 0, 1 << 30)
    list(reader.read(ScanPlan(address, "t", False, to_message(DEFAULT_SCHEMA), columns, (part,))))


# ---- bombs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_poll, read_arrow, read_trusting, read_scan, read_times])
def test_a_batch_that_claims_a_gigabyte_is_refused_before_it_is_unpacked(
    read: Callable[[str], None],
) -> None:
    with front([stamped(make_batch(3), 0), bomb(3), stamped(make_batch(3), 103)]) as peer:
        before = forget_peak()
        with pytest.raises(
            RecordTooLargeError,
            match=r"t-0: the batch of offsets 3 to 102 .*decompresses to 107\d{7} bytes.*to 103",
        ) as caught:
            read(peer.address)
        assert peak_bytes() - before < GIB // 4
        assert (caught.value.key, caught.value.first_offset, caught.value.next_offset) == (
            KEY,
            3,
            103,
        )


@pytest.mark.parametrize("read", [read_poll, read_arrow, read_trusting])
def test_rows_that_take_no_bytes_are_refused_before_they_are_made(
    read: Callable[[str], None],
) -> None:
    schema, data = empty_rows(0, 100_000_000)
    with front([data], schema) as peer:
        before = forget_peak()
        with pytest.raises(RecordTooLargeError, match="100000000 rows"):
            read(peer.address)
        assert peak_bytes() - before < GIB // 4


def test_behind_a_batch_that_is_too_large_the_consumer_goes_on_or_reads_it_with_a_larger_bound() -> (  # noqa: E501
    None
):
    large = default_rows([1], [None], [b"x" * 3_000_000], None)
    encoded = arrow_batch.encode(
        large, schema_id=1, seed=SEED, compression="zstd", first_timestamp_us=1, max_timestamp_us=1
    )
    batches = [stamped(make_batch(3), 0), stamped(encoded, 3), stamped(make_batch(3), 4)]
    with front(batches) as peer:
        with Consumer(
            "t",
            bootstrap=peer.address,
            auto_offset_reset="earliest",
            max_decompressed_batch_bytes=1 << 20,
        ) as consumer:
            assert [record.offset for record in consumer.poll(5000)] == [0, 1, 2]
            for poll in (consumer.poll, consumer.poll_arrow):
                with pytest.raises(
                    RecordTooLargeError, match="max_decompressed_batch_bytes"
                ) as caught:
                    poll(5000)
                assert consumer.position(KEY) == 3
            assert caught.value.next_offset == 4
            consumer.seek(KEY, caught.value.next_offset)
            assert [record.offset for record in consumer.poll(5000)][:3] == [4, 5, 6]
        with Consumer(
            "t",
            bootstrap=peer.address,
            auto_offset_reset="earliest",
            max_decompressed_batch_bytes=4 << 20,
        ) as consumer:
            found = consumer.poll(5000)
            assert [len(record.value or b"") for record in found if record.offset == 3] == [
                3_000_000
            ]


@pytest.mark.skipif(
    not kernel.IS_COMPILED,
    reason="the reference does what Arrow does with batches that are trusted",
)
def test_a_trusted_batch_that_contradicts_itself_is_told_behind_what_is_good_until_a_seek() -> None:
    rows = default_rows([1] * 4, [None] * 4, [b"abc"] * 4, None)
    offsets = np.array([0, 3, 6, 9, 12], np.int32)
    wild = pa.Array.from_buffers(
        pa.binary(), 4, [None, pa.py_buffer(offsets), rows.column(2).buffers()[2]]
    )
    offsets[2] = 1 << 20
    rows = pa.RecordBatch.from_arrays(
        [*rows.columns[:2], wild, rows.column(3)], schema=DEFAULT_SCHEMA
    )
    bad = stamped(
        arrow_batch.encode(
            rows,
            schema_id=1,
            seed=SEED,
            compression="none",
            first_timestamp_us=1,
            max_timestamp_us=1,
        ),
        3,
    )
    with (
        front([stamped(make_batch(3), 0), bad, stamped(make_batch(3), 7)]) as peer,
        Consumer(
            "t", bootstrap=peer.address, auto_offset_reset="earliest", validate_batches=False
        ) as consumer,
    ):
        found: list[int] = []
        while len(found) < 4:
            found += [record.offset for record in consumer.poll(5000)]
        assert found == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(
                CorruptBatchError,
                match=r"offsets 4 to 6 are damaged .*is inconsistent.*seek to 7",
            ) as caught:
                consumer.poll(5000)
            assert consumer.position(KEY) == 4
        assert (caught.value.key, caught.value.first_offset, caught.value.next_offset) == (
            KEY,
            4,
            7,
        )
        consumer.seek(KEY, 7)
        assert [record.offset for record in consumer.poll(5000)][:3] == [7, 8, 9]


def test_rows_of_a_large_batch_become_records_a_part_at_a_time_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "PIECE_ROWS", 10)
    with (
        front([stamped(make_batch(95), 0), stamped(make_batch(25), 95)]) as peer,
        Consumer("t", bootstrap=peer.address, auto_offset_reset="earliest") as consumer,
    ):
        found = [record.offset for record in consumer.poll(5000, 7)]
        assert consumer.position(KEY) == 7
        found += [record.offset for record in consumer.poll(5000, 1)]
        found += [record.offset for record in consumer.poll(5000, 50)]
        consumer.pause(KEY)
        assert consumer.poll(0) == []
        consumer.resume(KEY)
        while len(found) < 120:
            found += [record.offset for record in consumer.poll(5000)]
        assert found[:120] == list(range(120))
        consumer.seek(KEY, 42)
        assert consumer.poll(5000, 1)[0].offset == 42
        assert consumer.poll_arrow(5000)[0].base_offset == 43, "what poll() had begun goes on"


# ---- who answers ---------------------------------------------------------------------------------


@contextmanager
def listening(reply: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something else on the port: each connection is given to `reply`, then closed."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def serve() -> None:
            while not over.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    try:
                        reply(connection)
                    except OSError:
                        continue  # it has gone

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


def http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def garbage(connection: socket.socket) -> None:
    connection.sendall(os.urandom(4096))


def endless_frame(connection: socket.socket) -> None:
    """A ZMTP peer whose first frame claims 2^62 bytes."""
    connection.sendall(b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48)
    connection.sendall(
        b"\x04\x1d\x05READY\x0bSocket-Type\0\0\0\x06ROUTER"
        b"\x02" + struct.pack(">Q", 1 << 62) + b"x" * 100_000
    )


def silence(connection: socket.socket) -> None:
    connection.settimeout(0.3)
    while connection.recv(4096):
        pass


@pytest.mark.parametrize("reply", [http, garbage, endless_frame, silence])
def test_another_server_on_the_port_is_a_sentence_for_each_client(
    reply: Callable[[socket.socket], None],
) -> None:
    with listening(reply) as address:
        with (
            Admin(address, connect_timeout_ms=300) as admin,
            pytest.raises(NotReachableError, match="no appliance answers at"),
        ):
            admin.list_topics()
        with pytest.raises(NotReachableError, match="no appliance answers at"):
            Consumer("t", bootstrap=address, request_timeout_ms=300)
        with (
            Producer(address, max_block_ms=300) as producer,
            pytest.raises(NotReachableError, match="no appliance answers at"),
        ):
            producer.send("t", b"x")


def test_another_zeromq_server_on_the_port_is_named_as_such() -> None:
    context = zmq.Context()
    other = context.socket(zmq.ROUTER)
    other.setsockopt(zmq.LINGER, 0)
    port = other.bind_to_random_port("tcp://127.0.0.1")
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            if other.poll(10):
                other.send_multipart([other.recv_multipart()[0], b"hello", b"world"])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with (
            Admin(f"tcp://127.0.0.1:{port}", connect_timeout_ms=500) as admin,
            pytest.raises(NotReachableError, match="does not speak Tailrace"),
        ):
            admin.list_topics()
    finally:
        over.set()
        thread.join()
        other.close()
        context.term()


def lying(api: Api, body: list[bytes]) -> Answer:
    return lambda asked, _body: body if asked == api else None


def entry(data_length: int, topic_id: bytes = TOPIC_ID, partition: int = 0) -> bytes:
    return fetch_messages.encode_fetched(
        [FetchedEntry(topic_id, partition, 0, 0, data_length, 1, 0, -1)]
    )


@pytest.mark.parametrize(
    "body",
    [
        [], [b""], [b"x"], [b"x" * 72], [entry(10)], [entry(10), b"x"], [entry(0), b"x"],
        [entry(2**32 - 1), b""], [entry(0, b"y" * 16), b""],
        [entry(0, TOPIC_ID, 7), b""], [entry(0, TOPIC_ID, -1), b""],
        [struct.pack("<II", 2**32 - 1, 0), b""], [b"", b"", b"", b""],
    ],
)  # fmt: skip
def test_a_fetch_answer_that_lies_is_given_up_and_asked_for_again(body: list[bytes]) -> None:
    lies = [body] * 2

    def answer(api: int, _body: list[bytes]) -> list[bytes] | None:
        return lies.pop() if api == Api.FETCH and lies else None

    with (
        front([stamped(make_batch(3), 0)], answer=answer) as peer,
        Consumer("t", bootstrap=peer.address, auto_offset_reset="earliest") as consumer,
    ):
        assert [record.offset for record in consumer.poll(20_000)][:3] == [0, 1, 2]
        assert not lies


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff" * 4,
        bytes(400),
        b"\xff\xff\xff\xff\x00\x01\x00\x00" + bytes(600),
        os.urandom(900),
    ],
)
def test_batches_that_are_none_are_an_error_that_names_the_offset(damage: bytes) -> None:
    def answer(api: int, _body: list[bytes]) -> list[bytes] | None:
        return [entry(len(damage)), damage] if api == Api.FETCH else None

    with (
        front([], answer=answer) as peer,
        Consumer("t", bootstrap=peer.address, auto_offset_reset="earliest") as consumer,
    ):
        if damage:
            with pytest.raises(
                CorruptBatchError, match=r"t-0: (the batch at offset 0 is|offsets 0 to) "
            ):
                consumer.poll(5000)
        assert consumer.position(KEY) == 0


@pytest.mark.parametrize(
    "body",
    [
        [],
        [b""],
        [b"[]"],
        [b"{}"],
        [b'{"topics": 5}'],
        [b'{"topics": [{"name": "t"}]}'],
        [b'{"topics": []}'],
        [b'{"a":' * 5000],
    ],
)
def test_a_metadata_answer_that_is_none_is_an_error_of_tailrace(body: list[bytes]) -> None:
    with front([], answer=lying(Api.METADATA, body)) as peer:
        with pytest.raises(MalformedRequestError):
            Consumer("t", bootstrap=peer.address)
        with Admin(peer.address) as admin, pytest.raises(MalformedRequestError):
            admin.topic_info(["t"])
        with Producer(peer.address) as producer, pytest.raises(MalformedRequestError):
            producer.send("t", b"x")


@pytest.mark.parametrize("body", [[], [b"x"], [b'{"producer_id": "x"}'], [b"{}"], [b"[1]"]])
def test_an_answer_that_makes_no_sense_does_not_end_the_helper_thread(body: list[bytes]) -> None:
    with front([], answer=lying(Api.INIT_PRODUCER_ID, body)) as peer:
        producer = Producer(peer.address, delivery_timeout_ms=1500, linger_ms=1)
        try:
            error = producer.send("t", b"x").exception(20)
            assert isinstance(error, TailraceError)
            assert producer._sender_thread.helper.thread.is_alive()
        finally:
            producer.close(1)


@pytest.mark.parametrize(
    "body",
    [
        [],
        [b"x"],
        [b'{"versions": 5}'],
        [b'{"versions": {"x": 1}}'],
        [b'{"versions": {"1": null}}'],
        [b"{" * 9999],
    ],
)
def test_a_handshake_that_makes_no_sense_is_named(body: list[bytes]) -> None:
    with (
        front([], answer=lying(Api.HANDSHAKE, body)) as peer,
        Admin(peer.address, connect_timeout_ms=300) as admin,
        pytest.raises((NotReachableError, RequestTimeoutError)),
    ):
        admin.list_topics()
