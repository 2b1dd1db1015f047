"""Requests of a transaction's owner to the coordinator, and the fields of its responses.

Owner: pure.
Invariants: a request is repeated until the coordinator has decided about it.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from tailrace.client.connections.steps import Steps, Wait, call, decode_answer
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.errors import MalformedRequestError, RequestTimeoutError, TailraceError
from tailrace.producer.batches.accumulator import NS_PER_MS
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_json
from tailrace.protocol.session import Response

PAUSE_NS = 2 * NS_PER_MS
PAUSE_MAX_NS = 64 * NS_PER_MS
"""The pause before a request is repeated, doubled each time."""
_REPEATED = frozenset({ErrorCode.STORAGE_ERROR, ErrorCode.INTERNAL_ERROR}) | frozenset(
    code for code in ErrorCode if ERROR_TABLE[code].retriable
)
"""Codes after which the outcome is not known, or the appliance did nothing."""
COMMITTED = "commit"
IDENTITY = ("producer_id", "producer_epoch")
PREPARE = "prepare"


class NotCarriedOutError(RequestTimeoutError):
    """The newest response of a request that was repeated in vain."""

    answered_code = ErrorCode.OK


def asked(
    sender_thread: SenderThread, api: Api, request: dict[str, Any], deadline_ns: int
) -> Steps[Response]:
    """Ask until the appliance has decided. Raises RequestTimeoutError, NotReachableError."""
    return (yield from repeated(sender_thread, api, encode_json(request), deadline_ns))


def repeated(
    sender_thread: SenderThread, api: Api, body: bytes, deadline_ns: int
) -> Steps[Response]:
    """Repeat an encoded request until the appliance has decided. Raises as `asked` does."""
    pause_ns = PAUSE_NS
    while True:
        left_ms = max(1, ceil((deadline_ns - sender_thread.now_ns()) / NS_PER_MS))
        response = yield from call(
            sender_thread.connection,
            api,
            [body],
            left_ms,
            guard=sender_thread.use_connection,
            returns_errors=True,
        )
        if response.code not in _REPEATED:
            return response
        repeat_at_ns = sender_thread.now_ns() + pause_ns
        if repeat_at_ns >= deadline_ns:
            error = NotCarriedOutError(
                f"{api.name} could not be carried out in time: {response.detail()} "
                f"[{response.code.name}]"
            )
            error.answered_code = response.code
            raise error
        while sender_thread.now_ns() < repeat_at_ns:
            yield Wait(repeat_at_ns)
        pause_ns = min(PAUSE_MAX_NS, 2 * pause_ns)


def is_committed_in(response: Response) -> bool:
    """True if the response to an abort says that the transaction was committed before."""
    if response.code is not ErrorCode.INVALID_TRANSACTION:
        return False
    try:
        return decode_answer(Api.END_TRANSACTION, response).get("outcome") == COMMITTED
    except TailraceError:
        return False


def tag_in(answer: dict[str, Any]) -> str | None:
    """The tag of the prepared transaction in a response; None: there is none."""
    prepared = answer.get("prepared")
    if not isinstance(prepared, dict):
        return None
    tag = prepared.get("tag")
    return tag if isinstance(tag, str) else ""


def numbers_in(answer: dict[str, Any], *names: str) -> list[int]:
    """Whole numbers of a response. Raises MalformedRequestError."""
    found = [answer.get(name) for name in names]
    if not all(type(number) is int for number in found):
        raise MalformedRequestError(
            f"the response of the appliance has {found!r:.100} as {', '.join(names)}"
        )
    return [int(number) for number in found if number is not None]


def following_in(response: Response) -> tuple[int, int] | None:
    """The next producer id and epoch in a response, None if it has none."""
    try:
        producer_id, epoch = numbers_in(decode_answer(Api.END_TRANSACTION, response), *IDENTITY)
    except TailraceError:
        return None
    return producer_id, epoch
