"""The file fuzzer: every file that the appliance writes is removed, cut, flipped, or replaced by a
link, a directory or another file before a start.

The outcome is one of two. *Served*: everything acknowledged is read back; what damage to a log's or
a delayed record's own bytes has taken is told to who reads there, or said in the log with its size.
*Refused*: the start ends with an exit code of its own and a sentence that names the file. Anything
else is a finding: a loss in silence, wrong bytes, a start that tries for ever, a process that dies
of it, a file outside the directory that was changed.

`make fuzz FUZZ=files SECONDS=600 SEED=1`.
"""

from __future__ import annotations

import os
import pathlib
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace import Admin, Consumer, TopicPartition
from tailrace.core.errors import (
    CorruptBatchError,
    LogTruncatedError,
    NotReachableError,
    StorageError,
    TailraceError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.fuzz.damage.specimen import SETTINGS, Specimen, by_kind, kind_of, make
from tests.kit.processes import HANG_LIMIT_S

CANARY = b"not the appliance's to write\n" * 40
KILLED_SHARE = 0.3
_DATA = re.compile(r"^N\.arrows? of |^journal$")
"""Kinds that are the records themselves: what is damaged there is lost, and told."""
_PENDING = re.compile(r"\.pending$|^pending\.json|\.pending of ")

Mutation = Callable[[pathlib.Path, random.Random], str]


class Finding(AssertionError):
    """A promise that was broken."""


# ---- mutations -----------------------------------------------------------------------------------


def _remove(path: pathlib.Path, _rng: random.Random) -> str:
    path.unlink()
    return "removed"


def _cut(path: pathlib.Path, rng: random.Random) -> str:
    size = path.stat().st_size
    length = rng.randrange(size) if size else 0
    os.truncate(path, length)
    return f"cut from {size} to {length} bytes"


def _flip(path: pathlib.Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    if not data:
        return "empty, left as it is"
    places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 1, 8)))]
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"bits flipped at {sorted(places)}"


def _zero(path: pathlib.Path, rng: random.Random) -> str:
    size = path.stat().st_size
    start = rng.randrange(size) if size else 0
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(min(4096, size - start)))
    return f"zeroes from {start} on"


def _empty(path: pathlib.Path, _rng: random.Random) -> str:
    os.truncate(path, 0)
    return "empty"


def _garbage(path: pathlib.Path, rng: random.Random) -> str:
    path.write_bytes(rng.randbytes(rng.choice((1, 100, 5000))))
    return "random bytes"


def _extend(path: pathlib.Path, rng: random.Random) -> str:
    with path.open("ab") as file:
        file.write(rng.randbytes(100))
    return "100 random bytes behind it"


def _link(path: pathlib.Path, _rng: random.Random) -> str:
    path.unlink()
    path.symlink_to(_canary(path))
    return "a link to somebody else's file"


def _link_to_itself(path: pathlib.Path, _rng: random.Random) -> str:
    aside = _canary(path).with_name("moved-aside")
    shutil.move(path, aside)
    path.symlink_to(aside)
    return "moved elsewhere, with a link to it"


def _directory(path: pathlib.Path, _rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a directory"


def _another(path: pathlib.Path, rng: random.Random) -> str:
    others = [p for p in path.parent.iterdir() if p.is_file() and p != path]
    if not others:
        return _garbage(path, rng)
    other = rng.choice(sorted(others))
    shutil.copyfile(other, path)
    return f"a copy of {other.name}"


MUTATIONS: tuple[Mutation, ...] = (
    _remove, _cut, _cut, _cut, _flip, _flip, _flip, _zero, _empty, _garbage, _extend, _link,
    _link_to_itself, _directory, _another,
)  # fmt: skip


def _canary(path: pathlib.Path) -> pathlib.Path:
    """A file outside the data directory."""
    root = next(parent for parent in path.parents if parent.name == "data").parent
    canary = root / "canary"
    canary.write_bytes(CANARY)
    return canary


# ---- judging -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """One damaged start."""

    specimen: Specimen
    kind: str
    what: str
    told: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)
    """(topic, partition) -> ranges of offsets that readers were told are lost."""
    missing: list[tuple[str, int, int]] = field(default_factory=list)
    """(topic, partition, offset) of what was acknowledged and not read."""

    def judge(self) -> str:
        """Judge the end of a start. Raises Finding."""
        directory = self.specimen.directory
        log_path = directory / "tailrace.log"
        before = log_path.stat().st_size if log_path.exists() else 0
        try:
            appliance = start_embedded(
                data_dir=str(directory), settings=SETTINGS, auto_create_topics=False
            )
        except NotReachableError as error:
            outcome = self._judge_refusal(error, self._said(before))
        else:
            try:
                self._judge_service(appliance)
                self._judge_pending(appliance, before)
            except TailraceError as error:
                self._judge_one_partition(error, self._said(before))
                return "served but for one partition"
            finally:
                code = appliance.stop()
            said = self._said(before)
            self._expect(
                "ended process=" not in said and "Traceback" not in said,
                f"a process ended:\n{said}",
            )
            self._expect(code == 0, f"the stop ended with {code}:\n{said}")
            self._judge_losses(said)
            outcome = "served"
        canary = directory.parent / "canary"
        self._expect(
            not canary.exists() or canary.read_bytes() == CANARY,
            "a file outside the data directory was changed",
        )
        return outcome

    def _said(self, before: int) -> str:
        with (self.specimen.directory / "tailrace.log").open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise Finding(f"{self.kind}: {self.what}: {what}")

    def _judge_refusal(self, error: NotReachableError, said: str) -> str:
        sentences = [line for line in said.splitlines() if line.startswith("tailrace: ")]
        self._expect(
            "did not start within" not in str(error), f"it tried for ever:\n{said[-3000:]}"
        )
        self._expect("Traceback" not in said, f"a traceback:\n{said[-3000:]}")
        self._expect(0 < len(sentences) <= 2, f"{len(sentences)} sentences:\n{said[-3000:]}")
        name = self.kind.partition(" of ")[0].replace("N", "")
        self._expect(name in sentences[0], f"the sentence does not name the file: {sentences[0]}")
        return "refused"

    def _judge_one_partition(self, error: TailraceError, said: str) -> None:
        """A partition whose files cannot be opened is refused to its clients, and the log names the
        file; the others are served.
        """
        is_said = re.search(
            r"log_open_failed directory=\S+ error=.*"
            + re.escape(self.kind.partition(" of ")[0].replace("N", "")),
            said,
        )
        self._expect(
            isinstance(error, StorageError) and bool(is_said),
            f"a client was refused: {error}\n{said[-3000:]}",
        )

    def _judge_service(self, appliance: EmbeddedAppliance) -> None:
        """Read everything; what is not what was acknowledged is a finding, what is missing is
        judged when the log is known.
        """
        found: dict[tuple[str, int, int], object] = {}
        with Consumer(
            bootstrap=appliance.address, auto_offset_reset="earliest", fetch_max_wait_ms=50
        ) as consumer:
            for topic, partition in sorted({key[:2] for key in self.specimen.acknowledged}):
                key = TopicPartition(topic, partition)
                consumer.assign([key])
                end = consumer.end_offsets([key])[key]
                consumer.seek_to_beginning(key)
                deadline = time.monotonic() + HANG_LIMIT_S
                while consumer.position(key) < end:
                    self._expect(
                        time.monotonic() < deadline,
                        f"{key} cannot be read up to {end}: {consumer.position(key)}",
                    )
                    try:
                        for record in consumer.poll(timeout_ms=500):
                            found[topic, partition, record.offset] = record.value
                    except CorruptBatchError as error:
                        following = end if error.next_offset is None else error.next_offset
                        first = (
                            consumer.position(key)
                            if error.first_offset is None
                            else error.first_offset
                        )
                        self.told.setdefault((topic, partition), []).append((first, following))
                        consumer.seek(key, following)
                    except LogTruncatedError as error:
                        consumer.seek(key, error.offset or 0)
        for place, value in found.items():
            known = self.specimen.acknowledged.get(place, value)
            self._expect(known == value, f"{place} was {known!r} and is {value!r}")
        self.missing = sorted(place for place in self.specimen.acknowledged if place not in found)

    def _judge_losses(self, said: str) -> None:
        untold = [
            (topic, partition, offset)
            for topic, partition, offset in self.missing
            if not any(
                first <= offset < end for first, end in self.told.get((topic, partition), ())
            )
        ]
        if not _DATA.search(self.kind):
            self._expect(
                not self.missing,
                f"lost {self.missing[:5]} ({len(self.missing)} records):\n{said[-3000:]}",
            )
            return
        for topic, partition, offset in untold:
            is_said = re.search(
                rf"topic={topic} partition={partition} .*(cut_bytes|damaged_ranges|lost_[a-z]+)=[1-9]",  # noqa: E501
                said,
            )
            self._expect(
                bool(is_said),
                f"offset {offset} of {topic}-{partition} is lost in silence:\n{said[-3000:]}",
            )

    def _judge_pending(self, appliance: EmbeddedAppliance, before: int) -> None:
        """Delayed records: all listed, or their loss is counted, or who asks is told."""
        with Admin(appliance.address) as admin:
            try:
                listed = {delay.delay_id for delay in admin.list_delays("later")}
                lost = sum(int(described["lost_rows"]) for described in admin.describe_delays())
            except TailraceError as error:
                if not _PENDING.search(self.kind):
                    self._judge_one_partition(error, self._said(before))
                return
        missing = self.specimen.delay_ids - listed
        if _PENDING.search(self.kind) or (_DATA.search(self.kind) and "@" in self.kind):
            said = self._said(before)
            self._expect(
                len(missing) <= lost or "lost" in said or "damaged" in said,
                f"{len(missing)} delayed records are lost in silence",
            )
        else:
            self._expect(not missing, f"{len(missing)} delayed records are lost")


# ---- running -------------------------------------------------------------------------------------


class FileFuzzer:
    """Trials, each on a specimen of its own."""

    def __init__(self, seed: int, root: pathlib.Path) -> None:
        self._rng = random.Random(seed)
        self._root = root
        self.outcomes: Counter[str] = Counter()
        self._stopped = make(_new(root / "stopped"), is_killed=False)
        self.kinds = [kind for kind, _ in by_kind(self._stopped)]

    def trial(
        self,
        *,
        kind: str | None = None,
        mutation: Mutation | None = None,
        is_killed: bool | None = None,
    ) -> str:
        """Damage one file, start, judge. Raises Finding."""
        rng = self._rng
        directory = _new(self._root / "trial")
        if is_killed if is_killed is not None else rng.random() < KILLED_SHARE:
            specimen = make(directory, is_killed=True)
        else:
            shutil.rmtree(directory)
            shutil.copytree(self._stopped.directory, directory, symlinks=True)
            specimen = Specimen(directory, self._stopped.acknowledged, self._stopped.delay_ids)
        try:
            kinds = dict(by_kind(specimen))
            kind = kind if kind is not None else rng.choice(sorted(kinds))
            path = rng.choice(kinds[kind])
            what = (mutation or rng.choice(MUTATIONS))(path, rng)
            outcome = Trial(
                specimen, kind_of(path), f"{path.relative_to(directory)} {what}"
            ).judge()
        finally:
            specimen.remove_regions()
            shutil.rmtree(directory.parent)
        self.outcomes[outcome] += 1
        return outcome


def _new(parent: pathlib.Path) -> pathlib.Path:
    directory = parent / "data"
    directory.mkdir(parents=True, mode=0o750)
    return directory


def fuzz(seed: int, seconds: float, say: Callable[[str], None]) -> int:
    """Trials for so long; returns how many findings there were, each said."""
    findings = 0
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="tailrace-files-") as root:
        fuzzer = FileFuzzer(seed, pathlib.Path(root))
        while time.monotonic() < deadline:
            try:
                fuzzer.trial()
            except Finding as finding:
                findings += 1
                say(f"FINDING {finding}")
            if sum(fuzzer.outcomes.values()) % 20 == 0:
                say(f"{dict(fuzzer.outcomes)} findings={findings}")
    say(f"{dict(fuzzer.outcomes)} findings={findings}")
    return findings


def main(arguments: list[str]) -> int:
    """`SECONDS [SEED]`; the exit status says whether there were findings."""
    seconds, seed = (
        float(arguments[0]),
        int(arguments[1]) if len(arguments) > 1 else random.randrange(1 << 32),
    )
    print(f"seed {seed}, {seconds:g} s", flush=True)
    return int(bool(fuzz(seed, seconds, lambda text: print(text, flush=True))))
