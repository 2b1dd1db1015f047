"""A few strangers before any login: nothing ends, nothing grows, an administrator is answered."""

from __future__ import annotations

import pathlib

from tests.fuzz.connections.protocol_fuzzer import SETTINGS
from tests.fuzz.connections.strangers import Fuzzer
from tests.kit.appliances.secured import secured


def test_strangers_end_nothing_but_their_connection(tmp_path: pathlib.Path) -> None:
    with secured(tmp_path, **SETTINGS) as users:
        fuzzer = Fuzzer(users)
        for seed in range(16):
            fuzzer.play(seed)
        assert fuzzer.look() == []
        assert fuzzer.look() == [], "what has ended shows at the second time"
        fuzzer.close()
