"""Published 64-bit words: the only way in which one process tells another anything through shared memory.

Owner: each word has exactly one writing process (named in `layout`); everyone may read it.
Invariants: a word is 8-byte aligned and stored by one machine store, so a reader sees the old value or the new one, never a mixture.

Never publish with `struct.pack_into`: CPython zeroes its target first, and another process was seen to read that false 0. An aligned store
through `memoryview.cast("Q")` showed none. x86-64's total store order carries what was written before the word; it does not carry a store
followed by a load of another word (see `doorbell`).
"""

from __future__ import annotations


class Cell:
    """One published word."""

    __slots__ = ("_index", "_words")

    def __init__(self, words: memoryview, byte_offset: int) -> None:
        """`words` is a region's memory cast to "Q"; `byte_offset` a multiple of 8."""
        if byte_offset % 8:
            raise ValueError(f"word at {byte_offset} is not aligned")
        self._words = words
        self._index = byte_offset // 8

    def load(self) -> int:
        return self._words[self._index]

    def store(self, value: int) -> None:
        self._words[self._index] = value
