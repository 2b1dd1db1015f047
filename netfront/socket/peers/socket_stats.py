"""Kernel statistics of a connection's socket and of this process's memory.

The descriptors are libzmq's. Nothing here reads, writes or closes them. `shut` calls `shutdown(2)`:
libzmq reads the end of the stream, frees its buffers and closes the descriptor itself.
`shrink_local_send_buffer` limits the kernel's send buffer.

Owner: one front.
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

from tailrace.client.connections.runtime import NEAR_SEND_BUFFER_BYTES

_TCP_INFO_BYTES = 136
_RECEIVED_AT = 128
"""Offset of `tcpi_bytes_received` in `struct tcp_info` (linux/tcp.h), which only grows at its end.
"""
_RESET = struct.pack("ii", 1, 0)
"""`struct linger`: on, 0 seconds."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Constants of malloc.h."""
KEPT_BYTES = 16 << 20
MAPPED_APART_BYTES = 32 << 20
"""Allocations of this size get their own mapping and are returned at once. glibc's maximum."""
_ADDRESS_BYTES = 128
"""Size of `struct sockaddr_storage`."""
_FAMILIES: dict[int, slice] = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Position of the address in a `sockaddr` of each family."""


class SocketStats(Protocol):
    """Kernel queries that connection accounting needs."""

    def inode(self, fd: int) -> int: ...
    def received_bytes(self, fd: int) -> int: ...
    def waiting_bytes(self, fd: int) -> int: ...
    def shrink_local_send_buffer(self, fd: int) -> bool: ...
    def shut(self, fd: int, inode: int) -> bool: ...
    def private_bytes(self) -> int: ...
    def trim_memory(self) -> None: ...


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory, up to KEPT_BYTES at the end of each heap.

    By default it returns the memory of large messages, and each page of the next one is a page
    fault. Those faults were a third of the cost of a batch of 1 MiB.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_APART_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


class KernelSocketStats:
    """Socket statistics from the Linux kernel."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
        self._length = ctypes.c_uint(_TCP_INFO_BYTES)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._statm)
        """Descriptor for `shut`, which is needed most when no descriptor is free."""

    def inode(self, fd: int) -> int:
        """Return the inode number of the socket behind `fd`, 0 if there is none.

        It detects a reused descriptor.
        """
        try:
            return os.fstat(fd).st_ino
        except OSError:
            return 0

    def received_bytes(self, fd: int) -> int:
        """Return the bytes that the peer has sent in all, or -1 for Unix sockets
        and closed descriptors.
        """
        self._length.value = _TCP_INFO_BYTES
        failed = self._libc.getsockopt(
            fd, socket.IPPROTO_TCP, socket.TCP_INFO, self._info, ctypes.byref(self._length)
        )
        if failed or self._length.value < _TCP_INFO_BYTES:
            return -1
        return int(struct.unpack_from("<Q", self._info, _RECEIVED_AT)[0])

    def waiting_bytes(self, fd: int) -> int:
        """Return how many received bytes libzmq has not read from the kernel."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])
        except OSError:
            return 0

    def shrink_local_send_buffer(self, fd: int) -> bool:
        """Limit the send buffer of a TCP connection within this host to NEAR_SEND_BUFFER_BYTES.

        Return True if the connection is local. Others keep the kernel's buffer, which bounds the
        bytes in flight over a distance.
        """
        here, there = (
            self._address(fd, self._libc.getsockname),
            self._address(fd, self._libc.getpeername),
        )
        if here is None or here != there:
            return False
        size = ctypes.c_int(NEAR_SEND_BUFFER_BYTES)
        return not self._libc.setsockopt(
            fd, socket.SOL_SOCKET, socket.SO_SNDBUF, ctypes.byref(size), ctypes.sizeof(size)
        )

    @staticmethod
    def _address(fd: int, ask: Callable[..., int]) -> bytes | None:
        """Return one end's address without its port, or None if there is none."""
        address = ctypes.create_string_buffer(_ADDRESS_BYTES)
        if ask(fd, address, ctypes.byref(ctypes.c_uint(_ADDRESS_BYTES))):
            return None
        place = _FAMILIES.get(int.from_bytes(address.raw[:2], sys.byteorder))
        return None if place is None else address.raw[place]

    def shut(self, fd: int, inode: int) -> bool:
        """Shut down the connection behind `fd` if its inode is still `inode`."""
        # A duplicate keeps its connection even if libzmq closes `fd` and the kernel reuses the
        # number. It replaces an existing descriptor, because connections are closed when none is
        # free.
        ours = self._spare
        try:
            os.dup2(fd, ours, inheritable=False)
        except OSError:
            return False
        try:
            if os.fstat(ours).st_ino != inode:
                return False
            # Reset instead of an orderly close: bytes in flight are dropped and the kernel keeps no
            # state.
            self._libc.setsockopt(ours, socket.SOL_SOCKET, socket.SO_LINGER, _RESET, len(_RESET))
            return not self._libc.shutdown(ours, socket.SHUT_RDWR)
        finally:
            os.dup2(self._statm, ours, inheritable=False)

    def close(self) -> None:
        """Close its own descriptors."""
        os.close(self._spare)
        os.close(self._statm)

    def private_bytes(self) -> int:
        """Return the process's resident memory without shared pages, in bytes."""
        _, resident, shared = os.pread(self._statm, 100, 0).split()[:3]
        return (int(resident) - int(shared)) * _PAGE_BYTES

    def trim_memory(self) -> None:
        """Make the allocator return free memory. Otherwise libzmq's share of a closed peer stays
        with the process.
        """
        self._libc.malloc_trim(0)
