"""The clocks of the service, as the coordinator uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Times(NamedTuple):
    """The service's clocks."""

    wall_ms: Callable[[], int]
    elapsed_ms: Callable[[], int]
