"""A plan divided into tasks: every offset once, in order, in about equal shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_bridge.source.tasks import divided
from tailrace.scanning.scan_plan import PartitionRange, ScanPlan


def plan_of(lengths: list[int]) -> ScanPlan:
    ranges = tuple(
        PartitionRange("t", b"i" * 16, p, 10 * p, 10 * p + n) for p, n in enumerate(lengths) if n
    )
    return ScanPlan("tcp://a:1", "t", False, b"", (), ranges)


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(1, 9), st.integers(1, 50))
def test_tasks_together_are_the_plan_and_none_is_much_larger(
    lengths: list[int], requested: int, rows_min: int
) -> None:
    made = plan_of(lengths)
    tasks = divided(made, requested, rows_min)
    offsets = [
        (r.partition, offset)
        for task in tasks
        for r in task.ranges
        for offset in range(r.start, r.end)
    ]
    assert offsets == [
        (r.partition, offset) for r in made.ranges for offset in range(r.start, r.end)
    ]
    assert 1 <= len(tasks) <= requested
    sizes = [sum(r.end - r.start for r in task.ranges) for task in tasks]
    assert max(sizes) - min(sizes) <= 1
    assert len(tasks) == 1 or sum(sizes) > (len(tasks) - 1) * rows_min


def test_a_large_partition_is_several_tasks_and_many_small_ones_are_one() -> None:
    assert [len(task.ranges) for task in divided(plan_of([100]), 4, 1)] == [1, 1, 1, 1]
    assert [len(task.ranges) for task in divided(plan_of([1] * 100), 4, 1)] == [25] * 4
    assert len(divided(plan_of([100] * 100), 4)) == 1
