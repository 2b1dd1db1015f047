"""The handlers that are imported with their first request are there."""

from __future__ import annotations

import importlib
import inspect

import pytest

from netfront.kafka.apis.table import APIS

RARE = {
    api: names
    for api, row in APIS.items()
    if {"module", "name"} <= (names := inspect.getclosurevars(row.handler).nonlocals).keys()
}


@pytest.mark.parametrize("api", RARE)
def test_a_rare_api_has_its_handler(api: int) -> None:
    module = importlib.import_module(f"netfront.kafka.apis.{RARE[api]['module']}")
    assert inspect.isgeneratorfunction(getattr(module, RARE[api]["name"]))


def test_apis_of_programs_are_loaded_at_the_start() -> None:
    programs = {0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 22, 24, 25, 26, 28, 68}
    assert not programs & RARE.keys()
    assert len(RARE) > 20
