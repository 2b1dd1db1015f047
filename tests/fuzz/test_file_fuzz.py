"""A round of the file fuzzer, the same each time: every kind of file, damaged in the ways that are found most often. More by `make fuzz FUZZ=files`."""

from __future__ import annotations

import pytest

from tests.fuzz import files
from tests.fuzz.files import FileFuzzer

SEED = 7


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> FileFuzzer:
    return FileFuzzer(SEED, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("mutation", [files._remove, files._cut, files._flip], ids=["removed", "cut", "flipped"])
def test_a_damaged_file_is_survived_or_named(fuzzer: FileFuzzer, mutation: files.Mutation) -> None:
    for kind in fuzzer.kinds:
        fuzzer.trial(kind=kind, mutation=mutation, is_killed=False)


@pytest.mark.parametrize("kind", ["shm.json", "instance.json", "coordinator.db"])
def test_a_file_damaged_behind_a_kill_of_everything_loses_nothing(fuzzer: FileFuzzer, kind: str) -> None:
    for mutation in (files._remove, files._cut, files._link):
        fuzzer.trial(kind=kind, mutation=mutation, is_killed=True)
