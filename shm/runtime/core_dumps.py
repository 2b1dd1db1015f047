"""Core dumps: the memory of a process has secret keys and passwords, so a process leaves none.

Owner: each process; children inherit the limit.
Invariants:
- The hard limit stays, so that the operator's setting can allow dumps later.
- A limit of 1 byte, where the hard limit allows it: the kernel then starts no program of
  core_pattern either (apport, systemd-coredump), which it does with a limit of 0 (core(5)).
"""

from __future__ import annotations

import resource


def limit_core_dumps(*, are_allowed: bool = False) -> None:
    """Allow core dumps of this process and those that it starts, as far as its host does, or none
    of them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    soft = hard if are_allowed else min(1, hard) if hard != resource.RLIM_INFINITY else 1
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
