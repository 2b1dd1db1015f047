"""The logger `tailrace`. It imports `logging` on the first message.

A program with its own `logging.py` can so import the client, and the start is 5 ms shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import logging


class _Later:
    def __getattr__(self, name: str) -> Any:
        import logging

        return getattr(logging.getLogger("tailrace"), name)


logger = cast("logging.Logger", _Later())
