"""Descriptors of a forked process: whatever numbers they came under, they end under those that were
asked for, and nothing else is open.
"""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.hosts.programs import run_program

PROGRAM = """
import json, os, sys
from shm.runtime.descriptors import renumber

found = []
for given, wanted in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with open(read) as answer:
            found.append(json.load(answer))
        os.wait()
        continue
    above = max(*given, *wanted, read, write) + 1
    for number in (read, write):
        os.dup2(number, number + above)
    os.closerange(3, above)
    write += above
    for number in given:
        os.dup2(os.memfd_create(str(number)), number) if not os.path.exists(f"/proc/self/fd/{number}") else None
    # Each given descriptor is a file of its own, which says where it came from.
    inodes = []
    for number in given:
        fd = os.memfd_create(str(number))
        os.dup2(fd, number)
        if fd not in given:
            os.close(fd)
        inodes.append(os.fstat(number).st_ino)
    renumber([*given, write], [*wanted, write])
    after = {int(name): None for name in os.listdir("/proc/self/fd")}
    open_now = sorted(fd for fd in after if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}") and fd != write)
    arrived = [os.fstat(number).st_ino for number in wanted]
    os.write(write, json.dumps([inodes == arrived, open_now == sorted(wanted)]).encode())
    os._exit(0)
print(json.dumps(found))
"""  # noqa: E501
numbers = st.lists(st.integers(3, 14), min_size=1, max_size=8, unique=True)


@settings(max_examples=3)
@given(
    st.lists(
        st.tuples(numbers, numbers).filter(lambda pair: len(pair[0]) <= len(pair[1])),
        min_size=20,
        max_size=40,
    )
)
def test_each_descriptor_gets_its_number_and_all_others_are_closed(
    cases: list[tuple[list[int], list[int]]],
) -> None:
    """Numbers that are taken, swapped, or in a circle."""
    asked = [(given, requested[: len(given)]) for given, requested in cases]
    done = run_program(PROGRAM, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[True, True]] * len(asked)
