"""Where the fronts of an appliance listen: front 0 at the addresses that were given, front i at ports and paths that follow from them.

given                       front 0                     front 2
tcp://127.0.0.1:7420        tcp://127.0.0.1:7420        tcp://127.0.0.1:7422
tcp://127.0.0.1:0           any free port               any free port (METADATA tells which)
ipc:///run/tailrace.sock    ipc:///run/tailrace.sock    ipc:///run/tailrace.sock.2
"""

from __future__ import annotations


def front_address(address: str, front: int, bound_port: int = 0) -> str:
    """The address of front number `front`. `bound_port`: the port that it has where `address` leaves the choice (0: none yet)."""
    if address.startswith("ipc://"):
        return f"{address}.{front}" if front else address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + front if int(port) else bound_port}"
