"""Verification and reading of an audit log: a cut, a change, a removed file. Reads only."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from appliance.audit.audit_log import HEAD, PREFIX, SUFFIX, audit_files, head_text
from appliance.audit.chain import KEYED, ZERO, check_line

FINDINGS_MAX = 100


@dataclass(slots=True)
class Verified:
    """Findings of a verification."""

    lines: int = 0
    files: int = 0
    first: int = 0
    last: int = 0
    findings: list[str] = field(default_factory=list)
    """Sentences with file and line. Empty: the log is whole."""
    key_problem: str = ""
    """The sentence if the key explains all findings. "": it does not."""
    _others: int = 0
    """Findings that no key explains."""

    def add(self, sentence: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(sentence)
        self._others += 1

    def add_of_key(self, sentence: str) -> None:
        """Add a finding that another key may explain."""
        self.add(sentence)
        self._others -= 1

    def judge_key(self, keyed: int, misfits: int, *, has_key: bool) -> None:
        """Set `key_problem`. `keyed`: lines with a keyed hash; `misfits`: those that do not fit."""
        if self._others or not self.findings or not keyed or misfits < keyed:
            return
        self.key_problem = (
            "no line fits this key: give the one that audit.key_file named when the log was "
            "written, or else somebody has written all of it anew"
            if has_key
            else "the hashes of this log are keyed: give the file of audit.key_file with --key-file"
        )


def verify(directory: str, key: bytes) -> Verified:
    """Check every line, the chain and the head. Raises OSError."""
    found = Verified()
    previous, removed_through = ZERO, 0
    keyed = misfits = 0
    for name in audit_files(directory):
        found.files += 1
        begun = int(name.removeprefix(PREFIX).removesuffix(SUFFIX))
        if found.lines and begun != found.last + 1:
            found.add(
                f"{name}: a file before it is missing: it begins with {begun}, and the last line "
                f"before is {found.last}"
            )
        for number, line, is_whole in _lines(directory, name):
            place = f"{name}:{number}"
            if not is_whole:
                found.add(f"{place}: the line has no end")
                continue
            try:
                value, wrong = check_line(line, key)
            except ValueError as error:
                found.add(f"{place}: it is no line of an audit log: {error}")
                continue
            is_keyed = value.get("alg") == KEYED
            keyed += is_keyed
            if wrong is not None:
                misfits += is_keyed
                (found.add_of_key if is_keyed else found.add)(f"{place}: {wrong}")
            seq = value["seq"]
            if not found.lines:
                found.first = seq
            elif seq != found.last + 1:
                found.add(f"{place}: line {seq} follows line {found.last}: lines are missing")
            elif value.get("prev") != previous:
                found.add(f"{place}: it does not follow the line before: one of them was changed")
            if number == 1 and seq != begun:
                found.add(f"{place}: the file's name says {begun}, its first line {seq}")
            if value.get("event") == "files_removed" and wrong is None:
                removed_through = max(removed_through, int(value.get("through", 0)))
            found.lines += 1
            found.last, previous = seq, str(value.get("hash"))
    if found.lines and found.first > removed_through + 1:
        (found.add_of_key if misfits else found.add)(
            f"the log begins with line {found.first}: files before it were removed, and not by the "
            "appliance"
        )
    if not _check_head(directory, key, found, previous):
        found.judge_key(keyed, misfits, has_key=bool(key))
    return found


def _check_head(directory: str, key: bytes, found: Verified, last_hash: str) -> bool:
    """Returns True if the head was written with this key."""
    try:
        with open(os.path.join(directory, HEAD), "rb") as file:
            text = file.read(4_096)
        head = orjson.loads(text)
        seq, digest = int(head["seq"]), str(head["hash"])
    except FileNotFoundError:
        if found.lines:
            found.add(f"{HEAD} is missing: a cut at the end cannot be found")
        return False
    except (ValueError, KeyError, TypeError):
        found.add(f"{HEAD} is damaged: a cut at the end cannot be found")
        return False
    if not hmac.compare_digest(text, head_text(seq, digest, key)):
        found.add_of_key(f"{HEAD} was changed, or was written with another key")
        return False
    if seq > found.last:
        found.add(f"the end was cut: the last line is {found.last}, and there were {seq}")
    elif seq == found.last and digest != last_hash:
        found.add(f"the last line {seq} is not the one that was written: it was changed")
    return True


def _lines(directory: str, name: str) -> Iterator[tuple[int, bytes, bool]]:
    """(Number, line without its end, whether it has one) of each line of a file."""
    with open(os.path.join(directory, name), "rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line.rstrip(b"\n"), line.endswith(b"\n")


def read_events(directory: str) -> Iterator[dict[str, Any]]:
    """The lines as objects, oldest first; what is no line is left out. Raises OSError."""
    for name in audit_files(directory):
        for _, line, _ in _lines(directory, name):
            try:
                value = orjson.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value
