"""Uses of rates in shared memory: what each front shows the others."""

from __future__ import annotations

from shm.memory.layout import FRONTS_MAX, USES_MAX, ControlLayout, RegionKind, Role
from shm.tables.control import Control
from shm.tables.rate_uses import UNUSED, RateUse, number_of
from tests.kit.memory import simulated

NAME = "producer_byte_rate user=alice"


def made(count: int) -> list:  # type: ignore[type-arg]
    control = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0))
    return [control.process(Role.FRONT, front).rate_uses for front in range(count)]


def test_a_front_sees_the_uses_of_the_others() -> None:
    one, two, three = made(3)
    number = number_of(NAME)
    assert one.of_others(number, 3) == [UNUSED, UNUSED]
    one.put(number, RateUse(7, True))
    two.put(number, RateUse(1 << 70, False))
    assert three.of_others(number, 3) == [RateUse(7, True), RateUse(1 << 60, False)]
    assert one.of_others(number, 2) == [RateUse(1 << 60, False)]
    one.remove(number)
    assert three.of_others(number, 3)[0] == UNUSED
    two.clear()
    assert three.of_others(number, 3) == [UNUSED, UNUSED]


def test_rates_of_one_place_do_not_mix() -> None:
    one, two = made(2)
    number = number_of(NAME)
    same_place = next(
        found
        for found in (number_of(f"request_rate client={n}") for n in range(100_000))
        if found != number and (found >> 1) % USES_MAX == (number >> 1) % USES_MAX
    )
    one.put(number, RateUse(7, True))
    one.put(same_place, RateUse(9, False))
    one.remove(same_place)
    assert two.of_others(same_place, 2) == [UNUSED]
    assert two.of_others(number, 2) == [RateUse(7, True)]
    one.remove(number)
    one.put(same_place, RateUse(9, False))
    assert two.of_others(same_place, 2) == [RateUse(9, False)]
    assert two.of_others(number, 2) == [UNUSED]


def test_numbers_are_the_same_everywhere_and_use_every_place() -> None:
    assert number_of(NAME) == number_of(NAME)
    numbers = {number_of(f"request_rate client={n}") for n in range(2_000)}
    assert len(numbers) == 2_000
    assert {(number >> 1) % USES_MAX for number in numbers} == set(range(USES_MAX))
    assert min(numbers) > 0
    assert max(numbers) < 1 << 64


def test_the_last_row_of_the_last_front_is_within_the_region() -> None:
    layout = ControlLayout()
    assert (layout.rate_use(FRONTS_MAX - 1, USES_MAX - 1) + 2) * 8 <= layout.size
    assert layout.rate_use(0, 0) * 8 >= layout.kafka
