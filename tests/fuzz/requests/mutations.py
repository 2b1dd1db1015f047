"""Structural mutations: a valid request bent in one to three places, so that it gets as far into
the appliance as its bend lets it.

What is bent is sealed again (body lengths, checksums of batches), most of the time: a request that
is refused at its first check tests that check only. Each mutation says in a few words what it did.
Owner: pure, every choice comes from the random source that is given.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
import struct
from collections.abc import Callable
from typing import Any

from tailrace.format.record_batch.batch_header import HEADER_BYTES, compute_body_crc
from tailrace.format.record_batch.header_stamps import seal_header
from tailrace.protocol.frame import Api
from tests.fuzz.requests.conversations import BINARY_FIELDS, Request
from tests.fuzz.requests.produce_mutations import bend_batches
from tests.fuzz.requests.world import World

U32_MAX, U64_MAX = (1 << 32) - 1, (1 << 64) - 1
INTEGERS = (0, 1, -1, 2, 7, 31, 32, 127, 128, 255, 256, 1000, 1001, 2000, 4096, 4097, 65535,
1 << 20, (1 << 31) - 1, 1 << 31, U32_MAX, (1 << 53) + 1,
            (1 << 62), (1 << 63) - 1, 1 << 63, U64_MAX, 1 << 64, -(1 << 31) - 1, -(1 << 63),
            -(1 << 63) - 1, 10**40)  # fmt: skip
TEXTS = ("", " ", "\x00", "\n2026-01-01 ERROR process=tr-front-0 forged", "\u2028", "\x1b[2J",
"ü" * 50, "🦆", "..", "../../etc/passwd", "a/b", "@delay",
         "later@delay", "plain", "0", "-1", "null", "true", "earliest", "%s%n{0}", "'; --",
         "x" * 101, "x" * 237, "x" * 243, "x" * 250)  # fmt: skip
RAW_MARK = "\ue000raw"
"""In a JSON text under way: a place where text comes that no JSON library writes."""


class _Raws:
    """Texts that stand behind marks until the document is written."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def mark(self, text: bytes) -> str:
        self.texts.append(text)
        return f"{RAW_MARK}{len(self.texts) - 1:04d}"

    def write(self, value: Any) -> bytes:
        document = json.dumps(value, ensure_ascii=False, allow_nan=True).encode(
            "utf-8", "surrogatepass"
        )
        for number, text in enumerate(self.texts):
            document = document.replace(f'"{RAW_MARK}{number:04d}"'.encode(), text)
        return document


def _nested(rng: random.Random) -> bytes:
    depth = rng.choice((5, 30, 31, 32, 33, 64, 200, 300, 500, 900, 1000, 1100, 5000, 100_000))
    if rng.random() < 0.5:
        return b"[" * depth + b"]" * depth
    return b'{"a":' * depth + b"1" + b"}" * depth


def odd_value(rng: random.Random, raws: _Raws, old: Any) -> Any:
    """Something else than `old`, mostly of another type."""
    choice = rng.randrange(14)
    if choice == 0:
        return None
    if choice == 1:
        return rng.random() < 0.5
    if choice in (2, 3):
        return rng.choice(INTEGERS)
    if choice == 4:
        return rng.choice(
            (
                0.5,
                -0.0,
                1e308,
                float("nan"),
                float("inf"),
                -float("inf"),
                raws.mark(b"1e999"),
                raws.mark(b"-0"),
                raws.mark(b"0.1e-500"),
            )
        )
    if choice in (5, 6):
        return rng.choice(TEXTS)
    if choice == 7:
        return rng.choice((b"x", "ü".encode(), b"\x01")).decode() * rng.choice(
            (300, 5_000, 200_000, 900_000)
        )
    if choice == 8:
        return raws.mark(
            rng.choice(
                (
                    b'"\\ud800"',
                    b'"\\udc00\\ud800"',
                    b'"\xff\xfe"',
                    b'"\\u0000"',
                    b'"\xed\xa0\x80"',
                    b"'x'",
                    b"nul",
                    b"{",
                    b"]",
                )
            )
        )
    if choice == 9:
        return raws.mark(_nested(rng))
    if choice == 10:
        return rng.choice(
            ({}, [], [[]], {"": ""}, [None], [0], {"0": {}}, {"behind": {}}, {"behind": 1 << 70})
        )
    if choice == 11:
        return (
            [old] * rng.choice((2, 1000, 1001, 2001, 4097, 20_000))
            if len(str(old)) < 300
            else [old, old]
        )
    if choice == 12:
        return {str(old)[:50]: old}
    return str(old) if not isinstance(old, str) else len(old)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in items:
        found += _places(child, (*path, key))
    return found


def mutate_json(rng: random.Random, text: bytes, world: World) -> tuple[bytes, str]:
    """A JSON document with something else in it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # bent before
        return mutate_bytes(rng, text)
    if rng.random() < 0.1:
        return _bend_text(rng, text)
    raws = _Raws()
    places = _places(value)
    if not places or rng.random() < 0.03:
        new = odd_value(rng, raws, value)
        return raws.write(new), f"json: the document is {new!r:.40}"
    path = rng.choice(places)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, shown = path[-1], ".".join(map(str, path))
    old = parent[key]
    if key in ("schema", "delay_schema") and isinstance(old, str) and rng.random() < 0.8:
        try:
            message, what = mutate_schema(rng, base64.b64decode(old))
        except ValueError:  # bent before
            return mutate_bytes(rng, text)
        parent[key] = base64.b64encode(message).decode()
        return raws.write(value), f"json: {shown}: {what}"
    if key == "delay_id" and isinstance(old, str) and rng.random() < 0.6:
        parent[key], what = _bend_delay_id(rng, old)
        return raws.write(value), f"json: {shown}: {what}"
    choice = rng.randrange(6)
    if choice == 0:
        del parent[key]
        return raws.write(value), f"json: {shown} is missing"
    if choice == 1 and isinstance(parent, dict):
        new = odd_value(rng, raws, old)
        parent[
            rng.choice(
                (*TEXTS, "name", "topic", "partition", "online", "configs", "validate_only", "key")
            )
        ] = new
        return raws.write(value), f"json: beside {shown} one more, {new!r:.40}"
    if choice == 2 and isinstance(parent, dict):
        parent[f"{RAW_MARK}key"] = odd_value(rng, raws, old)
        document = raws.write(value).replace(
            f"{RAW_MARK}key".encode(), str(key).encode("utf-8", "surrogatepass")
        )
        return document, f"json: {shown} twice"
    parent[key] = new = odd_value(rng, raws, old)
    return raws.write(value), f"json: {shown} is {new!r:.40}"


def _bend_text(rng: random.Random, text: bytes) -> tuple[bytes, str]:
    choice = rng.randrange(6)
    if choice == 0:
        return text[: rng.randrange(len(text) + 1)], "json: cut"
    if choice == 1:
        return b"\xef\xbb\xbf" + text, "json: a byte order mark"
    if choice == 2:
        return text + rng.choice((b"x", text, b"\x00", b" " * 70_000)), "json: more behind"
    if choice == 3:
        return text.decode("utf-8", "replace").encode("utf-16"), "json: in UTF-16"
    if choice == 4:
        return b'{"pad":"' + b"p" * rng.choice(
            (1 << 19, (1 << 20) - 100, 1 << 20, 3 << 20)
        ) + b'",' + text[1:], "json: padded"
    return mutate_bytes(rng, text)


def _bend_delay_id(rng: random.Random, old: str) -> tuple[str, str]:
    try:
        raw = bytearray(base64.urlsafe_b64decode(old))
        position, letter = rng.choice(((16, "i"), (20, "q"), (28, "q")))
        number = _put(rng, raw, position, letter)
    except (binascii.Error, ValueError, struct.error):
        return old[::-1], "delay id backwards"
    return base64.urlsafe_b64encode(raw).decode(), f"delay id: {letter} at {position} is {number}"


def _put(rng: random.Random, data: bytearray, position: int, letter: str) -> int:
    """Write a number at a boundary into a field. Raises struct.error when it is not there."""
    bits = 8 * struct.calcsize("<" + letter)
    number = rng.choice(INTEGERS) & ((1 << bits) - 1)
    struct.pack_into("<" + {8: "B", 16: "H", 32: "I", 64: "Q"}[bits], data, position, number)
    return number


def mutate_bytes(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Bits flipped, cut, lengthened, emptied."""
    choice = rng.randrange(5)
    if choice == 0 or not data:
        return b"", "emptied"
    if choice == 1:
        return data[: rng.randrange(len(data))], "cut"
    if choice == 2:
        return data + rng.randbytes(rng.choice((1, 8, 100, 50_000))), "lengthened"
    bent = bytearray(data)
    for _ in range(rng.choice((1, 1, 4))):
        bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
    return bytes(bent), "bits flipped"


def mutate_fields(rng: random.Random, api: int, frame: bytes) -> tuple[bytes, str]:
    """A binary frame with a field at a boundary."""
    fields = BINARY_FIELDS.get(api)
    if not fields or rng.random() < 0.15:
        return mutate_bytes(rng, frame)
    position, letter = rng.choice(fields)
    bent = bytearray(frame)
    if api == Api.FETCH and position >= 24 and len(frame) > 64:
        position += 40 * rng.randrange((len(frame) - 24) // 40)
    try:
        number = _put(rng, bent, position, letter)
    except struct.error:
        return mutate_bytes(rng, frame)
    if api == Api.FETCH and position == 12 and len(frame) >= 64 and rng.random() < 0.5:
        number = rng.choice((100, 4096, 4097))
        bent = bent[:24] + bent[24:64] * number
        struct.pack_into("<I", bent, 12, number)
        return bytes(bent), f"{number} entries"
    return bytes(bent), f"{letter} at {position} is {number}"


def mutate_schema(rng: random.Random, message: bytes) -> tuple[bytes, str]:
    """An Arrow schema message with other numbers in its flatbuffer."""
    if rng.random() < 0.1 or len(message) < 32:
        return mutate_bytes(rng, message)
    bent = bytearray(message)
    said = []
    # A precision, a unit: small numbers of two bytes, most of which are enumerations.
    enumerations = [
        at
        for at in range(8, len(bent) - 2, 2)
        if struct.unpack_from("<H", bent, at)[0] in (1, 2, 3)
    ]
    if enumerations and rng.random() < 0.5:
        at, number = (
            rng.choice(enumerations),
            rng.choice((0, 3, 4, 5, 7, 26, 27, 255, 32768, 65535)),
        )
        struct.pack_into("<H", bent, at, number)
        return bytes(bent), f"schema: H at {at} is {number}"
    for _ in range(rng.choice((1, 1, 2))):
        letter = rng.choice("BHHIIQ")
        position = rng.randrange(8, max(9, len(bent) - 8)) & -struct.calcsize(letter)
        said.append(f"{letter} at {position} is {_put(rng, bent, position, letter)}")
    return bytes(bent), f"schema: {', '.join(said)}"


_HEADER_FIELDS = (
    (4, "I"), (12, "I"), (16, "q"), (24, "I"), (28, "I"), (32, "q"), (40, "q"), (48, "q"),
    (56, "q"), (64, "i"), (68, "h"), (70, "H"), (72, "i"), (76, "I"),
    (80, "q"), (88, "q"), (96, "q"), (104, "q"), (112, "I"), (116, "I"), (120, "Q"), (128, "H"),
    (130, "H"), (132, "I"),
)  # fmt: skip


def mutate_batch(rng: random.Random, batch: bytes, seed: int, world: World) -> tuple[bytes, str]:
    """A batch that contradicts itself, with right checksums nine times of ten."""
    bent = bytearray(batch)
    if len(bent) < 8 + HEADER_BYTES:
        return mutate_bytes(rng, batch)
    metadata_size = struct.unpack_from("<I", bent, 4)[0]
    position = 8 + metadata_size - HEADER_BYTES
    if not 8 < position <= len(bent) - HEADER_BYTES:
        return mutate_bytes(rng, batch)
    choice = rng.randrange(10)
    if choice <= 3:  # its flatbuffer
        said = []
        for _ in range(rng.choice((1, 1, 3))):
            letter = rng.choice("HIQQ")
            at = rng.randrange(8, position - 8) & -struct.calcsize(letter)
            said.append(f"{letter} at {at} is {_put(rng, bent, at, letter)}")
        what = f"metadata: {', '.join(said)}"
    elif choice <= 6:
        at, letter = rng.choice(_HEADER_FIELDS)
        if at == 4 and rng.random() < 0.7:
            attributes = struct.unpack_from("<I", bent, position + 4)[0] ^ (1 << rng.randrange(7))
            struct.pack_into("<I", bent, position + 4, attributes)
            what = f"header: attributes are {attributes}"
        else:
            what = f"header: {letter} at {at} is {_put(rng, bent, position + at, letter)}"
    elif choice == 7:
        body = position + HEADER_BYTES
        if body >= len(bent) - 8:
            return mutate_bytes(rng, batch)
        at = rng.randrange(body, len(bent) - 8) & -4
        letter = rng.choice("IQ")
        what = f"body: {letter} at {at - body} is {_put(rng, bent, at, letter)}"
    elif choice == 8:
        cut = rng.choice((8, 16, 64, len(bent) - position - HEADER_BYTES))
        del bent[max(position + HEADER_BYTES, len(bent) - cut) :]
        struct.pack_into("<I", bent, position + 12, len(bent))
        what = "body cut, its length said"
    else:
        other = world.any_target(rng)
        bent = bytearray(rng.choice(other.batches))
        metadata_size = struct.unpack_from("<I", bent, 4)[0]
        position = 8 + metadata_size - HEADER_BYTES
        what = f"a batch of {other.info.name}-{other.partition}"
    if rng.random() < 0.9:
        _reseal(bent, position, seed)
    else:
        what += ", not sealed"
    return bytes(bent), f"batch: {what}"


def _reseal(batch: bytearray, position: int, seed: int) -> None:
    """Right checksums for whatever the bytes now say. The header's place is the original's: the
    length in front of it may lie.
    """
    with memoryview(batch) as view:
        extension = struct.unpack_from("<I", view, position + 112)[0]
        extension = extension if extension <= position - 8 else 0
        struct.pack_into("<I", view, position + 8, compute_body_crc(view, position, extension))
        seal_header(view, position, extension, seed)


def mutate_body(rng: random.Random, request: Request, world: World) -> str:
    """Bend what a request says."""
    body = request.body
    if not body:
        body.append(rng.choice((b"", b"{}", b"null", rng.randbytes(100))))
        return "a body where none belongs"
    if request.api == Api.PRODUCE and request.version >= 2 and len(body) > 1:
        return bend_batches(
            rng,
            body,
            request.seeds,
            world.gone_id,
            lambda r, batch, seed: mutate_batch(r, batch, seed, world),
            INTEGERS,
        )
    if request.api == Api.PRODUCE and len(body) > 1:
        if rng.random() < 0.8:
            body[1], what = mutate_batch(rng, body[1], request.seeds[0], world)
            return what
        if rng.random() < 0.2:
            body[0] = world.gone_id + body[0][16:]
            return "to a deleted topic"
    if request.api == Api.FETCH and rng.random() < 0.1:
        body[0] = body[0][:24] + world.gone_id + body[0][40:]
        return "from a deleted topic"
    if request.api in BINARY_FIELDS:
        body[0], what = mutate_fields(rng, request.api, body[0])
        return what
    body[0], what = mutate_json(rng, body[0], world)
    return what


def mutate_frames(rng: random.Random, request: Request) -> str:
    """Bend how a request is cut into frames."""
    body = request.body
    operations: list[tuple[str, Callable[[], object]]] = [
        (
            "a frame more",
            lambda: body.insert(
                rng.randrange(len(body) + 1), rng.choice((b"", b"{}", rng.randbytes(50)))
            ),
        ),
        ("many empty frames", lambda: body.extend([b""] * rng.choice((1, 2, 3, 300)))),
    ]
    if body:
        index = rng.randrange(len(body))
        operations += [
            ("a frame dropped", lambda: body.pop(index)),
            ("a frame twice", lambda: body.insert(index, body[index])),
            ("a frame emptied", lambda: body.__setitem__(index, b"")),
            ("frames backwards", body.reverse),
            ("frames merged", lambda: body.__setitem__(slice(None), [b"".join(body)])),
            (
                "a frame split",
                lambda: body.__setitem__(
                    slice(index, index + 1), [body[index][:7], body[index][7:]]
                ),
            ),
        ]
    what, operate = rng.choice(operations)
    operate()
    return what


def mutate_header(rng: random.Random, request: Request, header: bytes) -> tuple[bytes, str]:
    """Bend a request's first frame."""
    choice = rng.randrange(5)
    if choice == 0:
        return mutate_bytes(rng, header)
    bent = bytearray(header)
    position, letter = rng.choice(
        ((0, "I"), (4, "H"), (4, "H"), (6, "H"), (8, "Q"), (16, "I"), (20, "I"))
    )
    if choice == 1:
        other = rng.choice(list(Api))
        struct.pack_into("<H", bent, 4, other)
        return bytes(bent), f"api is {other.name}"
    return bytes(bent), f"header: {letter} at {position} is {_put(rng, bent, position, letter)}"


def mutate(rng: random.Random, request: Request, world: World) -> tuple[list[bytes], str]:
    """The frames of `request`, bent, and how."""
    said = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.85:
            said.append(mutate_body(rng, request, world))
        else:
            said.append(mutate_frames(rng, request))
    header = request.header()
    if rng.random() < 0.08:
        header, what = mutate_header(rng, request, header)
        said.append(what)
    return [header, *request.body], "; ".join(said)
