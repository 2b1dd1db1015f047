"""Files that a front has open: closed when they are removed, and when nothing reads them."""

from __future__ import annotations

from netfront.fetch.log.open_files import UNREAD_MAX, OpenFiles
from tests.kit.log_files.simdisk import SimDisk, SimFiles


def on_disk(count: int) -> tuple[SimFiles, list[str]]:
    files = SimFiles(SimDisk())
    paths = [f"/data/{number}" for number in range(count)]
    for path in paths:
        files.close(files.open_for_write(path))
    return files, paths


def opened(files: SimFiles) -> int:
    return len(files._open)


def test_a_file_that_is_not_read_for_long_is_closed_and_one_that_is_read_stays() -> None:
    """A reader at the end of a log leaves one segment after the other behind."""
    files, paths = on_disk(60)
    of_front = OpenFiles(files, 512)
    most = 0
    for path in paths:
        of_front.open(paths[0])
        of_front.open(path)
        assert of_front.close_unused()
        most = max(most, opened(files))
    assert most == UNREAD_MAX + 1, "those of the last rounds, and the first"
    kept = of_front.open(paths[0])
    rounds = 0
    while of_front.close_unused():
        rounds += 1
    assert rounds == UNREAD_MAX
    assert not opened(files)
    assert of_front.open(paths[0]) != kept, "it is opened again"


def test_the_least_recently_read_files_make_room_and_removed_ones_go_at_once() -> None:
    files, paths = on_disk(4)
    of_front = OpenFiles(files, 3)
    first = of_front.open(paths[0])
    for path in paths[1:3]:
        of_front.open(path)
    of_front.open(paths[0])
    of_front.open(paths[3])
    assert of_front.open(paths[0]) == first
    assert opened(files) == 3
    files.unlink(paths[0])
    files.unlink(paths[3])
    assert of_front.close_unused()
    assert opened(files) == 1
