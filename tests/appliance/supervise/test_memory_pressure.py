"""Memory pressure is read from the kernel's file, and has a threshold for its beginning and end."""

from __future__ import annotations

import pathlib

from appliance.supervise.memory.memory_pressure import CHECK_NS, MemoryPressure
from netfront.limits import credit_budget

LIMIT = 10


def write(path: pathlib.Path, percent: float) -> None:
    path.write_text(
        f"some avg10={percent:.2f} avg60=1.00 avg300=0.00 total=5\n"
        "full avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"
    )


def test_it_begins_at_the_limit_and_ends_below_half_of_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pressure"
    pressure = MemoryPressure(str(path))
    states, now_ns = [], 0
    for percent in (0.0, 9.9, 10.0, 60.0, 5.0, 4.9, 9.9, 10.0):
        write(path, percent)
        pressure.check(LIMIT, now_ns)
        states.append(pressure.is_high)
        now_ns += CHECK_NS
    assert states == [False, False, True, True, True, False, False, True]


def test_it_is_read_once_an_interval_and_reports_changes_only(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pressure"
    write(path, 50)
    pressure = MemoryPressure(str(path))
    assert pressure.check(LIMIT, 0)
    assert pressure.percent == 50
    write(path, 0)
    assert not pressure.check(LIMIT, CHECK_NS - 1)
    assert pressure.is_high
    assert pressure.check(LIMIT, CHECK_NS)
    assert not pressure.check(LIMIT, 2 * CHECK_NS)


def test_a_limit_of_0_ends_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pressure"
    write(path, 100)
    pressure = MemoryPressure(str(path))
    assert pressure.check(LIMIT, 0)
    assert pressure.check(0, CHECK_NS)
    assert not pressure.is_high


def test_a_kernel_that_does_not_measure_it_is_asked_once(tmp_path: pathlib.Path) -> None:
    for content in (None, "", "some avg10=much\n", "full avg10=3.0\n"):
        path = tmp_path / "pressure"
        if content is not None:
            path.write_text(content)
        pressure = MemoryPressure(str(path))
        assert not pressure.check(LIMIT, 0)
        assert pressure.next_check_ns is None


def test_while_memory_is_short_producers_have_credit_for_one_batch() -> None:
    assert credit_budget({"credit_bytes": 7, "memory.is_short": False}) == 7
    assert credit_budget({"credit_bytes": 7, "memory.is_short": True}) == 0
