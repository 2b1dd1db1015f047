"""What the connections of a front, its files and its messages may cost, from the settings and the host's limits.

Owner: pure, but for what it reads of this process.
"""

from __future__ import annotations

import os
import resource
from typing import Any

from netfront.peers import Limits
from netfront.produces import OVERDRAFT_BYTES
from tailrace.protocol.wire import JSON_MAX_BYTES

OPEN_FILES_MAX = 512
DESCRIPTORS_RESERVED = 16
UNSENT_MAX_BYTES = 128 << 20
"""Of answers that libzmq holds for all clients together; `credit_bytes` when that is more."""
UNSHAKEN_MAX_BYTES = 16 << 20
MEMORY_SLACK_BYTES = 128 << 20
"""Beside batches and answers: sessions, buffers that are free, and what lies between two looks."""


def open_files_max() -> int:
    """How many files of the log the front keeps open: a small part of what it may."""
    return max(8, min(OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))


def limits(settings: dict[str, Any]) -> Limits:
    """What connections may cost; descriptors are left for files of the log, and for those that the reader pool has in hand."""
    credit_bytes = int(settings["credit_bytes"])
    unsent_max = max(UNSENT_MAX_BYTES, credit_bytes)
    free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) - 2 * open_files_max() - DESCRIPTORS_RESERVED
    return Limits(
        connections_max=max(1, min(int(settings["connections.max"]), free)),
        unshaken_peer_max=message_max_bytes(settings) + (64 << 10),
        unshaken_max=UNSHAKEN_MAX_BYTES,
        untaken_max=credit_bytes + UNSENT_MAX_BYTES,
        unsent_max=unsent_max,
        memory_growth_max=2 * credit_bytes + unsent_max + MEMORY_SLACK_BYTES,
    )


def message_max_bytes(settings: dict[str, Any]) -> int:
    """The largest frame that is taken from the network: what no lane has room for is refused with a code only a little beyond that."""
    return max(int(settings["lane_bytes"]) // 2, JSON_MAX_BYTES) + OVERDRAFT_BYTES
