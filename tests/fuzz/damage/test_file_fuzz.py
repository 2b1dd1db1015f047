"""A round of the file fuzzer, the same each time: every kind of file, damaged in the ways that are
found most often.

`make test` damages each second kind once, in one way after the other; `make test-all` each kind in
each way, and with new seeds. More by `make fuzz FUZZ=files`.
"""

from __future__ import annotations

import itertools

import pytest

from tests.fuzz.damage import file_fuzzer as files
from tests.fuzz.damage.file_fuzzer import FileFuzzer
from tests.kit import seeds

SEED = 7
USUAL = (files._remove, files._cut, files._flip)
BEHIND_A_KILL = (files._cut, files._remove, files._link)
MANIFESTS = ("shm.json", "instance.json", "coordinator.db")
NEW_TRIALS = 100


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> FileFuzzer:
    return FileFuzzer(SEED, tmp_path_factory.mktemp("files"))


@pytest.mark.slow_because(
    "each kind of file needs a start of its own: what one damage does hides another"
)
def test_a_damaged_file_is_survived_or_named(fuzzer: FileFuzzer) -> None:
    for kind, mutation in zip(fuzzer.kinds[::2], itertools.cycle(USUAL), strict=False):
        fuzzer.trial(kind=kind, mutation=mutation, is_killed=False)


@pytest.mark.long
@pytest.mark.parametrize("mutation", USUAL, ids=["removed", "cut", "flipped"])
def test_each_damage_of_each_file_is_survived_or_named(
    fuzzer: FileFuzzer, mutation: files.Mutation
) -> None:
    for kind in fuzzer.kinds:
        fuzzer.trial(kind=kind, mutation=mutation, is_killed=False)


@pytest.mark.long
@pytest.mark.parametrize("seed", [seeds.base()])
def test_new_damages_are_survived_or_named(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    fuzzer = FileFuzzer(seed, tmp_path_factory.mktemp("new"))
    for _ in range(NEW_TRIALS):
        fuzzer.trial()


@pytest.mark.parametrize(
    ("kind", "mutation"), [*zip(MANIFESTS, BEHIND_A_KILL, strict=True)], ids=MANIFESTS
)
def test_a_file_damaged_behind_a_kill_of_everything_loses_nothing(
    fuzzer: FileFuzzer, kind: str, mutation: files.Mutation
) -> None:
    fuzzer.trial(kind=kind, mutation=mutation, is_killed=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", MANIFESTS)
def test_each_damage_behind_a_kill_of_everything_loses_nothing(
    fuzzer: FileFuzzer, kind: str
) -> None:
    for mutation in BEHIND_A_KILL:
        fuzzer.trial(kind=kind, mutation=mutation, is_killed=True)
