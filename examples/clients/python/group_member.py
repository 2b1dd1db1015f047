"""A consumer of a group, written from docs/protocol.md with pyzmq and pyarrow alone: nothing here
imports tailrace.

    python group_member.py tcp://127.0.0.1:7420 orders billing

It prints `partition offset value` of each record, commits every second and when it gives partitions
back, and leaves the group on SIGTERM or Ctrl-C. It has one connection and ends when that does; a
client for more than an example connects anew, as "A connection's life" says, and validates what it
reads.
"""

from __future__ import annotations

import base64
import json
import signal
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import zmq

HANDSHAKE, FETCH, METADATA, GROUP_HEARTBEAT, COMMIT_OFFSETS, FETCH_OFFSETS = 1, 4, 5, 18, 19, 20
REQUEST, RESPONSE = struct.Struct("<IHHQII"), struct.Struct("<IHHQHHIQII")
FETCHED, WANTED = struct.Struct("<16siHHiIqqq"), struct.Struct("<16siiqII")
HEADER = struct.Struct("<IIIIqIIqqqqihHiI")  # of a batch, up to schema_id
HEADER_LENGTH, CONTROL, SPARSE, END_OF_STREAM = 136, 2, 8, b"\xff\xff\xff\xff\0\0\0\0"
HEARTBEAT_S, COMMIT_S, FETCH_WAIT_MS = 3.0, 1.0, 200


class Connection:
    """Requests one after the other; what is pushed between them is noted."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._versions = {
            HANDSHAKE: 1,
            FETCH: 2,
            METADATA: 1,
            GROUP_HEARTBEAT: 1,
            COMMIT_OFFSETS: 1,
            FETCH_OFFSETS: 1,
        }
        self._number = 0
        self.has_events = False
        self.call(
            HANDSHAKE,
            {
                "versions": {str(api): [v, v] for api, v in self._versions.items()},
                "client_id": "example",
            },
        )

    def call(self, api: int, body: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(self.exchange(api, json.dumps(body).encode())[0]))

    def exchange(self, api: int, body: bytes) -> list[bytes]:
        self._number += 1
        self._socket.send_multipart(
            [REQUEST.pack(0x51525254, api, self._versions[api], self._number, 0, len(body)), body]
        )
        while (frames := self._next(30.0)) is not None:
            _, _, _, number, error, *_ = RESPONSE.unpack(frames[0])
            if number != self._number:
                continue
            if error:
                raise RuntimeError(f"error {error}: {json.loads(frames[1])['message']}")
            return frames[1:]
        raise TimeoutError("no answer in 30 s")

    def wait(self, seconds: float) -> None:
        """For a push."""
        self._next(seconds)

    def _next(self, seconds: float) -> list[bytes] | None:
        if not self._socket.poll(seconds * 1000):
            return None
        frames: list[bytes] = self._socket.recv_multipart()
        _, api, _, number, *_ = RESPONSE.unpack(frames[0])
        self.has_events = self.has_events or (number == 0 and api == GROUP_HEARTBEAT)
        return frames


class Member:
    """Of one topic."""

    def __init__(self, connection: Connection, topic: str, group: str) -> None:
        self._connection, self._topic, self._group = connection, topic, group
        info = connection.call(METADATA, {"topics": [topic]})["topics"][0]
        self._topic_id, self._schema = info["topic_id"], base64.b64decode(info["schema"])
        # Sparse batches have the offset of each row in one more column.
        offset = pa.field("offset", pa.int64(), nullable=False)
        schema = pa.ipc.read_schema(pa.BufferReader(self._schema))
        self._sparse_schema = bytes(schema.append(offset).serialize())
        self._member = {"group": group, "member_id": uuid.uuid4().hex, "member_epoch": 0}
        self._positions: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._received = 0
        self._heartbeat(topics=[topic], owned={})
        self.reconcile()

    def _heartbeat(self, **more: Any) -> None:
        """`self._target`: what it is to have, where that differs from what it has said."""
        answer = self._connection.call(GROUP_HEARTBEAT, {**self._member, **more})
        self._member["member_epoch"] = answer["member_epoch"]
        wanted = answer.get("assignment")
        self._target = None if wanted is None else set(wanted.get(self._topic_id, ()))

    def _says_what_it_has(self, partitions: set[int]) -> bool:
        """Whether the appliance agrees."""
        self._heartbeat(owned={self._topic_id: sorted(partitions)} if partitions else {})
        return self._target is None or self._target == partitions

    def reconcile(self) -> None:
        """Gives back what is not assigned any more, then takes what is new once the appliance knows
        that.
        """
        while self._target is not None:
            kept = self._target & set(self._positions)
            if kept != set(self._positions):
                self.commit()
                self._positions = {partition: self._positions[partition] for partition in kept}
                self._says_what_it_has(kept)
                continue
            wanted = self._target
            if self._says_what_it_has(wanted):
                self._begin(sorted(wanted - kept))
                return

    def _begin(self, partitions: list[int]) -> None:
        if partitions:
            asked = [[self._topic, partition] for partition in partitions]
            found = self._connection.call(
                FETCH_OFFSETS, {"group": self._group, "partitions": asked}
            )["offsets"]
            for _, partition, offset, leader_epoch, _, _ in found:
                self._positions[partition], self._epochs[partition] = max(0, offset), leader_epoch

    def heartbeat(self) -> None:
        self._connection.has_events = False
        self._heartbeat()
        self.reconcile()

    def commit(self) -> None:
        offsets = [
            [self._topic, partition, offset, self._epochs[partition], ""]
            for partition, offset in self._positions.items()
        ]
        if offsets:
            refused = self._connection.call(COMMIT_OFFSETS, {**self._member, "offsets": offsets})[
                "refused"
            ]
            if refused:
                raise RuntimeError(f"not committed: {refused}")

    def leave(self) -> None:
        self.commit()
        self._connection.call(GROUP_HEARTBEAT, {**self._member, "member_epoch": -1})

    def records(self) -> Iterator[tuple[int, int, bytes | None]]:
        """(partition, offset, value) of what one fetch brings."""
        if not self._positions:
            self._connection.wait(FETCH_WAIT_MS / 1000)
            return
        request = struct.pack(
            "<IIIIQ", FETCH_WAIT_MS, 1, 1 << 20, len(self._positions), self._received
        )
        for partition, offset in self._positions.items():
            request += WANTED.pack(
                bytes.fromhex(self._topic_id),
                partition,
                self._epochs[partition],
                offset,
                1 << 20,
                0,
            )
        entries, *batches = self._connection.exchange(FETCH, request)
        data = batches[0] if batches else b""
        self._received += len(data)
        for start in range(8, len(entries), FETCHED.size):
            _, partition, error, _, _, length, *_ = FETCHED.unpack_from(entries, start)
            if error:
                raise RuntimeError(f"partition {partition}: error {error}")
            yield from self._decoded(partition, data[:length])
            data = data[length:]

    def _decoded(self, partition: int, data: bytes) -> Iterator[tuple[int, int, bytes | None]]:
        while data:
            (metadata_size,) = struct.unpack_from("<I", data, 4)
            header = HEADER.unpack_from(data, 8 + metadata_size - HEADER_LENGTH)
            _, attributes, _, batch_length, base, last_delta = header[:6]
            if not attributes & CONTROL:
                schema = self._sparse_schema if attributes & SPARSE else self._schema
                rows = pa.ipc.open_stream(
                    schema + data[:batch_length] + END_OF_STREAM
                ).read_next_batch()
                offsets = (
                    rows.column(rows.num_columns - 1).to_pylist()
                    if attributes & SPARSE
                    else range(base, base + rows.num_rows)
                )
                for offset, value in zip(offsets, rows.column("value").to_pylist(), strict=True):
                    if offset >= self._positions[partition]:
                        yield partition, offset, value
            self._positions[partition], self._epochs[partition] = base + last_delta + 1, header[-2]
            data = data[batch_length:]


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    connection = Connection(sys.argv[1])
    member = Member(connection, sys.argv[2], sys.argv[3])
    beat_at_s = commit_at_s = time.monotonic()
    try:
        while True:
            for record in member.records():
                print(*record, flush=True)
            now_s = time.monotonic()
            if now_s >= commit_at_s:
                member.commit()
                commit_at_s = now_s + COMMIT_S
            if connection.has_events or now_s >= beat_at_s:
                member.heartbeat()
                beat_at_s = now_s + HEARTBEAT_S
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        member.leave()


if __name__ == "__main__":
    main()
