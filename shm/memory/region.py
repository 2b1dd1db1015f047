"""Shared-memory regions (POSIX): created and removed by the supervisor, attached by all other
processes.

Owner: the supervisor creates and unlinks. Attaching never unlinks, and no resource tracker is
involved that would.

Invariants:
- A region's pages are allocated before it is mapped (`posix_fallocate`). Otherwise a page that
  tmpfs cannot supply kills the process with SIGBUS.
- A region is used only if magic, layout version, kind, size and instance match.

Layout: `REGION_HEADER` in `layout`.

Crash: a region outlives every process. The manifest in the data directory lists the regions to
clean up (see `appliance.data.data_dir_lock`).
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import NamedTuple

import posix_ipc

from shm.memory.atomic_word import AtomicBuffer, atomic_buffer_of
from shm.memory.layout import LAYOUT_VERSION, REGION_HEADER, REGION_MAGIC, RegionKind

SHM_DIRECTORY = "/dev/shm"


class RegionError(RuntimeError):
    """A region cannot be created or is invalid. The message says what to do."""


class RegionMissingError(RegionError):
    """The region does not exist."""


class RegionForeignError(RegionError):
    """The region belongs to another user."""


class RegionVersionError(RegionError):
    """The region was made by another version of Tailrace."""


class RegionHeader(NamedTuple):
    kind: RegionKind
    boot_id: bytes
    instance: bytes
    generation: int
    size: int
    first: int
    """Parameters of the layout. A region can be read without the current configuration."""
    second: int
    directory: bytes = bytes(16)
    """Identity of the data directory of a ring or table, so that its content can
    be drained without the configuration.
    """


def boot_id() -> bytes:
    """Return the boot id, 16 bytes that change with each boot.

    Shared memory does not survive a boot.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))


class Region:
    """A mapped region: `.bytes` for bulk data, `.words` for `AtomicCounter`s."""

    def __init__(self, name: str, memory: mmap.mmap, header: RegionHeader) -> None:
        self.name = name
        self.header = header
        self._memory = memory
        self.bytes = memoryview(memory)
        self.words: AtomicBuffer = atomic_buffer_of(self.bytes)

    @classmethod
    def create(
        cls,
        name: str,
        kind: RegionKind,
        size: int,
        instance: bytes,
        generation: int,
        first: int,
        second: int = 0,
        directory: bytes = bytes(16),
    ) -> Region:
        """Create a region of zeroes. Raises RegionError if the name is taken, /dev/shm is full, or
        the host refuses.
        """
        memory = _created(name, size)
        header = RegionHeader(kind, boot_id(), instance, generation, size, first, second, directory)
        region = cls(name, memory, header)
        REGION_HEADER.pack_into(
            region.bytes,
            0,
            0,
            LAYOUT_VERSION,
            kind,
            header.boot_id,
            instance,
            generation,
            size,
            first,
            second,
            directory,
        )
        region.words[0] = REGION_MAGIC  # last: a region without it is unfinished
        return region

    @classmethod
    def attach(cls, name: str, kind: RegionKind, instance: bytes | None = None) -> Region:
        """Map an existing region.

        Raises RegionMissingError, RegionVersionError, RegionError, and OSError when descriptors or
        memory are short.
        """
        try:
            shared = posix_ipc.SharedMemory(name)
        except posix_ipc.ExistentialError:
            raise RegionMissingError(
                f"shared memory {name} does not exist; is the appliance running?"
            ) from None
        except posix_ipc.PermissionsError:
            raise RegionForeignError(
                f"shared memory {name} belongs to another user: run as that user, or remove "
                f"/dev/shm{name}, which discards its content"
            ) from None
        try:
            actual = os.fstat(shared.fd).st_size
            if actual < REGION_HEADER.size:
                raise RegionError(f"shared memory {name} has {actual} bytes, too few for a header")
            memory = mmap.mmap(shared.fd, actual)
        finally:
            os.close(shared.fd)
        magic, version, found_kind, boot, owner, generation, size, first, second, directory = (
            REGION_HEADER.unpack_from(memory, 0)
        )
        if magic != REGION_MAGIC or size != actual or found_kind != kind:
            raise RegionError(f"shared memory {name} is not a finished {kind.name.lower()} region")
        if version != LAYOUT_VERSION:
            raise RegionVersionError(
                f"shared memory {name} has layout {version}; this version needs {LAYOUT_VERSION}"
            )
        if boot != boot_id() or (instance is not None and owner != instance):
            raise RegionError(f"shared memory {name} belongs to another instance")
        return cls(
            name,
            memory,
            RegionHeader(kind, boot, owner, generation, size, first, second, directory),
        )

    def close(self) -> None:
        """Unmap the region. Views held elsewhere keep the mapping until they are released."""
        self.words.release()
        self.bytes.release()
        try:
            self._memory.close()
        except BufferError:
            pass  # a ring or lane still holds a view: the mapping ends with it


def remove(name: str) -> bool:
    """Unlink a region. Return False if it does not exist or belongs to another user."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError):
        return False
    return True


def names_with(prefix: str) -> list[str]:
    """Return the names of existing regions that begin with `prefix`."""
    return sorted(
        "/" + entry for entry in os.listdir(SHM_DIRECTORY) if ("/" + entry).startswith(prefix)
    )


def owner_of(name: str) -> bytes | None:
    """Return the instance in a region's header: zeroes while unfinished, None if
    it cannot be read.
    """
    try:
        fd = os.open(
            SHM_DIRECTORY + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return None
    try:
        head = os.pread(fd, REGION_HEADER.size, 0)
    except OSError:  # a directory
        return None
    finally:
        os.close(fd)
    return bytes(16) if len(head) < REGION_HEADER.size else bytes(REGION_HEADER.unpack(head)[4])


def _created(name: str, size: int) -> mmap.mmap:
    """Shared memory of zeroes under a new name. Raises RegionError."""
    try:
        shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.ExistentialError:
        raise RegionError(
            f"shared memory {name} exists already: another appliance uses it. If none does, "
            f"remove /dev/shm{name}"
        ) from None
    except posix_ipc.PermissionsError:
        raise RegionError(
            f"cannot create shared memory {name}: this user may not write to /dev/shm. Run "
            "`tailrace doctor`"
        ) from None
    except OSError as error:
        raise RegionError(f"cannot create shared memory {name}: {error.strerror}") from None
    try:
        os.posix_fallocate(shared.fd, 0, size)
        return mmap.mmap(shared.fd, size)
    except OSError as error:
        posix_ipc.unlink_shared_memory(name)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise RegionError(
                f"/dev/shm has no room for {size >> 20} MiB of {name.rsplit('-', 1)[-1]}: "
                "enlarge it (mount -o remount,size=... /dev/shm) "
                "or lower ring_bytes and lane_bytes"
            ) from None
        raise RegionError(
            f"cannot create shared memory {name} of {size >> 20} MiB: {error.strerror}"
        ) from None
    finally:
        os.close(shared.fd)
