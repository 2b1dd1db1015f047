"""A transactional producer, written from docs/protocol.md and docs/format.md with pyzmq, pyarrow
and a CRC32C: nothing here imports tailrace.

    echo "a b c" | python transactional_producer.py tcp://127.0.0.1:7420 orders billing-1

Each line of its input is a transaction: word n is written to partition n of the topic. A line that
begins with `!` is aborted; `@topic/n` among the words commits offset n of partition 0 of that topic
for the group `billing-1`. Each decision is asked for twice, as after a lost response, and printed.
Any error that is not to be repeated ends it, another owner of the id included. It has one
connection and ends when that does; a client for more than an example connects anew.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import time
import uuid
from typing import Any

import pyarrow as pa
import zmq
from fastcrc.crc32 import iscsi as crc32c

HANDSHAKE, PRODUCE, METADATA, CREDIT, INIT_TRANSACTIONS, END_TRANSACTION = 1, 3, 5, 12, 27, 28
VERSIONS = {HANDSHAKE: 1, PRODUCE: 2, METADATA: 1, CREDIT: 1, INIT_TRANSACTIONS: 1,
            END_TRANSACTION: 1}  # fmt: skip
REQUEST, RESPONSE = struct.Struct("<IHHQII"), struct.Struct("<IHHQHHIQII")
TARGET, PRODUCED = struct.Struct("<16siIII"), struct.Struct("<HHiqq")
HEADER = struct.Struct("<IIIqIIqqqqihHiIqqqqIIQHHI")  # of a batch, behind header_crc32c
HEADER_LENGTH, TRANSACTIONAL, VERSION, MAGIC = 136, 1, 2, 0x31425254
ACKS_ALL, TIMEOUT_MS, PAUSE_S = -1, 30_000, 0.01
OK, TIMED_OUT, STORAGE_ERROR = 0, 21, 18
REPEATED = {13, 16, 17, STORAGE_ERROR, 20, TIMED_OUT, 39, 40, 55}


class Connection:
    """Requests one after the other, each repeated while its error says so."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._number = self._sent = self._credit_limit = 0
        versions = {str(api): [version, version] for api, version in VERSIONS.items()}
        self.ask(HANDSHAKE, versions=versions, client_id="example")

    def ask(self, api: int, **body: Any) -> dict[str, Any]:
        """A request and its response in JSON."""
        while True:
            error, frames = self._exchange(api, [json.dumps(body).encode()])
            answer = dict(json.loads(frames[0]))
            if error == OK:
                return answer
            if error not in REPEATED:
                raise RuntimeError(f"error {error}: {answer['message']}")
            time.sleep(PAUSE_S)

    def produce(self, topic_id: bytes, batches: dict[int, bytes]) -> None:
        """Returns when each partition has its batch on disk."""
        while batches:
            size = sum(map(len, batches.values()))
            while self._sent + size > self._credit_limit:
                self._send(CREDIT, [struct.pack("<Q", size)])
                self._receive()
            self._sent += size
            head = struct.pack("<iIII", ACKS_ALL, TIMEOUT_MS, len(batches), 0) + b"".join(
                TARGET.pack(topic_id, partition, 0, len(batch), 0)
                for partition, batch in batches.items()
            )
            error, frames = self._exchange(PRODUCE, [head, b"".join(batches.values())])
            if error != OK:
                raise RuntimeError(f"error {error}: {json.loads(frames[0])['message']}")
            left = {}
            results = PRODUCED.iter_unpack(frames[0][8:])
            for (partition, batch), (error, *_) in zip(batches.items(), results, strict=True):
                if error in REPEATED:
                    left[partition] = batch  # the same bytes: what is there is not written twice
                elif error != OK:
                    raise RuntimeError(f"error {error} of partition {partition}")
            batches = left
            time.sleep(PAUSE_S if left else 0)

    def _exchange(self, api: int, body: list[bytes]) -> tuple[int, list[bytes]]:
        """(error, body) of the response."""
        self._send(api, body)
        while True:
            number, error, frames = self._receive()
            if number == self._number:
                return error, frames

    def _send(self, api: int, body: list[bytes]) -> None:
        self._number += 1
        length = sum(map(len, body))
        header = REQUEST.pack(0x51525254, api, VERSIONS[api], self._number, 0, length)
        self._socket.send_multipart([header, *body])

    def _receive(self) -> tuple[int, int, list[bytes]]:
        if not self._socket.poll(2 * TIMEOUT_MS):
            raise TimeoutError("no answer")
        head, *body = self._socket.recv_multipart()
        _, _, _, number, error, _, _, self._credit_limit, _, _ = RESPONSE.unpack(head)
        return number, error, body


def batch_of(word: str, partition: int, topic: dict[str, Any], identity: dict[str, int]) -> bytes:
    """A batch of one record, at sequence 0."""
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(topic["schema"])))
    now_us = time.time_ns() // 1_000
    row = {"timestamp": [now_us], "key": [None], "value": [word.encode()], "headers": [[]]}
    message = bytes(pa.RecordBatch.from_pydict(row, schema).serialize())
    (metadata_size,) = struct.unpack_from("<I", message, 4)
    prefix = (
        struct.pack("<II", 0xFFFFFFFF, metadata_size + HEADER_LENGTH) + message[8:][:metadata_size]
    )
    body = message[8 + metadata_size :]
    fields = HEADER.pack(
        TRANSACTIONAL, crc32c(body, crc32c(prefix)), len(message) + HEADER_LENGTH, 0, 0, 1,
        now_us, now_us, -1, identity["producer_id"], 0, identity["producer_epoch"], 0, -1,
        topic["schema_id"], 0, -1, -1, -1, 0, 0, 0, HEADER_LENGTH, VERSION, MAGIC,
    )  # fmt: skip
    seed = crc32c(bytes.fromhex(topic["topic_id"]) + struct.pack("<i", partition))
    return prefix + struct.pack("<I", crc32c(fields, seed)) + fields + body


def main() -> None:
    address, topic_name, transactional_id = sys.argv[1:]
    connection = Connection(address)
    topic = connection.ask(METADATA, topics=[topic_name])["topics"][0]
    answer = connection.ask(
        INIT_TRANSACTIONS, transactional_id=transactional_id, timeout_ms=60_000,
        attempt=uuid.uuid4().hex,
    )  # fmt: skip
    owner = {"transactional_id": transactional_id, "owner": answer["owner"]}
    for line in sys.stdin:
        identity = {name: answer[name] for name in ("producer_id", "producer_epoch")}
        words = line.removeprefix("!").split()
        offsets = [word[1:].split("/") for word in words if word.startswith("@")]
        values = [word for word in words if not word.startswith("@")]
        batches = {n: batch_of(word, n, topic, identity) for n, word in enumerate(values)}
        connection.produce(bytes.fromhex(topic["topic_id"]), batches)
        decision: dict[str, Any] = {**owner, **identity, "outcome": "abort"}
        if not line.startswith("!"):
            entries = [[name, 0, int(offset), -1, ""] for name, offset in offsets]
            decision["outcome"] = "commit"
            decision["offsets"] = [{"group": transactional_id, "entries": entries}]
        answer = connection.ask(END_TRANSACTION, **decision)
        assert connection.ask(END_TRANSACTION, **decision) == answer
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
