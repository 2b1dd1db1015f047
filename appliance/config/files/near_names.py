"""The name that a misspelt one was meant to be.

A name within one or two slips of the keyboard comes first, by the number of edits over the whole
name: difflib's ratio prefers a long common beginning to one missing letter, and a section's names
to the right section. Similar names, by that ratio, are for what was remembered wrongly.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NAME_SHOWN_MAX = 80
EDITS_MAX = 2
"""Edits that still count as slips, if the name has `LETTERS_AN_EDIT` letters for each."""
LETTERS_AN_EDIT = 4


def plain(name: str) -> str:
    """The name without its separators and cases."""
    return name.replace(".", "_").replace("-", "_").lower()


def edits(a: str, b: str, most: int) -> int:
    """Letters to insert, delete, replace, or swap with their neighbour, to make `b` of `a`.

    The result is exact up to `most`, above it only larger than `most`. It is the optimal string
    alignment distance (Damerau 1964, Wagner and Fischer 1974).
    """
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
        if min(*before, *last) > most:
            break
    return last[-1]


def misspelt(name: str, names: Iterable[str]) -> str:
    """The name that this one is but for a slip or two; "" if there is none."""
    form = plain(name)
    allowed = min(EDITS_MAX, len(form) // LETTERS_AN_EDIT)
    best, fewest = "", allowed + 1
    for other in names:
        if abs(len(other) - len(form)) < fewest:
            found = edits(form, plain(other), fewest - 1)
            if found < fewest:
                best, fewest = other, found
    return best


def similar(name: str, names: Iterable[str], cutoff: float) -> str:
    """The name most like this one by difflib's ratio, if that is `cutoff` at least; else ""."""
    by_form = {plain(other): other for other in names}
    found = difflib.get_close_matches(plain(name[:NAME_SHOWN_MAX]), by_form, 1, cutoff)
    return by_form[found[0]] if found else ""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.72) -> str:
    """A slip away first, then the most similar of its section, then of all; "" if none is near."""
    all_names = list(names)
    section = name[:NAME_SHOWN_MAX].rpartition(".")[0]
    own = [other for other in all_names if section and other.startswith(f"{section}.")]
    return (
        misspelt(name, all_names)
        or similar(name, own, min(cutoff, 0.5))
        or similar(name, all_names, cutoff)
    )
