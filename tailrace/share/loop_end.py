"""How a program has left a loop over a queue: by its own will, or perhaps by an exception.

A loop that is left drops its iterator, and the iterator is not told why. The instruction that the
program's frame stands at says so: `break` and `return` drop an iterator by an instruction of their
own. Everything else counts as an exception: the record comes again then, rather than never.

Owner: pure.
"""

from __future__ import annotations

import dis
from types import FrameType

_DROPS = frozenset({"POP_TOP", "POP_ITER", "SWAP"})


def is_broken_off(frame: FrameType | None) -> bool:
    """Whether a loop that drops its iterator in this frame is left by `break` or `return`; False:
    perhaps not.
    """
    if frame is None or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _DROPS
