"""Matrices of cases: the ones that `make test` runs, and all of them in `make test-all`; cases that
are too small for a test of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def short(cases: Iterable[Any], *chosen: int) -> list[ParameterSet]:
    """Every case, as parameters: those at the places `chosen` (the first by default) run always,
    the rest is `long`.

    A case of several arguments is a tuple.
    """
    found = []
    for place, case in enumerate(cases):
        marks = () if place in (chosen or (0,)) else (pytest.mark.long,)
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return found


@contextlib.contextmanager
def case(*values: object) -> Iterator[None]:
    """One of many cases in a test: the error of one that fails names it.

    A test costs milliseconds by itself: hundreds of cases of microseconds are one.
    """
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {', '.join(map(repr, values))}")
        raise
