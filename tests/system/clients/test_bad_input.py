"""Bad input: each gets an error code and a sentence that says what to do, and the appliance still
serves.
"""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest
import zmq

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_now
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidSchemaError,
    InvalidSettingError,
    InvalidTopicNameError,
    NotReachableError,
    PartitionOutOfRangeError,
    RecordTooLargeError,
    SchemaMismatchError,
    TailraceError,
    TopicExistsError,
    UnknownTopicError,
    UnsafeBatchError,
    UnsupportedBatchError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol import json_messages as requests
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import Api, RequestHeader, decode_response_header, encode_request
from tests.kit.batches import make_batch, with_wild_buffer
from tests.kit.peers.produce_call import produce
from tests.kit.processes import HANG_LIMIT_S


@pytest.fixture(autouse=True)
def still_serving(appliance: EmbeddedAppliance) -> Iterator[None]:
    """After each of these the appliance takes and gives records, and no process was restarted."""
    yield
    name = f"check-{os.urandom(4).hex()}"
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name)])
        with Producer(appliance.address) as producer:
            assert producer.send(name, b"still here").result(60).offset == 0
        assert all(process["restarts"] == 0 for process in admin.describe_cluster()["processes"])


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    return topic


def says_what_to_do(error: TailraceError) -> None:
    assert error.advice.endswith(".")
    assert error.advice in str(error)
    assert error.code.name in str(error)


def test_unknown_topic(appliance: EmbeddedAppliance, topic: str) -> None:
    with (
        Producer(appliance.address) as producer,
        pytest.raises(UnknownTopicError, match=f"there is no topic '{topic}'") as caught,
    ):
        producer.send(topic, b"x")
    says_what_to_do(caught.value)
    with pytest.raises(UnknownTopicError):
        Consumer(topic, bootstrap=appliance.address)
    with Admin(appliance.address) as admin, pytest.raises(UnknownTopicError):
        admin.delete_topics([topic])


def test_a_topic_deleted_under_a_producer(appliance: EmbeddedAppliance, made: str) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        producer.send(made, b"x", partition=0).result(60)
        admin.delete_topics([made])
        with pytest.raises(UnknownTopicError):
            producer.send(made, b"y", partition=0).result(60)


def test_partition_out_of_range(appliance: EmbeddedAppliance, made: str) -> None:
    with Producer(appliance.address) as producer:
        for partition in (2, -1, 10**6):
            with pytest.raises(PartitionOutOfRangeError, match="partitions 0 to 1"):
                producer.send(made, b"x", partition=partition)
    with Consumer(bootstrap=appliance.address) as consumer, pytest.raises(PartitionOutOfRangeError):
        consumer.assign([TopicPartition(made, 2)])


def test_a_record_over_max_request_size(appliance: EmbeddedAppliance, made: str) -> None:
    with (
        Producer(appliance.address, max_request_size=10_000) as producer,
        pytest.raises(RecordTooLargeError, match="max_request_size") as caught,
    ):
        producer.send(made, b"x" * 10_000)
    says_what_to_do(caught.value)


def test_a_topic_that_takes_no_record_says_what_a_batch_needs_itself(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """A record of 25 bytes does not fit 1024: the sentence alone was a riddle."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.alter_topics({made: {"max.message.bytes": 1024}})
        with pytest.raises(
            RecordTooLargeError, match=r"25 bytes does not fit 1024 .* 2048 are kept for the batch"
        ):
            producer.send(made, b"x")
    with pytest.raises(InvalidSettingError, match=r"max_request_size is 2048.* from 4096 to"):
        Producer(appliance.address, max_request_size=2048)


@pytest.mark.parametrize(
    "arguments",
    [{"value": 5}, {"value": 1.5}, {"value": b"x", "key": 7},
    {"value": b"x", "headers": [("h", "text")]}, {"value": b"x", "headers": [5]},
     {"value": b"x", "timestamp": "now"}, {"value": {"a": 1}}],
)  # fmt: skip
def test_a_record_of_a_wrong_type(
    appliance: EmbeddedAppliance, made: str, arguments: dict[str, object]
) -> None:
    with Producer(appliance.address) as producer:
        with pytest.raises(InvalidRecordError) as caught:
            producer.send(made, **arguments)  # type: ignore[arg-type]
        says_what_to_do(caught.value)
        assert producer.send(made, b"good").result(60).offset == 0


def test_a_row_of_a_wrong_type_fails_its_handle_and_not_the_next_one(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, schema=pa.schema([("a", pa.int32())]))])
    with Producer(appliance.address) as producer:
        error = producer.send(topic, {"a": "word"}).exception(60)
        assert isinstance(error, InvalidRecordError)
        assert producer.send(topic, {"a": 1}).result(60).offset == 0
        with pytest.raises(InvalidRecordError, match="must be a dict"):
            producer.send(topic, b"bytes")


def test_a_row_with_a_column_that_the_topic_has_not_is_refused_and_names_it(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [
                NewTopic(
                    topic,
                    schema=pa.schema([("a", pa.int32()), ("b", pa.string())]),
                    configs={"delay.enabled": True},
                )
            ]
        )
    with Producer(appliance.address) as producer:
        for deliver_after in (None, dt.timedelta(hours=1)):
            with pytest.raises(
                SchemaMismatchError,
                match=f"'c', which topic '{topic}' has not; its columns are a, b",
            ) as caught:
                producer.send(topic, {"a": 1, "c": 2}, deliver_after=deliver_after)
            says_what_to_do(caught.value)
        assert producer.send(topic, {"a": 1}).result(60).offset == 0


def test_a_frame_that_does_not_match_the_schema(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, schema=pa.schema([("a", pa.int32())]))])
    with Producer(appliance.address) as producer:
        for frame in (
            pa.table({"b": [1]}),
            pa.table({"a": ["word"]}),
            pa.table({"a": [1], "b": [1]}),
        ):
            with pytest.raises(SchemaMismatchError) as caught:
                producer.send_arrow(topic, frame)
            says_what_to_do(caught.value)
        with pytest.raises(SchemaMismatchError, match="has no columns"):
            producer.send_arrow(topic, 5)
        with pytest.raises(SchemaMismatchError, match="key_column"):
            producer.send_arrow(topic, pa.table({"a": [1]}), key_column="z")


def produce_raw(
    appliance: EmbeddedAppliance, name: str, batch: bytes | bytearray
) -> produce_messages.ProducedEntry:
    """Send bytes as a batch, past the SDK."""
    with Admin(appliance.address) as admin:
        info = admin.topic_info([name])[name]
    connection = Connection(appliance.address, "raw")
    try:
        return produce(connection, info.topic_id, batch)
    finally:
        connection.close()


def test_bad_batches_on_the_wire(appliance: EmbeddedAppliance, made: str) -> None:
    with Admin(appliance.address) as admin:
        info = admin.topic_info([made])[made]
    good = make_batch(3, seed=info.seeds[0], schema_id=info.schema_id)
    flipped = bytearray(good)
    flipped[-3] ^= 1
    with pytest.raises(CorruptBatchError):
        produce_raw(appliance, made, flipped)
    with pytest.raises(CorruptBatchError):
        produce_raw(appliance, made, make_batch(3, seed=info.seeds[1], schema_id=info.schema_id))
    with pytest.raises(UnsupportedBatchError):
        produce_raw(appliance, made, b"garbage" * 100)
    with pytest.raises(UnsafeBatchError):
        produce_raw(
            appliance,
            made,
            with_wild_buffer(
                make_batch(50, seed=info.seeds[0], schema_id=info.schema_id), info.seeds[0]
            ),
        )
    with pytest.raises(RecordTooLargeError):
        produce_raw(appliance, made, bytes((1 << 20) + 1))
    assert produce_raw(appliance, made, good).base_offset == 0


@pytest.fixture
def client(appliance: EmbeddedAppliance) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER without a session."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 60_000)
        dealer.connect(appliance.address)
        yield dealer


def test_garbage_on_the_port_in_zeromq_frames(
    appliance: EmbeddedAppliance, client: zmq.Socket[bytes]
) -> None:
    source = random.Random(5)
    for _ in range(300):
        message = [
            source.randbytes(source.choice((0, 1, 23, 24, 25, 500)))
            for _ in range(source.randrange(1, 6))
        ]
        if len(message[0]) == 24:
            client.send_multipart(message)
            frames = client.recv_multipart()
        else:
            frames = answer_before_the_end(appliance.address, message)
        assert decode_response_header(frames[0]).error in (
            ErrorCode.MALFORMED_REQUEST,
            ErrorCode.SESSION_UNKNOWN,
        )
    client.send_multipart([RequestHeader(999, 1, 5, 0).to_bytes()])
    assert decode_response_header(client.recv_multipart()[0]).error == ErrorCode.SESSION_UNKNOWN


def answer_before_the_end(address: str, message: list[bytes]) -> list[bytes]:
    """Get the answer to a message that is not of the protocol. It is closed 50 ms later: on a busy
    machine the answer may go down with it, so ask again.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    for _ in range(20):
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(address)
            dealer.send_multipart(message)
            if dealer.poll(3_000):
                return dealer.recv_multipart()
    raise AssertionError("never answered")


def test_every_api_refuses_garbage_bodies(appliance: EmbeddedAppliance) -> None:
    connection = Connection(appliance.address, "raw")
    source = random.Random(6)
    codes: list[ErrorCode] = []
    try:
        for api in Api:
            if api is Api.HANDSHAKE:
                continue
            for body in (
                [],
                [b""],
                [source.randbytes(40)],
                [b"{}"],
                [b"[1]"],
                [b'{"topics": 5}'],
                [b'{"topics": [5]}'],
                [source.randbytes(32), b""],
            ):
                codes.append(code_of_call(connection, api, body))
    finally:
        connection.close()
    assert not {ErrorCode.TIMED_OUT, ErrorCode.NOT_REACHABLE} & set(codes), "each is answered"
    assert ErrorCode.MALFORMED_REQUEST in codes


def code_of_call(connection: Connection, api: Api, body: list[bytes]) -> ErrorCode:
    try:
        call_now(connection, api, body, 10_000)
    except TailraceError as error:
        return error.code
    return ErrorCode.OK


def test_an_unknown_api_and_another_version(client: zmq.Socket[bytes]) -> None:
    client.send_multipart(
        encode_request(
            Api.HANDSHAKE,
            1,
            1,
            [requests.encode_json({"versions": {str(int(a)): [1, 1] for a in Api}})],
        )
    )
    assert decode_response_header(client.recv_multipart()[0]).error == 0
    client.send_multipart(encode_request(999, 1, 2, []))
    assert decode_response_header(client.recv_multipart()[0]).error == ErrorCode.UNKNOWN_API
    client.send_multipart(encode_request(Api.PING, 9, 3, []))
    assert decode_response_header(client.recv_multipart()[0]).error == ErrorCode.UNSUPPORTED_VERSION
    client.send_multipart(
        encode_request(Api.HANDSHAKE, 1, 1, [requests.encode_json({"versions": {"1": [7, 9]}})])
    )
    assert decode_response_header(client.recv_multipart()[0]).error == ErrorCode.UNSUPPORTED_VERSION


def test_garbage_on_the_port_that_is_not_even_zeromq(appliance: EmbeddedAppliance) -> None:
    host, port = appliance.address.removeprefix("tcp://").split(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\xff" * 100, b""):
        with socket.create_connection((host, int(port)), timeout=HANG_LIMIT_S) as raw:
            raw.sendall(data)


def test_topic_names_and_schemas_that_cannot_be(appliance: EmbeddedAppliance, made: str) -> None:
    with Admin(appliance.address) as admin:
        for name in ("a/b", "..", "../../etc/passwd", "x" * 300, "", "a b"):
            with pytest.raises(InvalidTopicNameError) as caught:
                admin.create_topics([NewTopic(name)])
            says_what_to_do(caught.value)
        with pytest.raises(TopicExistsError):
            admin.create_topics([NewTopic(made)])
        with pytest.raises(InvalidSettingError, match=r"did you mean segment\.bytes"):
            admin.create_topics([NewTopic("x", configs={"segment.byte": 1})])
        for partitions in (0, -1, 10**6):
            with pytest.raises(InvalidSettingError, match="partitions is"):
                admin.create_topics([NewTopic("x", partitions)])
        with pytest.raises(InvalidSchemaError):
            admin.create_topics([NewTopic("x", schema=pa.schema([("n", pa.null())]))])
        with pytest.raises(InvalidSettingError, match="can only grow"):
            admin.create_partitions({made: 1})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ackz": 1}, "did you mean acks"),
        ({"acks": 2}, "acks is 2"),
        ({"linger_ms": -1}, "linger_ms is -1"),
        ({"batch_size": "big"}, "batch_size is 'big'"),
        ({"compression_type": "gzip"}, "allowed are none, lz4, zstd"),
        ({"delivery_timeout_ms": 3}, "must be more than linger_ms"),
        ({"bootstrap": "http://localhost:7420"}, "it takes an address"),
    ],
)
def test_client_settings_fail_at_construction_and_name_the_setting(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        Producer(**settings)  # type: ignore[arg-type]


def test_no_appliance_at_the_address(topic: str) -> None:
    with (
        Producer("tcp://127.0.0.1:1", max_block_ms=300) as producer,
        pytest.raises(NotReachableError, match="no appliance answers") as caught,
    ):
        producer.send(topic, b"x")
    says_what_to_do(caught.value)


def serve(*arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """`tailrace serve`, which is expected to end by itself."""
    tailrace = str(pathlib.Path(sys.executable).parent / "tailrace")
    return subprocess.run(
        [tailrace, "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def sentence_of(done: subprocess.CompletedProcess[str]) -> str:
    return next(line for line in done.stderr.splitlines() if line.startswith("tailrace: "))


def test_a_second_serve_on_the_same_data_directory_names_the_holder(
    appliance: EmbeddedAppliance,
) -> None:
    done = serve("--data-dir", appliance.data_dir, "--listen", "tcp://127.0.0.1:0")
    assert done.returncode == 73
    assert f"in use by the appliance with process id {appliance.pid}" in sentence_of(done)


def test_a_port_in_use(appliance: EmbeddedAppliance, tmp_path: pathlib.Path) -> None:
    done = serve("--data-dir", str(tmp_path), "--listen", appliance.address)
    assert done.returncode == 72
    assert f"cannot listen on {appliance.address}" in sentence_of(done)
    assert "choose another with --listen" in sentence_of(done)


def test_a_data_directory_that_cannot_be_written() -> None:
    done = serve("--data-dir", "/proc/tailrace", "--listen", "tcp://127.0.0.1:0")
    assert done.returncode == 73
    assert "cannot write in the data directory /proc/tailrace" in sentence_of(done)


def test_dev_shm_too_small_for_the_rings(tmp_path: pathlib.Path) -> None:
    done = serve(
        "--data-dir",
        str(tmp_path),
        "--listen",
        "tcp://127.0.0.1:0",
        "--set",
        f"ring_bytes={1 << 36}",
    )
    assert done.returncode == 75
    said = done.stderr if isinstance(done.stderr, str) else done.stderr.decode()
    assert re.search(r"/dev/shm has no room for this appliance: it needs 65,5\d\d MiB", said), said
    assert "rings               65,548 MiB  ring_bytes, 1 worker" in said
    assert "Lower ring_bytes (rings are the largest part)" in said


def test_a_misspelt_setting_suggests_the_right_one(tmp_path: pathlib.Path) -> None:
    done = serve("--data-dir", str(tmp_path), "--set", "ring_byte=1")
    assert done.returncode == 2
    assert "did you mean ring_bytes?" in sentence_of(done)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_a_data_directory_on_a_read_only_mount(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    tailrace = pathlib.Path(sys.executable).parent / "tailrace"
    script = (
        f"mount --bind {directory} {directory} && mount -o remount,ro,bind {directory} && "
        f"exec {tailrace} serve --data-dir {directory} --listen tcp://127.0.0.1:0"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert done.returncode == 73
    assert "Read-only file system" in sentence_of(done)


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("timestamp", [10**18, -(10**18), 2**62])
def test_a_timestamp_that_64_bits_do_not_hold_is_refused_and_the_producer_lives(
    appliance: EmbeddedAppliance, topic: str, compression: str, timestamp: int
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    with Producer(appliance.address, compression_type=compression) as producer:
        with pytest.raises(InvalidRecordError, match="out of range"):
            producer.send(topic, b"v", timestamp=timestamp)
        assert producer.send(topic, b"after").result(60).offset == 0
    with (
        Consumer(topic, bootstrap=appliance.address) as consumer,
        pytest.raises(InvalidRequestError, match="out of range"),
    ):
        consumer.offsets_for_times({TopicPartition(topic, 0): timestamp})
