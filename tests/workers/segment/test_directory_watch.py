"""A data directory that is lost, replaced, or cannot be looked at."""

from __future__ import annotations

import errno
import pathlib

from workers.segment.directory_watch import CHECK_NS, DirectoryWatch, Identity, identity_of


def test_a_removed_and_another_directory_are_losses_and_the_first_one_is_back(
    tmp_path: pathlib.Path,
) -> None:
    path, aside = tmp_path / "data", tmp_path / "aside"
    path.mkdir()
    watch = DirectoryWatch(str(path))
    assert not watch.check(0)
    path.rename(aside)
    assert not watch.check(CHECK_NS - 1), "it is not time"
    assert watch.check(CHECK_NS)
    assert watch.reason == f"{path} is gone: No such file or directory"
    path.mkdir()
    assert not watch.check(2 * CHECK_NS), "it stays lost"
    assert "another directory" in watch.reason
    path.rmdir()
    aside.rename(path)
    assert watch.check(3 * CHECK_NS)
    assert watch.reason == ""


def test_a_shortage_of_descriptors_is_no_loss(tmp_path: pathlib.Path) -> None:
    failing: list[OSError] = []

    def identify(path: str) -> Identity:
        if failing:
            raise failing[0]
        return identity_of(path)

    watch = DirectoryWatch(str(tmp_path), identify)
    failing.append(OSError(errno.EMFILE, "too many open files"))
    assert not watch.check(CHECK_NS)
    assert watch.reason == ""
    failing[0] = OSError(errno.EIO, "input/output error")
    assert watch.check(2 * CHECK_NS)
