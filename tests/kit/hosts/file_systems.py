"""File systems of the test's own, small enough to be filled. Mounting them needs root."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_file_system(directory: pathlib.Path, size_mib: int) -> Iterator[pathlib.Path]:
    """A tmpfs at `directory`/disk, which only its owner may enter; unmounted at the end."""
    path = directory / "disk"
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0700", "tmpfs", str(path)],
        check=True,
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextmanager
def ext4_image(directory: pathlib.Path, size_mib: int) -> Iterator[pathlib.Path]:
    """An ext4 in a file, at `directory`/disk, without blocks reserved for root; unmounted at the
    end.
    """
    image, path = directory / "image", directory / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run(
        ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", str(image)], check=True
    )
    subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill_to_the_byte(path: pathlib.Path) -> None:
    """Write the file `path` until its file system takes not one byte more."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            piece = bytes(size)
            try:
                while True:
                    file.write(piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        os.fsync(file.fileno())


@contextmanager
def read_only(directory: pathlib.Path) -> Iterator[None]:
    """Mount it upon itself, without the right to write."""
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@contextmanager
def failing_disk(directory: pathlib.Path, good_mib: int) -> Iterator[pathlib.Path]:
    """An ext4 whose device has no more than so many good MiB: writes of further ones are EIO."""
    with small_file_system(directory, good_mib) as backing:
        image, path = backing / "image", directory / "failing"
        path.mkdir()
        with image.open("wb") as file:
            file.truncate(256 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(image), str(path)], check=True)
        try:
            yield path
        finally:
            subprocess.run(["umount", str(path)], check=True)
