"""Fields of clients' requests to the controller: their origin, and names and texts as an answer
repeats them. Pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SHOWN_MAX = 249
"""Characters of a client's own text that an answer repeats."""


def shown_name(name: Any) -> str:
    """A name as an answer repeats it: one that can be a topic's as it is, what else a client calls
    a name cut and in plain characters.
    """
    if not isinstance(name, str):
        return f"({type(name).__name__})"
    return "".join(
        char if " " <= char <= "~" and char not in '"\\' else "?" for char in name[:SHOWN_MAX]
    )


def shown_text(text: str) -> str:
    """A sentence that may quote a client, cut and in plain characters: an answer holds a thousand
    of them.
    """
    return text[:SHOWN_MAX].encode("ascii", "replace").decode()


def is_whole(value: Any, low: int, high: int) -> bool:
    """True for an int from `low` to `high`; a bool is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


class Requester(NamedTuple):
    """The origin of a request: the front, its session and the request's number there."""

    front: int
    session: int
    correlation_id: int
