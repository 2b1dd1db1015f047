"""What the kernel knows of a connection and of this process, by descriptor; the descriptors are libzmq's.

Owner: one front. Nothing here reads, writes or closes libzmq's descriptors: `shut` is `shutdown(2)`, which libzmq meets as the end of the stream, and
then it frees what it had gathered and closes the descriptor itself; `hold_little_if_near` says how much the kernel takes of what is written.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable
from typing import Protocol

from tailrace.environment import NEAR_SEND_BUFFER_BYTES

_TCP_INFO_BYTES = 136
_RECEIVED_AT = 128
"""Of `tcpi_bytes_received` in `struct tcp_info` (linux/tcp.h), which only ever grows at its end."""
_RESET = struct.pack("ii", 1, 0)
"""`struct linger`: on, 0 seconds."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""
KEPT_BYTES = 16 << 20
MAPPED_APART_BYTES = 32 << 20
"""What is so large has a mapping of its own and is given back at once: the largest that glibc takes."""
_ADDRESS_BYTES = 128
"""Of `struct sockaddr_storage`."""
_FAMILIES: dict[int, slice] = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Where a `sockaddr` of each has its address."""


class PeerSockets(Protocol):
    """What keeping the books of connections needs of the kernel."""

    def inode(self, fd: int) -> int: ...
    def received_bytes(self, fd: int) -> int: ...
    def waiting_bytes(self, fd: int) -> int: ...
    def hold_little_if_near(self, fd: int) -> bool: ...
    def shut(self, fd: int, inode: int) -> bool: ...
    def private_bytes(self) -> int: ...
    def give_back_memory(self) -> None: ...


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, up to KEPT_BYTES at the end of each of its heaps, for the messages that come next. By itself it gives back what
    large messages took, and each page of the next one is a page fault: 180 for a batch of 1 MiB, a third of what the batch cost.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_APART_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


class KernelPeerSockets:
    """The real thing."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
        self._length = ctypes.c_uint(_TCP_INFO_BYTES)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._statm)
        """For `shut`, which is needed most when no descriptor is left."""

    def inode(self, fd: int) -> int:
        """The number of the socket behind `fd`: it tells whether a descriptor has come to mean another. 0: there is none."""
        try:
            return os.fstat(fd).st_ino
        except OSError:
            return 0

    def received_bytes(self, fd: int) -> int:
        """How many bytes the peer has sent in all; -1 where the kernel does not count them (Unix sockets), or the descriptor is gone."""
        self._length.value = _TCP_INFO_BYTES
        failed = self._libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, self._info, ctypes.byref(self._length))
        if failed or self._length.value < _TCP_INFO_BYTES:
            return -1
        return int(struct.unpack_from("<Q", self._info, _RECEIVED_AT)[0])

    def waiting_bytes(self, fd: int) -> int:
        """How many of these the kernel holds still: libzmq has not read them."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])
        except OSError:
            return 0

    def hold_little_if_near(self, fd: int) -> bool:
        """Have the kernel take no more than NEAR_SEND_BUFFER_BYTES at a time of what is sent over a TCP connection of this host; returns whether it is one.
        Others keep what the kernel chooses: over a distance, what is on its way is bounded by this.
        """
        here, there = self._address(fd, self._libc.getsockname), self._address(fd, self._libc.getpeername)
        if here is None or here != there:
            return False
        size = ctypes.c_int(NEAR_SEND_BUFFER_BYTES)
        return not self._libc.setsockopt(fd, socket.SOL_SOCKET, socket.SO_SNDBUF, ctypes.byref(size), ctypes.sizeof(size))

    @staticmethod
    def _address(fd: int, ask: Callable[..., int]) -> bytes | None:
        """One end of a connection, without its port; None: it has none, or is gone."""
        address = ctypes.create_string_buffer(_ADDRESS_BYTES)
        if ask(fd, address, ctypes.byref(ctypes.c_uint(_ADDRESS_BYTES))):
            return None
        place = _FAMILIES.get(int.from_bytes(address.raw[:2], sys.byteorder))
        return None if place is None else address.raw[place]

    def shut(self, fd: int, inode: int) -> bool:
        """End the connection behind `fd` if it still is the one that `inode` tells."""
        # A duplicate keeps meaning one connection while libzmq may close `fd` at any time and the kernel give its number to another. It takes the place of
        # a descriptor that is there already: connections are closed because there is no other.
        ours = self._spare
        try:
            os.dup2(fd, ours, inheritable=False)
        except OSError:
            return False
        try:
            if os.fstat(ours).st_ino != inode:
                return False
            # Reset rather than closed in order: what the peer has under way is not waited for, and no state of it stays in the kernel.
            self._libc.setsockopt(ours, socket.SOL_SOCKET, socket.SO_LINGER, _RESET, len(_RESET))
            return not self._libc.shutdown(ours, socket.SHUT_RDWR)
        finally:
            os.dup2(self._statm, ours, inheritable=False)

    def close(self) -> None:
        """Nothing more is asked: give back the descriptors that are its own."""
        os.close(self._spare)
        os.close(self._statm)

    def private_bytes(self) -> int:
        """The process's resident memory without what it shares with others."""
        _, resident, shared = os.pread(self._statm, 100, 0).split()[:3]
        return (int(resident) - int(shared)) * _PAGE_BYTES

    def give_back_memory(self) -> None:
        """Have the allocator return what is free: after a large peer was closed, libzmq's share stays with the process otherwise."""
        self._libc.malloc_trim(0)
