"""Limits of a front's connections, open files and messages, from the settings and the host's
limits.

Owner: pure, except that it reads this process's descriptor limit and its open descriptors.
"""

from __future__ import annotations

import os
import resource
from typing import Any

from netfront.produce.produce_service import OVERDRAFT_BYTES
from netfront.socket.peers.connections import Limits
from tailrace.protocol.frame import JSON_MAX_BYTES

OPEN_FILES_MAX = 512
DESCRIPTORS_RESERVED = 16
UNSENT_MAX_BYTES = 128 << 20
"""Response bytes that libzmq holds for all clients together. `credit_bytes` applies if larger."""
UNSHAKEN_MAX_BYTES = 16 << 20
MEMORY_SLACK_BYTES = 128 << 20
"""Memory beside batches and responses: sessions, free buffers, and growth between two sweeps."""


def open_files_max() -> int:
    """Return the number of log files that the front keeps open, an eighth of the
    descriptor limit.
    """
    return max(8, min(OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))


def open_descriptor_count() -> int:
    """Return the number of descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def limits(settings: dict[str, Any], own_descriptors: int) -> Limits:
    """Return the limits of connections. `own_descriptors` are open beside those of connections.
    More are reserved for the log files of the front and of the reader pool.
    """
    credit_bytes = int(settings["credit_bytes"])
    unsent_max = max(UNSENT_MAX_BYTES, credit_bytes)
    free = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        - own_descriptors
        - 2 * open_files_max()
        - DESCRIPTORS_RESERVED
    )
    return Limits(
        connections_max=max(1, min(int(settings["connections.max"]), free)),
        unshaken_peer_max=message_max_bytes(settings) + (64 << 10),
        unshaken_max=UNSHAKEN_MAX_BYTES,
        untaken_max=credit_bytes + UNSENT_MAX_BYTES,
        unsent_max=unsent_max,
        memory_growth_max=2 * credit_bytes + unsent_max + MEMORY_SLACK_BYTES,
    )


def credit_budget(settings: dict[str, Any]) -> int:
    """Return the bytes that all producers together may have in flight. While memory is short it is
    0, which the ledger raises to one batch.
    """
    return 0 if settings.get("memory.is_short") else int(settings["credit_bytes"])


def message_max_bytes(settings: dict[str, Any]) -> int:
    """Return the largest frame that is accepted from the network.

    A batch too large for its lane is still received up to this size, so that it is refused with a
    code instead of a disconnect.
    """
    return max(int(settings["lane_bytes"]) // 2, JSON_MAX_BYTES) + OVERDRAFT_BYTES
