"""The logger `tailrace`, which loads `logging` when there is something to say.

A program's own `logging.py` takes the place of the standard library's in that program: it costs it these lines, not its client. And a start is 5 ms shorter.
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
