"""Plan of the shared-memory regions for an appliance of a given shape. Pure.

Names are logical ("ring-0", "front-0>worker-1"). The supervisor maps them to shared-memory names
and passes the mapping to every child.
"""

from __future__ import annotations

from typing import NamedTuple

from appliance.config.document_size import OVERRIDES_BYTES, SETTINGS_BYTES
from appliance.config.settings import Settings
from shm.memory.layout import (
    ControlLayout,
    LaneLayout,
    RegionKind,
    RingLayout,
    SettingsLayout,
    TableLayout,
)

CONTROL_LANE_BYTES = 1 << 20
"""Lanes that carry decisions, not data: a topic's schema must fit one message."""


class RegionPlan(NamedTuple):
    """A shared-memory region to make."""

    logical_name: str
    kind: RegionKind
    size: int
    first: int = 0
    second: int = 0


def _lane(source: str, target: str, size: int) -> RegionPlan:
    return RegionPlan(f"{source}>{target}", RegionKind.LANE, LaneLayout(size).size, size)


def _settings(name: str, text_bytes: int) -> RegionPlan:
    return RegionPlan(name, RegionKind.SETTINGS, SettingsLayout(text_bytes).size, text_bytes)


def plan_worker(settings: Settings, worker: int, fronts: int) -> list[RegionPlan]:
    """One worker's ring, and the lanes that lead to it."""
    ring = RingLayout(settings.ring_bytes, settings.ring_descriptors)
    return [
        RegionPlan(
            f"ring-{worker}",
            RegionKind.RING,
            ring.size,
            settings.ring_bytes,
            settings.ring_descriptors,
        ),
        _lane("controller", f"worker-{worker}", CONTROL_LANE_BYTES),
        _lane("scheduler-0", f"worker-{worker}", settings.lane_bytes),
        *(_lane(f"front-{f}", f"worker-{worker}", settings.lane_bytes) for f in range(fronts)),
    ]


def plan_groups(fronts: int) -> list[RegionPlan]:
    """Lanes of the group coordinator, made when it is first needed."""
    lanes = [_lane("controller", "groups-0", CONTROL_LANE_BYTES)]
    for f in range(fronts):
        lanes.append(_lane(f"front-{f}", "groups-0", CONTROL_LANE_BYTES))
        lanes.append(_lane("groups-0", f"front-{f}", CONTROL_LANE_BYTES))
    return lanes


def plan_transactions(worker: int) -> list[RegionPlan]:
    """Lanes between a worker and the transaction coordinator, made when transactions are first
    used.
    """
    return [
        _lane("groups-0", f"worker-{worker}", CONTROL_LANE_BYTES),
        _lane(f"worker-{worker}", "groups-0", CONTROL_LANE_BYTES),
    ]


def plan_regions(settings: Settings, workers: int, fronts: int, flushers: int) -> list[RegionPlan]:
    """Every region that exists from the start, in order of creation."""
    # The name has the number of rings, for a start that finds no manifest.
    plans = [RegionPlan("control", RegionKind.CONTROL, ControlLayout().size, workers)]
    plans += [_settings("settings", SETTINGS_BYTES), _settings("overrides", OVERRIDES_BYTES)]
    for d in range(flushers):
        plans.append(
            RegionPlan(
                f"table-{d}", RegionKind.TABLE, TableLayout(settings.slots).size, settings.slots
            )
        )
        plans.append(_lane("controller", f"flusher-{d}", CONTROL_LANE_BYTES))
    for w in range(workers):
        plans += plan_worker(settings, w, fronts)
    plans.append(_lane("controller", "scheduler-0", CONTROL_LANE_BYTES))
    for f in range(fronts):
        plans.append(_lane("scheduler-0", f"front-{f}", CONTROL_LANE_BYTES))
        plans.append(_lane(f"front-{f}", "scheduler-0", CONTROL_LANE_BYTES))
        plans.append(_lane("controller", f"front-{f}", CONTROL_LANE_BYTES))
        plans.append(_lane(f"front-{f}", "controller", CONTROL_LANE_BYTES))
    return plans
