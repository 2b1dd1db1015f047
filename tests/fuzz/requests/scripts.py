"""The next requests of one connection: a few requests in a row, some of them bent, in an order that
is sometimes wrong.

A script is a pure function of (seed, its number, the World): the numbers in a report say which to
play again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tailrace.protocol.frame import Api, WireError, decode_request_header, frames_max
from tests.fuzz.requests import conversations
from tests.fuzz.requests.mutations import mutate
from tests.fuzz.requests.peer import half_spoken
from tests.fuzz.requests.world import World

MESSAGES_MAX = 12
LONG_WAIT_MS = 5_000
SHOWN_BYTES = 100
KNOWN_APIS = frozenset(map(int, Api))


@dataclass(slots=True)
class Message:
    """One message as it is sent."""

    script: int
    frames: list[bytes]
    what: str
    """The bend of the message; empty: it is valid."""
    correlation_id: int = 0
    """By which its answer is known; 0: no answer can be told from others, or none has to come."""
    api: int = 0

    def __str__(self) -> str:
        name = Api(self.api).name if self.api in KNOWN_APIS else str(self.api)
        return (
            f"script {self.script} {name} [{self.what or 'valid'}] "
            f"{' | '.join(map(_shown, self.frames[1:4]))}"
        )


def _shown(frame: bytes) -> str:
    """A frame for people: as text where it is text."""
    is_text = frame[:200].isascii() and frame[:200].decode("ascii").isprintable()
    shown = frame[:200].decode("ascii") if is_text else frame[:SHOWN_BYTES].hex()
    return shown if len(frame) <= SHOWN_BYTES else f"{shown}... ({len(frame)} bytes)"


@dataclass(slots=True)
class Script:
    number: int
    messages: list[Message]
    opens: bool = False
    """On a connection of its own: the one before is dropped, whatever it waits for."""
    shakes: bool = True
    """True if a handshake comes first on a connection that opens."""
    sulks: bool = False
    """The client reads nothing for a while."""
    garbage: bytes = b""
    """Bytes on a new connection instead of messages."""
    greets: bool = True
    """True if ZMTP's greeting comes before that."""


def make_script(seed: int, number: int, world: World) -> Script:
    rng = random.Random(f"{seed}/{number}")
    if rng.random() < 0.03:
        greets, garbage = half_spoken(rng.randbytes(rng.choice((40, 2_000))), rng.randrange(11))
        return Script(number, [], opens=True, greets=greets, garbage=garbage)
    count = rng.choice((1, 2, 4, 8))
    messages = []
    bent = rng.choice((0.0, 0.5, 0.9))
    for index in range(count):
        request = conversations.any_request(rng, world)
        request.correlation_id = number * MESSAGES_MAX + index + 2
        if rng.random() < bent:
            frames, what = mutate(rng, request, world)
        else:
            frames, what = [request.header(), *request.body], ""
        messages.append(_message(number, frames, what))
    disorder = rng.random()
    if disorder < 0.05:
        rng.shuffle(messages)
    elif disorder < 0.12:
        messages.insert(rng.randrange(len(messages) + 1), rng.choice(messages))
    elif disorder < 0.14:
        messages.append(_merged(rng.choice(messages), rng.choice(messages)))
    return Script(
        number,
        messages,
        opens=rng.random() < 0.06,
        shakes=rng.random() < 0.85,
        sulks=rng.random() < 0.004,
    )


def _merged(first: Message, second: Message) -> Message:
    return _message(
        first.script,
        [*first.frames, *second.frames],
        f"two messages in one: {first.what}; {second.what}",
    )


def _message(script: int, frames: list[bytes], what: str) -> Message:
    try:
        header = decode_request_header(frames[0])
    except WireError:
        return Message(script, frames, what)
    is_answered = (
        len(frames) <= frames_max(header.api, header.version)
        and header.api in KNOWN_APIS
        and must_be_answered(header.api, header.version, frames[1:])
    )
    return Message(script, frames, what, header.correlation_id if is_answered else 0, header.api)


def must_be_answered(api: int, version: int, body: list[bytes]) -> bool:
    """True if an answer has to come soon: not for acks=0 and CREDIT, nor while a fetch may be
    parked.
    """
    if api == Api.CREDIT:
        return False
    if api == Api.PRODUCE and body:
        return (
            body[0][:4] != bytes(4)
            if version >= 2
            else len(body[0]) != 32 or body[0][20:24] != bytes(4)
        )
    if api == Api.FETCH and body and len(body[0]) >= 4:
        return int.from_bytes(body[0][:4], "little") <= LONG_WAIT_MS
    return True
