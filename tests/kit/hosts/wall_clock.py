"""A wall clock of an appliance's own, which a test may set: its processes read CLOCK_REALTIME with
an offset that lies in a file.

A library that is loaded before libc answers `clock_gettime`; it is compiled once a run. Other
clocks are the host's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import struct
import subprocess
from collections.abc import Iterator

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile long *ahead_s;

__attribute__((constructor)) static void attach(void) {
    int fd = open(getenv("FUZZED_CLOCK"), O_RDONLY);
    if (fd >= 0) {
        void *page = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
        ahead_s = page == MAP_FAILED ? 0 : page;
        close(fd);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long result = syscall(SYS_clock_gettime, clock, now);
    if (!result && clock == CLOCK_REALTIME && ahead_s) now->tv_sec += *ahead_s;
    return result;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


class WallClock:
    """The offset of the processes that were started within `installed`."""

    def __init__(self, directory: pathlib.Path) -> None:
        """Compiles the library. Raises CalledProcessError, FileNotFoundError without a compiler."""
        self._library = directory / "clock.so"
        self._offset = directory / "ahead_s"
        self._offset.write_bytes(bytes(8))
        source = directory / "clock.c"
        source.write_text(SOURCE)
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source)],
            check=True,
            capture_output=True,
        )
        with self._offset.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Processes that are started within the block have this clock."""
        os.environ.update(LD_PRELOAD=str(self._library), FUZZED_CLOCK=str(self._offset))
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"], os.environ["FUZZED_CLOCK"]

    def jump(self, seconds: int) -> None:
        """The clock is so far ahead of the host's from now on; negative: behind."""
        self._page[:8] = struct.pack("<q", seconds)
