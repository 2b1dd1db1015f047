"""Addresses of the functions of pyzmq's libzmq, for compiled sockets (`native/sockets.pxi`)."""

from __future__ import annotations

import ctypes
import functools

import zmq

FUNCTIONS = (
    "zmq_msg_init",
    "zmq_msg_close",
    "zmq_msg_more",
    "zmq_msg_recv",
    "zmq_msg_data",
    "zmq_msg_size",
    "zmq_send",
    "zmq_errno",
    "zmq_getsockopt",
)


@functools.cache
def addresses() -> tuple[int, ...] | None:
    """The addresses of FUNCTIONS, None for a pyzmq backend other than Cython's."""
    try:
        # The libraries that its module links to are searched too. Nothing new is loaded.
        loaded = ctypes.CDLL(zmq.backend.cython._zmq.__file__)  # type: ignore[attr-defined]
        return tuple(
            ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS
        )
    except (AttributeError, OSError):
        return None
