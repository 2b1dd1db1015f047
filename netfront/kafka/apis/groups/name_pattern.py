"""Name pattern: a regular expression that is matched with names in linear time, whatever it is.

Kafka's brokers match patterns of topic names with RE2, which never tries ways one after the other.
Python's matcher does. So a pattern is translated into the automaton of its positions (Glushkov): a
position is one place of the pattern where a character is taken, and a set of positions is a number
with a bit for each. For `a(b|c)*`:

    position    takes    may be followed by
    0           a        1, 2
    1           b        1, 2
    2           c        1, 2

Owner: pure.

Invariants:
- A name takes one step a character, of at most POSITIONS_MAX followers.
- A pattern has at most POSITIONS_MAX positions, repetitions written out, and DEPTH_MAX groups in
  each other.
- `^` and `$` are positions too: they take a mark before a name, and one behind it.

Source: V. M. Glushkov, "The abstract theory of automata" (1961); the syntax is what RE2 and Python
have in common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

LENGTH_MAX = 249
POSITIONS_MAX = 250
DEPTH_MAX = 16
PARTS_MAX = 1_000
"""Parts that are translated, repetitions written out and empty ones too."""
STATES_MAX = 1_000
BEGIN, END = "begin", "end"
_ATOM = re.compile(
    r"\\(?:[dDwWsS]|[^A-Za-z0-9\n])|\[\^?\]?(?:\\.|[^\]\\\[])*\]|[^\\\[\](){}|*+?^$]", re.DOTALL
)
_REPEAT = re.compile(r"(?:([*+?])|\{(\d{1,4})(?:(,)(\d{1,4})?)?\})\??")


class PatternError(ValueError):
    """A pattern that is not valid, or too large. The text says why."""


class _Part(NamedTuple):
    """A part of a pattern."""

    is_nullable: bool
    """True if it may take nothing."""
    first: int
    """Positions that it may begin with."""
    last: int
    """Positions that it may end with."""


_NOTHING = _Part(True, 0, 0)


class NamePattern:
    """A pattern that is translated."""

    def __init__(self, text: str) -> None:
        """Raises PatternError."""
        self._text = text
        self._at = self._depth = self._parts = 0
        self._takes: list[str] = []
        """Taken by each position: an expression of one character, or a mark."""
        self._following: list[int] = []
        """Positions that may follow each."""
        if len(text) > LENGTH_MAX:
            raise PatternError(f"it has {len(text)} characters of {LENGTH_MAX}")
        begin = self._star(self._position(BEGIN))
        whole = self._join(begin, self._choice())
        if self._at < len(text):
            raise PatternError(f"a ')' at character {self._at} closes nothing")
        whole = self._join(whole, self._star(self._position(END)))
        self._first, self._last = whole.first, whole.last
        self._masks: dict[str, int] = {}
        """Positions that take a character, by the character."""
        self._bytes = -(-len(self._takes) // 8)
        self._followers_of: list[dict[int, int]] = [{} for _ in range(self._bytes)]
        """Followers of eight positions at a time: for each byte of a set, by its value."""

    # ---- match -----------------------------------------------------------------------------------

    def matching(self, names: Iterable[str]) -> Iterator[str]:
        """The names that the whole pattern matches."""
        begun = self._marked(self._first, BEGIN)
        known: dict[int, int] = {}
        for name in names:
            taken = begun
            for character in name:
                following = known.get(taken)
                if following is None:
                    following = self._followers(taken)
                    if len(known) < STATES_MAX:
                        known[taken] = following
                mask = self._masks.get(character)
                taken = following & (self._mask(character) if mask is None else mask)
                if not taken:
                    break
            if taken and self._marked(self._followers(taken), END) & self._last:
                yield name

    def matches(self, name: str) -> bool:
        """True if the whole name is matched."""
        return any(True for _ in self.matching((name,)))

    def _marked(self, following: int, mark: str) -> int:
        """Take a mark, which any number of `^` or `$` may take together."""
        mask, taken = self._masks.get(mark) or self._mask(mark), 0
        while (more := taken | following & mask) != taken:
            taken, following = more, self._followers(more)
        return taken

    def _mask(self, character: str) -> int:
        found = 0
        for position, takes in enumerate(self._takes):
            if takes in (BEGIN, END) or len(character) > 1:
                is_taken = takes == character
            else:
                is_taken = re.fullmatch(takes, character) is not None
            found |= is_taken << position
        self._masks[character] = found
        return found

    def _followers(self, taken: int) -> int:
        found = 0
        for at, byte in enumerate(taken.to_bytes(self._bytes, "little")):
            if byte:
                known = self._followers_of[at].get(byte)
                found |= self._followers_of_byte(at, byte) if known is None else known
        return found

    def _followers_of_byte(self, at: int, byte: int) -> int:
        found = 0
        for bit in range(8):
            if byte >> bit & 1:
                found |= self._following[8 * at + bit]
        self._followers_of[at][byte] = found
        return found

    # ---- translate -------------------------------------------------------------------------------

    def _position(self, takes: str) -> _Part:
        if len(self._takes) >= POSITIONS_MAX:
            raise PatternError(
                f"with its repetitions written out it takes over {POSITIONS_MAX} characters"
            )
        bit = 1 << len(self._takes)
        self._takes.append(takes)
        self._following.append(0)
        return _Part(False, bit, bit)

    def _follow(self, last: int, first: int) -> None:
        while last:
            self._following[(last & -last).bit_length() - 1] |= first
            last &= last - 1

    def _join(self, left: _Part, right: _Part) -> _Part:
        self._follow(left.last, right.first)
        return _Part(
            left.is_nullable and right.is_nullable,
            left.first | (right.first if left.is_nullable else 0),
            right.last | (left.last if right.is_nullable else 0),
        )

    def _star(self, part: _Part) -> _Part:
        self._follow(part.last, part.first)
        return part._replace(is_nullable=True)

    def _choice(self) -> _Part:
        found = self._sequence()
        while self._text[self._at : self._at + 1] == "|":
            self._at += 1
            other = self._sequence()
            found = _Part(
                found.is_nullable or other.is_nullable,
                found.first | other.first,
                found.last | other.last,
            )
        return found

    def _sequence(self) -> _Part:
        found = _NOTHING
        while self._text[self._at : self._at + 1] not in ("", "|", ")"):
            found = self._join(found, self._repeated())
        return found

    def _repeated(self) -> _Part:
        begin, count = self._at, len(self._takes)
        part = self._one()
        end = self._at
        repeat = _REPEAT.match(self._text, end)
        if repeat is None:
            return part
        sign, low, comma, high = repeat.groups()
        behind = repeat.end()
        if _REPEAT.match(self._text, behind) or self._text[behind : behind + 1] == "+":
            raise PatternError(f"character {behind} repeats a repetition: write a group")
        if sign:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        else:
            least = int(low)
            most = int(high) if high else None if comma else least
        if most is not None and most < least:
            raise PatternError(f"{repeat[0]} has its bounds the wrong way round")
        size = max(1, len(self._takes) - count)
        if size * (least + 1 if most is None else most) > POSITIONS_MAX:
            raise PatternError(
                f"with its repetitions written out it takes over {POSITIONS_MAX} characters"
            )

        def copied() -> _Part:
            """The part once more, with positions of its own."""
            self._at = begin
            return self._one()

        if most == 0:
            found = _NOTHING
        elif least == 0:
            found = self._star(part) if most is None else part._replace(is_nullable=True)
            least = 1
        else:
            found = part
            for _ in range(least - 1):
                found = self._join(found, part := copied())
            if most is None:
                self._star(part)
        for _ in range((most or 0) - least):
            found = self._join(found, copied()._replace(is_nullable=True))
        self._at = behind
        return found

    def _one(self) -> _Part:
        text, at = self._text, self._at
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise PatternError(f"with its repetitions written out it has over {PARTS_MAX} parts")
        character = text[at]
        if character == "(":
            return self._group()
        if character in "^$":
            self._at += 1
            return self._position(BEGIN if character == "^" else END)
        found = _ATOM.match(text, at)
        if found is None:
            raise PatternError(f"{text[at : at + 10]!r} at character {at} is not understood")
        try:
            re.compile(found[0])
        except re.error as error:
            raise PatternError(f"{found[0]!r} is not valid: {error}") from None
        self._at = found.end()
        return self._position(found[0])

    def _group(self) -> _Part:
        begin = self._at
        self._at += 3 if self._text.startswith("(?:", begin) else 1
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise PatternError(f"it has over {DEPTH_MAX} groups in each other")
        if self._text[self._at : self._at + 1] == "?":
            raise PatternError(f"{self._text[begin : begin + 4]!r} is not understood")
        found = self._choice()
        if self._text[self._at : self._at + 1] != ")":
            raise PatternError(f"the '(' at character {begin} is not closed")
        self._at += 1
        self._depth -= 1
        return found


@lru_cache(maxsize=32)
def name_pattern(text: str) -> NamePattern:
    """The pattern of a text; members of a group mostly have the same. Raises PatternError."""
    return NamePattern(text)
