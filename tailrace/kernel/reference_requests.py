"""What a front reads of a PRODUCE request, in Python: there is no quick way, each request takes the front's own (`netfront.front.Front._handle`).

So the truth that the compiled `read_produce` is held against are the decoders of `tailrace.protocol`, with their errors
(`tests/tailrace/test_read_produce.py`).
"""

from __future__ import annotations

from typing import Any

from tailrace.formats.checksum import Readable

PlainProduce = tuple[int, int, int, list[tuple[bytes, int, int, int]], list[Readable], int]
"""(correlation id, acks, timeout in ms, entries as in `requests.ProduceBatches`, batches as of `requests.cut_batches`, bytes of the batches' frames)."""


def read_produce(frames: list[Any]) -> PlainProduce | None:
    """A PRODUCE request of version 2 that is well formed, in the frames of a message (those of batches may be views). None: it is
    another request, or it is for the decoders to say what is wrong with it.
    """
    return None
