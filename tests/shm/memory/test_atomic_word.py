"""The fence between a store and a load of another word, which nothing else orders."""

from __future__ import annotations

import mmap
import os

from shm.memory.atomic_word import full_fence

ROUNDS = 60_000


def test_of_two_that_store_fence_and_load_one_sees_what_the_other_stored() -> None:
    """Dekker's litmus. With a function that does nothing in the fence's place both missed in 25 of
    60,000 rounds, on two cores that other work used too.
    """
    words, missed = memoryview(mmap.mmap(-1, 8192)).cast("Q"), memoryview(mmap.mmap(-1, 2 * ROUNDS))
    child = os.fork()
    try:
        if child:
            _rounds(words, 0, 64, missed[:ROUNDS])
        else:
            _rounds(words, 64, 0, missed[ROUNDS:])
    finally:
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    assert words[0] == words[64] == ROUNDS - 1, "both went through all rounds"
    assert [
        number for number in range(1, ROUNDS) if missed[number] and missed[ROUNDS + number]
    ] == []
    assert any(missed), "one came before the other at least sometimes"


def _rounds(words: memoryview[int], mine: int, other: int, missed: memoryview) -> None:
    """Plain words and a bare loop: what a method call does between store and load hides what is
    tested.
    """
    my_gate, other_gate = mine + 128, other + 128
    for number in range(1, ROUNDS):
        words[my_gate] = number
        spins = 0
        while words[other_gate] < number:
            spins += 1
            if spins > 2000:
                os.sched_yield()
        words[mine] = number
        full_fence()
        missed[number] = words[other] < number
