"""Published 64-bit words: the only way in which one process tells another anything through shared memory.

Every such store (cells of rings, lanes and the control region, outcome words, a partition's count of states) is one assignment to an element of
`Region.words`, and every such load reads one. That object is the primitive, and there are three of it, made in `words_of` and in `shm.invariants`:

    in Python       a plain `memoryview` of 64-bit words
    compiled        `PublishedWords` of the kernel: LOAD_WORD and STORE_WORD in `tailrace/kernel/_shared_memory.pxi`, one `mov` each with acquire and release
    instrumented    where tests and simulation make a region, or a crash point is armed: Python's, with the invariants of `shm.invariants` checked at each
                    store, and with a process that may die, or others that may run, before and after it

What is hot in lanes, rings, tables and in the fronts' walk over a ring is compiled too (`is_twin_of`). Compiled code stores and loads by the same two macros
at the same places, marked alike, and runs only over a region whose words are compiled: over instrumented words the methods in Python run, so simulation sees
each store. What the two write is held against each other byte for byte (`tests/shm/test_twins.py`).

Owner: each word has exactly one writing process (named in `layout`); everyone may read it.
Invariants: a word is 8-byte aligned and stored by one machine store, so a reader sees the old value or the new one, never a mixture.

Order, of the writer: bytes first, in any way (`pack_into`, slice assignment), then the word that says they are there. Of the reader: the word first, then
the bytes. Both ends carry `# SYNC POINT: name`. Words that belong together are no exception: they are bytes, filled where nobody looks yet and made
valid by one word (the state of a slot in `partition_table`, the place in an outcome in `ring`). So a writer that is killed leaves the old state
or the new one, and no reader waits for one that is dead, as it would with a sequence lock left odd.

Why this holds on x86-64, and only there is it relied on:
- Stores become visible in program order, and loads are made in it (total store order). A store may be overtaken by a later load of another word: whoever
  must not miss the other's word rings a bell or is rung by one (see `doorbell`), or puts `full_fence` between (see `settled_news`).
- A fence is any instruction with a lock prefix (Intel SDM 3A, 9.2.3.9: loads and stores are not reordered with it). Taking a lock that is free is one: nothing
  else could take it for one thread only.
- Bulk copies are no exception although their stores may be: within one `rep movsb` they have no order, but no later store passes them; above some MiB
  glibc's memcpy uses non-temporal stores, which later stores do pass, and ends with `sfence` before it returns, which is relied on here.
- Never publish with `struct.pack_into`: CPython zeroes its target first, and another process was seen to read that false 0. An aligned store
  through `memoryview.cast("Q")` showed none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tailrace import kernel

T = TypeVar("T")


class Words(Protocol):
    """A region's memory as published words, by index."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    def release(self) -> None: ...


def words_of(memory: memoryview) -> Words:
    """The published words of a region's memory."""
    words: Words = kernel.compiled.PublishedWords(memory) if kernel.compiled is not None else memory.cast("Q")
    return words


_twins: dict[type, type] = {}


def is_twin_of(reference: type[T]) -> Callable[[type[T]], type[T]]:
    """Of a class that is a `reference` whose hot methods are compiled."""

    def note(twin: type[T]) -> type[T]:
        _twins[reference] = twin
        return twin

    return note


def new(reference: type[T], is_compiled: bool) -> T:
    """For `__new__`: an object of the class that is asked for, or of its twin with compiled methods."""
    kind = _twins.get(reference, reference) if is_compiled else reference
    make: Any = object.__new__ if kind is reference else kind.__new__
    made: T = make(kind)
    return made


def are_compiled(words: Words) -> bool:
    """Whether compiled code may store and load these words."""
    return kernel.compiled is not None and type(words) is kernel.compiled.PublishedWords


def is_compiled(part: object) -> bool:
    """Whether a part of shared memory (a ring, a lane, a table) has compiled methods."""
    return type(part) in _twins.values()


_FREE = threading.Lock()


def full_fence() -> None:
    """Whatever was stored before is visible to all before anything behind this is loaded. About 0.1 us."""
    with _FREE:
        pass


class Cell:
    """One published word."""

    __slots__ = ("_index", "_words")

    def __new__(cls, words: Words, byte_offset: int) -> Any:
        """A compiled one for compiled words."""
        if are_compiled(words):
            return kernel.compiled.Cell(words, byte_offset)
        return super().__new__(cls)

    def __init__(self, words: Words, byte_offset: int) -> None:
        """`words` is a region's; `byte_offset` a multiple of 8."""
        if byte_offset % 8:
            raise ValueError(f"word at {byte_offset} is not aligned")
        self._words = words
        self._index = byte_offset // 8

    def load(self) -> int:
        return self._words[self._index]

    def store(self, value: int) -> None:
        self._words[self._index] = value
