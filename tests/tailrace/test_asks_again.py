"""A client whose request the appliance cannot take now asks again, until its own time is up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import pytest
import zmq

from tailrace import Admin
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import (
    API_VERSIONS,
    Api,
    RequestHeader,
    decode_request_header,
    encode_response,
)


@contextmanager
def appliance_that_answers(codes: list[ErrorCode]) -> Iterator[tuple[str, list[RequestHeader]]]:
    """Handshakes are accepted; other requests get these codes, one after the other, the last one
    for ever.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 20)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    asked: list[RequestHeader] = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                identity, head, *_ = socket.recv_multipart()
            except zmq.Again:
                continue
            header = decode_request_header(head)
            code, body = ErrorCode.OK, orjson.dumps({"processes": []})
            if header.api == Api.HANDSHAKE:
                body = orjson.dumps(
                    {
                        "versions": {
                            str(int(api)): versions[1] for api, versions in API_VERSIONS.items()
                        },
                        "cluster_id": "x",
                    }
                )
            elif header.api != Api.PING:
                code = codes[min(len(asked), len(codes) - 1)]
                asked.append(header)
                body = body if code is ErrorCode.OK else requests.encode_error("later")
            socket.send_multipart(
                [
                    identity,
                    *map(
                        bytes,
                        encode_response(header.api, 1, header.correlation_id, code, 0, 7, [body]),
                    ),
                ]
            )

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}", asked
    finally:
        stop.set()
        thread.join()
        socket.close()
        context.term()


@pytest.mark.parametrize("code", [ErrorCode.NOT_READY, ErrorCode.TOO_MANY_REQUESTS])
def test_a_request_that_was_not_taken_is_sent_again(code: ErrorCode) -> None:
    with (
        appliance_that_answers([code, code, ErrorCode.OK]) as (address, asked),
        Admin(address) as admin,
    ):
        assert admin.describe_cluster() == {"processes": []}
        assert len(asked) == 3
        assert len({header.correlation_id for header in asked}) == 3


def test_in_the_end_the_refusal_is_told() -> None:
    with (
        appliance_that_answers([ErrorCode.TOO_MANY_REQUESTS]) as (address, asked),
        Admin(address, request_timeout_ms=3_000) as admin,
    ):
        with pytest.raises(TailraceError, match="TOO_MANY_REQUESTS") as caught:
            admin.describe_cluster()
        assert caught.value.retriable
        assert len(asked) > 1


def test_a_change_of_which_nothing_is_known_is_not_made_again() -> None:
    with appliance_that_answers([ErrorCode.TIMED_OUT]) as (address, asked), Admin(address) as admin:
        with pytest.raises(TailraceError, match="TIMED_OUT"):
            admin.delete_topics(["t"])
        assert len(asked) == 1
