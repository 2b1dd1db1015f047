"""Converted memory: the bytes of batches that were converted and are not yet with the workers.

Compressed records unpack to many times their bytes, and a request names many partitions.

Owner: one gateway.

Invariants:
- A request holds at most REQUEST_BYTES, and one partition more. Then it sends them.
- All requests hold at most GATEWAY_BYTES, and one partition more each. The others wait, with none.
"""

from __future__ import annotations

from netfront.kafka.apis.call import Services

REQUEST_BYTES = 32 << 20
GATEWAY_BYTES = 128 << 20
_NAME = "converted"


class ConvertedMemory:
    """The share of one request."""

    def __init__(self, services: Services) -> None:
        self._total: list[int] = services.state.setdefault(_NAME, [0])
        self.byte_count = 0

    @property
    def is_full(self) -> bool:
        """True if this request must convert nothing more now."""
        return self.byte_count >= REQUEST_BYTES or self._total[0] >= GATEWAY_BYTES

    def add(self, byte_count: int) -> None:
        """Note converted batches."""
        self.byte_count += byte_count
        self._total[0] += byte_count

    def give_back(self) -> None:
        """Note that the workers have them."""
        self._total[0] -= self.byte_count
        self.byte_count = 0
