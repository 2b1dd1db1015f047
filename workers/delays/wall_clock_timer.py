"""Wall-clock alarm that also fires when the wall clock is set: Linux's timerfd with
TFD_TIMER_CANCEL_ON_SET.

Python has `os.timerfd_create` from 3.13 on. Before that libc is called.

Owner: the scheduler.
"""

from __future__ import annotations

import ctypes
import os

_CLOCK_REALTIME = 0
_TFD_TIMER_ABSTIME = 1
_TFD_TIMER_CANCEL_ON_SET = 2
_FAR_AHEAD_S = 10 * 366 * 86_400
"""Alarm time when only the setting of the clock is awaited."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class WallClockTimer:
    """Alarm whose `fd` becomes readable when it fires. Raises OSError."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(_CLOCK_REALTIME, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._set_to: int | None = -1

    def set(self, due_us: int | None) -> None:
        """Fire at this time, or when the clock is set. None: only when the clock is set."""
        if due_us == self._set_to:
            return
        self._set_to = due_us
        moment = (
            _Timespec(_FAR_AHEAD_S + 1_700_000_000, 0)
            if due_us is None
            else _Timespec(max(0, due_us) // 1_000_000, max(0, due_us) % 1_000_000 * 1000)
        )
        if moment.seconds == 0 and moment.nanoseconds == 0:
            moment.nanoseconds = 1  # all zeroes would disarm it
        timer = _Timer(_Timespec(0, 0), moment)
        if self._libc.timerfd_settime(
            self.fd, _TFD_TIMER_ABSTIME | _TFD_TIMER_CANCEL_ON_SET, ctypes.byref(timer), None
        ):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> bool:
        """Read the alarm after waking. Return True if the wall clock was set."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return False
        except OSError:  # ECANCELED
            self._set_to = -1
            return True
        self._set_to = -1
        return False
