"""Settings block: a reader gets a whole document, whatever its publisher does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shm.memory.layout import REGION_HEADER_BYTES, WORKERS_MAX, RegionKind, Role, SettingsLayout
from shm.memory.region import Region
from shm.tables.settings_block import SettingsBlock, SettingsFollower
from tests.kit.memory import region

TEXT_BYTES = 256


@pytest.fixture
def shared() -> Iterator[Region]:
    with region(RegionKind.SETTINGS, SettingsLayout(TEXT_BYTES).size, TEXT_BYTES) as made:
        yield made


def test_the_layout_has_a_line_for_every_process_and_two_texts() -> None:
    layout = SettingsLayout(TEXT_BYTES)
    applied = [layout.applied(Role.WORKER, WORKERS_MAX - 1), layout.applied(Role.SUPERVISOR, 0)]
    assert layout.version == REGION_HEADER_BYTES < applied[1] < applied[0] < layout.text(0)
    assert layout.text(1) >= layout.text(0) + 8 + TEXT_BYTES
    assert layout.text(2) == layout.text(0)
    assert layout.size >= layout.text(1) + 8 + TEXT_BYTES
    assert layout.size % 4096 == 0


def test_the_newest_document_is_read(shared: Region) -> None:
    block = SettingsBlock(shared)
    assert block.read() == (0, {})
    for number in range(1, 6):
        assert block.publish({"n": number, "text": "x" * number}) == number
        assert SettingsBlock(shared).read() == (number, {"n": number, "text": "x" * number})


def test_a_document_without_room_is_refused_and_the_last_one_stays(shared: Region) -> None:
    block = SettingsBlock(shared)
    block.publish({"n": 1})
    large = {"text": "x" * TEXT_BYTES}
    assert not block.fits(large)
    with pytest.raises(ValueError, match=f"at most {TEXT_BYTES}"):
        block.publish(large)
    assert block.read() == (1, {"n": 1})


def test_a_reader_that_is_overtaken_reads_the_newest(shared: Region) -> None:
    """While it copies, two more documents are published, the second over the bytes it copies."""
    writer, reader = SettingsBlock(shared), SettingsBlock(shared)
    writer.publish({"n": 1})
    words: Any = shared.words
    loads: list[int] = []

    def publish_more() -> None:
        loads.append(1)
        if len(loads) == 2:  # the look behind the copy
            writer.publish({"n": 2})
            writer.publish({"n": 3})

    words.on_load = publish_more
    assert reader.read() == (3, {"n": 3})


def test_a_publisher_killed_before_it_publishes_has_changed_nothing(shared: Region) -> None:
    class Killed(BaseException):
        pass

    block = SettingsBlock(shared)
    block.publish({"n": 1})
    words: Any = shared.words

    def kill() -> None:
        raise Killed

    words.before = kill
    with pytest.raises(Killed):
        block.publish({"n": 2})
    words.before = None
    successor = SettingsBlock(shared)
    assert successor.read() == (1, {"n": 1})
    assert successor.publish({"n": 3}) == 2
    assert block.read() == (2, {"n": 3})


def test_a_follower_applies_each_change_once_and_says_so(shared: Region) -> None:
    block, got = SettingsBlock(shared), list[dict[str, Any]]()
    block.publish({"settings": {"n": 1}})
    applied = block.applied(Role.WORKER, 3)
    follower = SettingsFollower(block, applied, 1, got.append)
    assert (applied.load(), follower.version.load(), follower.seen) == (1, 1, 1)
    block.publish({"settings": {"n": 2}})
    block.publish({"settings": {"n": 3}})
    assert follower.version.load() != follower.seen
    follower.follow()
    assert got == [{"n": 3}]
    assert (applied.load(), follower.version.load(), follower.seen) == (3, 3, 3)
