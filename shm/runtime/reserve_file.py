"""Reserve file of a data directory: room on a full disk for the appliance's own book-keeping, which
is log start offsets, checkpoints, the catalog and the groups' database.

The flusher makes it (`workers.segment.disk_space`), also again when there is space. Order in which
room is given up:

1. Below the reserve of free space producers are refused. The file stays whole.
2. Other programs may fill the disk to its last byte. A write of book-keeping that finds no room
   then frees a quarter of what is left of the file, so that no program can take all of it at once.
3. A start on a full disk frees all of it (`appliance.data.data_dir_lock`).

Owner: any process of the appliance may shorten the file, the flusher alone enlarges it.
Invariants: something is left for a start while pieces are given up at run time.
Crash: nothing depends on the file's content or length.
"""

from __future__ import annotations

import logging

from tailrace.format.directory.data_dir import RESERVE_FILE
from tailrace.format.directory.files import DiskFiles, Files

logger = logging.getLogger(__name__)

SCARCE_BYTES = 256 << 10
"""Free space below which a commit of a database asks for a piece first."""
KEPT_BYTES = 64 << 10
"""Length below which the file is left to a start."""
_PAGE_BYTES = 4096
_DISK = DiskFiles()


def make_room(data_dir: str, needed_bytes: int = SCARCE_BYTES) -> int:
    """Give up a piece of the reserve file if the disk has fewer than `needed_bytes` free. Return
    the bytes given up. A disk that fails gives up nothing.
    """
    try:
        if _DISK.free_bytes(data_dir) >= needed_bytes:
            return 0
        return give_up_piece(_DISK, data_dir)
    except OSError as error:
        logger.warning("reserve_not_given_up path=%s error=%r", data_dir, str(error))
        return 0


def make_room_for(files: Files, data_dir: str, needed_bytes: int) -> bool:
    """Give up pieces until the disk has `needed_bytes` free. Return False, with nothing given up,
    if all of them are too few. Raises OSError.
    """
    path = f"{data_dir}/{RESERVE_FILE}"
    size = 0
    if files.exists(path):
        fd = files.open_for_read(path)
        size = files.size(fd)
        files.close(fd)
    if files.free_bytes(data_dir) + max(0, size - KEPT_BYTES) < needed_bytes:
        return False
    while files.free_bytes(data_dir) < needed_bytes:
        if not give_up_piece(files, data_dir):
            return False
    return True


def give_up_piece(files: Files, data_dir: str) -> int:
    """Free a quarter of what is left of the reserve file; return its bytes, 0 if there is none
    left to give. Raises OSError.
    """
    path = f"{data_dir}/{RESERVE_FILE}"
    if not files.exists(path):
        return 0
    fd = files.open_for_write(path)
    try:
        size = files.size(fd)
        if size < KEPT_BYTES:
            return 0
        left = size * 3 // 4 // _PAGE_BYTES * _PAGE_BYTES
        files.truncate(fd, left)
        files.sync_data(fd)  # ext4 frees blocks with the commit of its journal
    finally:
        files.close(fd)
    logger.warning(
        "reserve_given_up path=%s bytes=%d left_bytes=%d advice='the disk is full: free some space "
        "on it. The reserve is made again then'",
        data_dir, size - left, left,
    )  # fmt: skip
    return size - left
