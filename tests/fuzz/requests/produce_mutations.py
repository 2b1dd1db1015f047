"""PRODUCE requests of many batches, bent: a batch, what its entry says of it, the count, the cuts
between frames.

Owner: pure, every choice comes from the random source that is given.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from itertools import pairwise

from tailrace.protocol import produce_messages
from tailrace.protocol.frame import PRODUCE_FRAMES_MAX, WireError

HEAD_BYTES, ENTRY_BYTES = 16, 32
HEAD_FIELDS = ((0, "i"), (4, "I"), (8, "I"), (12, "I"))
ENTRY_FIELDS = ((16, "i"), (20, "I"), (24, "I"), (24, "I"), (28, "I"))
"""(position, struct letter); of an entry, in it."""
Bend = Callable[[random.Random, bytes, int], tuple[bytes, str]]


def framed(
    rng: random.Random, head: produce_messages.ProduceBatches, batches: list[bytes]
) -> list[bytes]:
    """The frames behind the header, cut between batches at random."""
    most = min(len(batches), PRODUCE_FRAMES_MAX) - 1
    cuts = [0, *sorted(rng.sample(range(1, len(batches)), rng.randrange(most + 1))), len(batches)]
    return [
        produce_messages.encode_produce_batches(head),
        *(b"".join(batches[a:b]) for a, b in pairwise(cuts)),
    ]


def bend_batches(
    rng: random.Random,
    body: list[bytes],
    seeds: list[int],
    gone_id: bytes,
    bend: Bend,
    odd: tuple[int, ...],
) -> str:
    """Bend one thing in place. `bend`: what is done to a batch with a seed; `odd`: numbers for
    fields.
    """
    try:
        head = produce_messages.decode_produce_batches(body[0], version=3)
        batches = [bytes(batch) for batch in produce_messages.cut_batches(head.entries, body[1:])]
    except WireError:  # bent before
        body[0] = body[0][: rng.randrange(len(body[0]) + 1)]
        return "entries cut"
    index = rng.randrange(len(batches))
    choice = rng.randrange(10)
    entries = list(head.entries)
    if choice <= 4:
        batches[index], what = bend(rng, batches[index], seeds[index] if index < len(seeds) else 0)
        if rng.random() < 0.85:
            entries[index] = (*entries[index][:3], len(batches[index]))
        else:
            what += ", its length not said"
    elif choice == 5:
        entries[index], what = (gone_id, *entries[index][1:]), "to a deleted topic"
    elif choice == 6:
        count = rng.choice((2, 100, 4096, 4097))
        entries, batches, what = (
            [entries[index]] * count,
            [batches[index][:200]] * count,
            f"{count} entries",
        )
        entries = [(*entry[:3], len(batches[0])) for entry in entries]
    elif choice == 7:
        other = rng.randrange(len(batches))
        batches[index], batches[other] = batches[other], batches[index]
        what = f"batches {index} and {other} in each other's place"
    else:
        return _bend_field(rng, body, index, odd)
    body[:] = framed(rng, head._replace(entries=entries), batches)
    return f"batch {index}: {what}"


def _bend_field(rng: random.Random, body: list[bytes], index: int, odd: tuple[int, ...]) -> str:
    is_of_entry = rng.random() < 0.7
    position, letter = rng.choice(ENTRY_FIELDS if is_of_entry else HEAD_FIELDS)
    position += HEAD_BYTES + index * ENTRY_BYTES if is_of_entry else 0
    number = rng.choice(odd) & 0xFFFFFFFF
    bent = bytearray(body[0])
    struct.pack_into("<I", bent, position, number)
    body[0] = bytes(bent)
    return f"{letter} at {position} is {number}"
