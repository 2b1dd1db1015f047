"""Listening sockets that systemd passes to a service with a socket unit (sd_listen_fds(3)).

Owner: the supervisor keeps the descriptors; each front that is started gets those of its addresses.
Invariants:
- The sockets listen as long as systemd has them, whatever is killed or restarted. A client that
  connects meanwhile waits in the kernel's queue.
- A socket that no front would serve is refused, because its clients would wait for ever.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping, Sequence

from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import digits_in
from tailrace.protocol.listeners import front_address

FIRST_FD = 3
ANY_HOSTS = ("0.0.0.0", "[::]")


def inherited_sockets(environment: MutableMapping[str, str]) -> dict[str, int]:
    """Address -> descriptor of each passed socket. Removes systemd's variables, so that no child
    takes them for its own.

    Raises: InvalidSettingError for a descriptor that is no listening stream socket.
    """
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    number = digits_in(count)
    if pid != str(os.getpid()) or number is None:
        return {}
    found = {}
    for fd in range(FIRST_FD, FIRST_FD + number):
        os.set_inheritable(fd, False)
        found[_address_of(fd)] = fd
    return found


def _address_of(fd: int) -> str:
    with socket.socket(fileno=os.dup(fd)) as passed:
        is_stream = passed.type == socket.SOCK_STREAM
        if not is_stream or not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise InvalidSettingError(
                "systemd passes a socket that takes no connections; the socket unit needs "
                "ListenStream= and Accept=no"
            )
        name = passed.getsockname()
        if passed.family == socket.AF_UNIX:
            return f"ipc://{os.fsdecode(name)}"
        host = f"[{name[0]}]" if passed.family == socket.AF_INET6 else name[0]
        return f"tcp://{host}:{name[1]}"


def sockets_of_fronts(passed: dict[str, int], listen: Sequence[str], fronts: int) -> dict[str, int]:
    """Address, as a front is given it -> descriptor. Addresses without a socket are not in it.

    Raises: InvalidSettingError for a socket at an address that no front has.
    """
    found = {}
    rest = dict(passed)
    for front in range(fronts if passed else 0):
        for address in (front_address(address, front) for address in listen):
            for spelling in _spellings(address):
                if spelling in rest:
                    found[address] = rest.pop(spelling)
                    break
    if rest:
        raise InvalidSettingError(
            f"systemd passes a socket at {', '.join(rest)}, and listen is "
            f"{', '.join(listen)}: write the same addresses into listen and into ListenStream= of "
            "the socket unit"
        )
    return found


def _spellings(address: str) -> list[str]:
    """An address, and how the kernel may name it."""
    host, _, port = address.rpartition(":")
    if host == "tcp://*":
        return [f"tcp://{any_host}:{port}" for any_host in ANY_HOSTS]
    if host == "tcp://localhost":
        return [f"tcp://127.0.0.1:{port}", f"tcp://[::1]:{port}"]
    return [address]
