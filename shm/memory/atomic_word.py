"""Atomic 64-bit words: the only way in which processes publish state to each other in shared
memory.

Every store (counters of rings, lanes and the control region, outcome words, state counts of
partitions) is one assignment to an element of `Region.words`, and every load reads one. That object
has three forms, made by `atomic_buffer_of` and `shm.tables.invariants`:

- Python: a plain `memoryview` of 64-bit words.
- Compiled: `PublishedBuffer` of the kernel. LOAD_WORD and STORE_WORD in
  `tailrace/kernel/native/shared_memory.pxi` are one `mov` each, with acquire and release.
- Instrumented: the Python form with the invariants of `shm.tables.invariants` checked at each
  store, and hooks before and after it where a process may die or others may run. Tests, simulation
  and armed crash points use it.

The hot paths of lanes, rings, tables and the fronts' walk over a ring are compiled too
(`compiled_variant_of`). Compiled code uses the same two macros at the same places, marked alike,
and only over compiled words. Over instrumented words the Python methods run, so that simulation
sees each store. `tests/shm/test_compiled_variants.py` compares the bytes that both write.

Owner: each word has exactly one writing process (named in `layout`). Every process may read it.

Invariants:
- A word is 8-byte aligned and stored by one machine store. A reader sees the old or the new value,
  never a mixture.

Order: the writer stores the bytes first, in any way (`pack_into`, slice assignment), then the word
that publishes them. The reader loads the word first, then the bytes. Both ends carry `# SYNC POINT:
name`. Words that belong together are bytes too. They are filled in an unpublished place, and one
word makes them valid: the state of a slot in `partition_table`, the place in an outcome in `ring`.
A killed writer leaves the old state or the new one. No reader waits for a dead writer, as it would
with a sequence lock left odd.

This relies on x86-64:
- Total store order: stores become visible in program order, and loads happen in program order. A
  later load of another word may overtake a store. A process that must not miss the other's word
  rings a doorbell or is rung (see `doorbell`), or puts `full_fence` between (see
  `settled_notifications`).
- An instruction with a lock prefix is a fence (Intel SDM 3A, 9.2.3.9). Taking a free lock executes
  one.
- Bulk copies: stores within one `rep movsb` have no order, but no later store passes them. Above
  some MiB glibc's memcpy uses non-temporal stores, which later stores do pass. It ends with
  `sfence` before it returns.
- Never publish with `struct.pack_into`: CPython zeroes its target first, and another process may
  read that zero. An aligned store through `memoryview.cast("Q")` is safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tailrace import kernel

T = TypeVar("T")


class AtomicBuffer(Protocol):
    """A region's memory as atomic words, by index."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    def release(self) -> None: ...


def atomic_buffer_of(memory: memoryview) -> AtomicBuffer:
    """Return the atomic words of a region's memory."""
    words: AtomicBuffer = (
        kernel.compiled.PublishedBuffer(memory) if kernel.compiled is not None else memory.cast("Q")
    )
    return words


_compiled_variants: dict[type, type] = {}


def compiled_variant_of(reference: type[T]) -> Callable[[type[T]], type[T]]:
    """Register a class as the variant of `reference` with compiled methods."""

    def note(twin: type[T]) -> type[T]:
        _compiled_variants[reference] = twin
        return twin

    return note


def new(reference: type[T], is_compiled: bool) -> T:
    """Create an object of the reference class or of its compiled variant, for use in `__new__`."""
    kind = _compiled_variants.get(reference, reference) if is_compiled else reference
    make: Any = object.__new__ if kind is reference else kind.__new__
    made: T = make(kind)
    return made


def are_compiled(words: AtomicBuffer) -> bool:
    """True if compiled code may store and load these words."""
    return kernel.compiled is not None and type(words) is kernel.compiled.PublishedBuffer


def is_compiled(part: object) -> bool:
    """True if a ring, lane or table has compiled methods."""
    return type(part) in _compiled_variants.values()


_FREE = threading.Lock()


def full_fence() -> None:
    """Make earlier stores visible to all processes before any later load. About 0.1 us."""
    with _FREE:
        pass


class AtomicCounter:
    """One atomic word."""

    __slots__ = ("_index", "_words")

    def __new__(cls, words: AtomicBuffer, byte_offset: int) -> Any:
        """Return a compiled counter for compiled words."""
        if are_compiled(words):
            return kernel.compiled.AtomicCounter(words, byte_offset)
        return super().__new__(cls)

    def __init__(self, words: AtomicBuffer, byte_offset: int) -> None:
        """`words` belongs to a region; `byte_offset` must be a multiple of 8."""
        if byte_offset % 8:
            raise ValueError(f"word at {byte_offset} is not aligned")
        self._words = words
        self._index = byte_offset // 8

    def load(self) -> int:
        return self._words[self._index]

    def store(self, value: int) -> None:
        self._words[self._index] = value
