"""Send buffers: memory of responses, used again once it has been sent.

Owner: one transport.
"""

from __future__ import annotations

BUFFER_CLASSES = (64 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20)
POOLED_MAX_BYTES = 32 << 20
"""Bytes of free buffers in each class, at least one buffer."""


class SendBuffers:
    """Free buffers by their size."""

    def __init__(self, kept_max: int = 8) -> None:
        """`kept_max`: free buffers of each size."""
        self._kept_max = kept_max
        self._free: dict[int, list[bytearray]] = {size: [] for size in BUFFER_CLASSES}

    def take(self, size: int) -> bytearray:
        """Return a buffer of at least `size` bytes with arbitrary content."""
        for class_size in BUFFER_CLASSES:
            if size <= class_size:
                free = self._free[class_size]
                return free.pop() if free else bytearray(class_size)
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        """Keep a buffer that is not in use any more, unless enough of its size are free."""
        free = self._free.get(len(buffer))
        if free is not None and len(free) < max(
            1, min(self._kept_max, POOLED_MAX_BYTES // len(buffer))
        ):
            free.append(buffer)
