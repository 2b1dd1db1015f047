"""End of a loop over a consumer: tells `break` and `return` from an exception.

A loop that ends drops its iterator without giving the reason. The current instruction of the
program's frame shows it: `break` and `return` drop an iterator by an instruction of their own.
Everything else counts as an exception, so that the record is delivered again rather than lost.

Owner: pure.
"""

from __future__ import annotations

import dis
from types import FrameType

_DROPS = frozenset({"POP_TOP", "POP_ITER", "SWAP"})


def is_broken_off(frame: FrameType | None) -> bool:
    """True if the loop in this frame, which drops its iterator, ends by `break` or `return`. False
    if that is not certain.
    """
    if frame is None or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _DROPS
