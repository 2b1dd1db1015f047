"""Becomes another program that is killed when the thread that started it ends: `python -I -S
bench/peers/tied.py PARENT COMMAND...`, run by `bench.peers.servers.tied`.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """See the module's docstring."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("its parent is gone")
    os.execvp(sys.argv[2], sys.argv[2:])


main()
