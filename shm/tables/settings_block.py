"""Settings block: a JSON document that one process publishes to the others, who report that they
apply it.

Two exist. The supervisor publishes the settings in force to all processes ("settings"). The
controller publishes to the supervisor what the catalog says ("overrides").

Owner: the publisher stores the texts and `version`; each other process its own `applied` word.

Invariants:
- `version` counts the published documents; 0: none yet.
- The text of a version stays until the version after the next is published. A reader that sees the
  same version before and after its copy has a whole text.

Layout: `SettingsLayout`.

Crash: a publisher that is killed before it stores `version` has published nothing. Its successor
continues with the count.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import orjson

from shm.memory.atomic_word import AtomicCounter
from shm.memory.layout import Role, SettingsLayout
from shm.memory.region import Region

_LENGTH = struct.Struct("<Q")


class SettingsBlock:
    """One block, of the publisher or a reader."""

    def __init__(self, region: Region) -> None:
        self._layout = SettingsLayout(region.header.first)
        self._words = region.words
        self._bytes = region.bytes
        self.version_word = AtomicCounter(region.words, self._layout.version)

    @property
    def version(self) -> int:
        """Number of the newest document; 0: there is none yet."""
        return self.version_word.load()  # SYNC POINT: settings

    def read(self) -> tuple[int, dict[str, Any]]:
        """(version, document), the newest; {} if there is none yet."""
        version = self.version
        while version:
            start = self._layout.text(version)
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            text = bytes(self._bytes[start + _LENGTH.size : start + _LENGTH.size + length])
            if (now := self.version) == version:
                document: dict[str, Any] = orjson.loads(text)
                return version, document
            version = now
        return 0, {}

    def fits(self, document: dict[str, Any], spare_bytes: int = 0) -> bool:
        """True if the block has room for the document, and `spare_bytes` more."""
        return len(orjson.dumps(document)) + spare_bytes <= self._layout.text_bytes

    def publish(self, document: dict[str, Any]) -> int:
        """Publish a document and return its version. Only the owner calls it, and rings the
        readers. Raises ValueError if the document is too large.
        """
        text = orjson.dumps(document)
        if len(text) > self._layout.text_bytes:
            raise ValueError(
                f"the settings have {len(text)} bytes; at most {self._layout.text_bytes}"
            )
        version = self.version + 1
        start = self._layout.text(version)
        _LENGTH.pack_into(self._bytes, start, len(text))
        self._bytes[start + _LENGTH.size : start + _LENGTH.size + len(text)] = text
        self.version_word.store(version)  # SYNC POINT: settings (the text before it)
        return version

    def applied(self, role: Role, index: int) -> AtomicCounter:
        """Word of the version that a process applies."""
        return AtomicCounter(self._words, self._layout.applied(role, index))


class SettingsFollower:
    """Gives one process the settings that are published while it runs."""

    def __init__(
        self,
        block: SettingsBlock,
        applied: AtomicCounter,
        seen: int,
        apply: Callable[[dict[str, Any]], None],
    ) -> None:
        """`seen`: the version that the process was started with. `apply`: takes newer settings."""
        self.version = block.version_word
        self.seen = seen
        """The version that the process uses. `follow` is needed when `version` is another."""
        self._block = block
        self._applied = applied
        self._apply = apply
        applied.store(seen)

    def follow(self) -> None:
        """Apply the newest settings."""
        version, document = self._block.read()
        self._apply(document["settings"])
        self.seen = version
        self._applied.store(version)
