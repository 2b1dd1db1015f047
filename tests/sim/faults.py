"""Faults that every schedule of the simulation may have, by name."""

from __future__ import annotations

import errno
import os
import random

from tests.sim.machine.machine_parts import MS, PowerLost
from tests.sim.machine.world import World

HOUR_US = 3_600_000_000


class AllKilled(BaseException):
    """SIGKILL of every process at once."""


def cause(fault: str, world: World, rng: random.Random) -> bool:
    """Have a fault happen, now or a little later. False: it is none of these."""
    living = [child for child in world.children if child.agent is not None]
    if fault == "kill":
        world.fate.doom(rng.randint(0, 40))
    elif fault == "crash point":
        world.fate.crash_at_a_point()
    elif fault == "stop":
        if living:
            rng.choice(living).stopped_until_ns = world.now_ns + rng.randrange(1, 3000) * MS
    elif fault == "kill all":
        world.fate.doom(rng.randint(0, 60), AllKilled)
    elif fault == "power":
        world.fate.doom(rng.randint(0, 60), PowerLost)
    elif fault == "cut":
        if world.network.links:
            world.network.cut(rng.choice(list(world.network.links.values())))
    elif fault == "clock":
        world.wall_offset_us += rng.choice((-1, 1)) * HOUR_US
    elif fault == "disk error":
        break_disk(world, rng)
    elif fault == "restart":
        world.stop_cleanly()
    else:
        return False
    return True


def break_disk(world: World, rng: random.Random) -> None:
    """The next changes of one data directory fail."""
    broken = rng.choice(world.data_dirs)
    left = rng.randint(1, 3)

    def hook(operation: str, path: str) -> None:
        nonlocal left
        world.fate.count_down()
        if left and path.startswith(broken + "/") and operation in ("write", "sync"):
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    world.disk.hook = hook
