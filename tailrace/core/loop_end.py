"""End of a loop over a consumer: tells `break` and `return` from an exception.

A loop that ends drops its iterator without giving the reason. The current instruction of the
program's frame shows it: `break` and `return` drop an iterator by an instruction of their own.
Everything else counts as an exception, so that the record is delivered again rather than lost.

Owner: pure.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType

_DROPS = frozenset({"POP_TOP", "POP_ITER", "SWAP"})


def program_frame() -> FrameType | None:
    """The frame that ends the function which calls this: of the program, whose loop drops its
    iterator. None: there is no frame below, for an event loop drops what is left of a task.
    """
    try:
        return sys._getframe(2)
    except ValueError:
        return None


def is_broken_off(frame: FrameType | None) -> bool:
    """True if the loop in this frame, which drops its iterator, ends by `break` or `return`. False
    if that is not certain.
    """
    if frame is None or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _DROPS
