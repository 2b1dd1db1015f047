"""Matrices of cases: the ones that `make test` runs, and all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
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
