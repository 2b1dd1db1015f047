"""Parts of schedules of a `DelayWorld`: random changes and kills, and a kill at a named place."""

from __future__ import annotations

from collections.abc import Callable

from shm.crash_points import armed
from tests.kit.stepped.delays import MS, SECOND, SPANS, DelayWorld, Killed


def schedule_some(world: DelayWorld) -> None:
    rng = world.rng
    span = rng.choice(SPANS)
    world.schedule([rng.randint(0, span) for _ in range(rng.randint(1, 20))])


def change_one(world: DelayWorld) -> None:
    """Cancel or reschedule a row, if one that waits is found."""
    rng = world.rng
    row = rng.choice(list(world.rows.values()))
    if row.fate == "waits":
        due_us = world.wall_us + rng.randint(0, rng.choice(SPANS))
        world.change(row, None if rng.random() < 0.5 else due_us)


def harm_and_step(world: DelayWorld, what: float) -> None:
    """Kill what a random number from 0.7 to 0.86 means, then step."""
    rng = world.rng
    if 0.7 <= what < 0.76:
        world.kill_scheduler_soon()
    elif 0.76 <= what < 0.80:
        world.restart_scheduler()
    elif 0.80 <= what < 0.82:
        world.restart_everything(power=rng.random() < 0.5)
    elif 0.82 <= what < 0.84:
        world.bench.kill_worker()
    elif 0.84 <= what < 0.86:
        world.bench.kill_flusher()
    for _ in range(rng.randint(0, 8)):
        world.step()


def finish_with_a_kill_at(
    world: DelayWorld, place: str, visit: int, begin_round: Callable[[int], None] = lambda _: None
) -> None:
    """Schedule rows and let all come, with one kill of the scheduler at this visit of the place.
    `begin_round` is called with the number of each of the eight rounds.
    """

    def die() -> None:
        raise Killed

    with armed(place, die, visit):
        for number in range(8):
            begin_round(number)
            world.schedule([world.rng.randint(0, 600 * SECOND) for _ in range(30)])
            world.pass_time(400 * MS)
            for _ in range(60):
                world.step()
        for _ in range(200):
            world.pass_time(3 * SECOND)
            for _ in range(6):
                world.step()
    assert world.restarts == 1, "it came there, and was killed"
    world.finish()
