"""User entries: what a front keeps of the clients of each user, where a client chooses the key.

A key that two users choose has an entry of each, so that no user finds or changes that of another
one. Where room is short, the user with the most makes it.

Owner: one front.
Invariants:
- `size` is the sum of the sizes of all entries, and `_sizes` has the sum of each user that has
  entries.
- The entries of a user are in the order in which they were last put: `victim` is the oldest one of
  the user with the largest sum. Without users all are those of "".
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class UserEntries(Generic[Key, Value]):
    """Entries by user and key."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[Key, tuple[Value, int]]] = {}
        self._sizes: dict[str, int] = {}
        self.size = 0
        """Sum of the sizes of all entries."""

    def keys_of(self, user: str) -> list[Key]:
        """The keys of a user, the oldest first."""
        return list(self._of.get(user, ()))

    def get(self, user: str, key: Key) -> Value | None:
        """The user's entry."""
        entries = self._of.get(user)
        found = None if entries is None else entries.get(key)
        return None if found is None else found[0]

    def put(self, user: str, key: Key, value: Value, size: int = 1) -> None:
        """Add an entry as the user's newest one, or replace it."""
        self.pop(user, key)
        self._of.setdefault(user, OrderedDict())[key] = value, size
        self._sizes[user] = self._sizes.get(user, 0) + size
        self.size += size

    def pop(self, user: str, key: Key) -> Value | None:
        """Take an entry out."""
        entries = self._of.get(user)
        found = None if entries is None else entries.pop(key, None)
        if entries is None or found is None:
            return None
        value, size = found
        self.size -= size
        self._sizes[user] -= size
        if not entries:
            del self._of[user], self._sizes[user]
        return value

    def touch(self, user: str, key: Key, more: int = 0) -> None:
        """Make an entry the user's newest one, and its size larger by `more`."""
        entries = self._of[user]
        value, size = entries[key]
        entries[key] = value, size + more
        entries.move_to_end(key)
        self._sizes[user] += more
        self.size += more

    def users(self) -> list[str]:
        """The users that have entries."""
        return list(self._of)

    def has_most(self, user: str) -> bool:
        """True if no user's entries are more."""
        return self._sizes.get(user, 0) >= max(self._sizes.values(), default=0)

    def victim(self) -> tuple[str, Key]:
        """The entry that makes room: the oldest of the user with the most. There must be one."""
        user = max(self._sizes, key=self._sizes.__getitem__)
        return user, next(iter(self._of[user]))
