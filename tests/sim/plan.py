"""Plan of a seed: the appliance's layout, its clients, the faults; and from that, which promises
hold.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a seed."""

    steps: int
    workers: int
    data_dirs: int
    partitions: int
    acks: int | str
    durability: str
    producers: int
    consumers: int
    faults: tuple[str, ...]
    fault_rate: float
    log_append_time: bool
    changes_layout: bool
    dedicated: bool
    deletes: bool
    """True if records are deleted, and other topics made and deleted."""
    delays: bool
    """True if producers have records of another topic delivered later."""

    @property
    def loses_power(self) -> bool:
        return "power" in self.faults

    @property
    def is_lossless(self) -> bool:
        """True if nothing acknowledged may be missing."""
        if self.loses_power and (self.acks != "all" or self.durability != "disk"):
            return False
        return "disk error" not in self.faults or (self.acks == "all" and self.durability == "disk")

    @property
    def may_have_holes(self) -> bool:
        """Under durability=memory a segment that was given up after a disk error is not synced:
        power loss makes a hole of it, which is reported.
        """
        return self.loses_power and "disk error" in self.faults and self.durability == "memory"

    @property
    def may_refuse(self) -> bool:
        """True if a producer may be told that a record is lost."""
        return "disk error" in self.faults


FAULTS = (
    "kill",
    "kill",
    "crash point",
    "stop",
    "kill all",
    "power",
    "cut",
    "clock",
    "disk error",
    "full disk",
    "restart",
)


def plan(rng: random.Random) -> Plan:
    faults = tuple(sorted({rng.choice(FAULTS) for _ in range(rng.randint(0, 4))}))
    return Plan(
        steps=rng.randint(200, 500), workers=rng.randint(1, 2), data_dirs=rng.choice((1, 1, 2)),
        partitions=rng.randint(1, 7),
        acks=rng.choice((1, "all", "all")), durability=rng.choice(("disk", "disk", "memory")),
        producers=rng.randint(1, 2), consumers=rng.randint(0, 2),
        faults=faults, fault_rate=rng.choice((0.005, 0.01, 0.03)),
        log_append_time=rng.random() < 0.3, changes_layout=rng.random() < 0.3,
        dedicated=rng.random() < 0.2, deletes=rng.random() < 0.3, delays=rng.random() < 0.4,
    )  # fmt: skip
