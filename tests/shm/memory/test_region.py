"""Regions: stale, foreign, unfinished and of another version recognised; no room said plainly."""

from __future__ import annotations

import os

import pytest

from shm.memory import region as region_module
from shm.memory.layout import REGION_HEADER, RegionKind, RingLayout
from shm.memory.region import Region, RegionError, RegionMissingError, RegionVersionError, remove
from tests.kit.memory import INSTANCE, ring_region


def test_layout_is_what_earlier_rings_have() -> None:
    # A change of any of these means another LAYOUT_VERSION: an undrained ring of the old one could
    # not be read.
    layout = RingLayout(1 << 20, 1024)
    assert [layout.producer_position, layout.reclaimed, layout.settled, layout.cursor(0),
    layout.descriptors, layout.outcomes, layout.data, layout.size] == [
        128, 192, 256, 320, 1344, 132416, 184320, 1232896,
    ]  # fmt: skip


def test_attaching_finds_what_was_created_and_never_unlinks() -> None:
    with ring_region() as created:
        created.bytes[200:204] = b"here"
        attached = Region.attach(created.name, RegionKind.RING, INSTANCE)
        assert bytes(attached.bytes[200:204]) == b"here"
        assert (attached.header.first, attached.header.second) == (1 << 16, 64)
        attached.close()
        Region.attach(created.name, RegionKind.RING, INSTANCE).close()


def test_a_region_of_another_kind_instance_boot_or_version_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ring_region() as created:
        with pytest.raises(RegionError, match="not a finished lane"):
            Region.attach(created.name, RegionKind.LANE)
        with pytest.raises(RegionError, match="another instance"):
            Region.attach(created.name, RegionKind.RING, b"x" * 16)
        monkeypatch.setattr(region_module, "boot_id", lambda: b"y" * 16)
        with pytest.raises(RegionError, match="another instance"):
            Region.attach(created.name, RegionKind.RING)
        monkeypatch.undo()
        fields = list(REGION_HEADER.unpack_from(created.bytes, 0))
        fields[1] = 99
        REGION_HEADER.pack_into(created.bytes, 0, *fields)
        with pytest.raises(RegionVersionError, match="layout 99"):
            Region.attach(created.name, RegionKind.RING)


def test_an_unfinished_region_is_refused() -> None:
    with ring_region() as created:
        created.words[0] = 0
        with pytest.raises(RegionError, match="not a finished ring"):
            Region.attach(created.name, RegionKind.RING)


def test_a_missing_region_and_a_taken_name_are_said_plainly() -> None:
    with pytest.raises(RegionMissingError, match="does not exist"):
        Region.attach(f"/tailrace-test-{os.urandom(4).hex()}", RegionKind.RING)
    with ring_region() as created, pytest.raises(RegionError, match="exists already"):
        Region.create(created.name, RegionKind.RING, 4096, INSTANCE, 1, 0)


def test_no_room_in_dev_shm_says_so_and_leaves_nothing() -> None:
    name = f"/tailrace-test-{os.urandom(4).hex()}"
    with pytest.raises(RegionError, match="has no room"):
        Region.create(name, RegionKind.RING, 1 << 50, INSTANCE, 1, 0)
    assert not remove(name)
