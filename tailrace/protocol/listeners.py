"""Listen addresses of an appliance's fronts.

Front 0 listens at the given addresses, front i at ports and paths derived from them:

    given                       front 0                     front 2
    tcp://127.0.0.1:7420        tcp://127.0.0.1:7420        tcp://127.0.0.1:7422
    tcp://127.0.0.1:0           any free port               any free port (see METADATA)
    ipc:///run/tailrace.sock    ipc:///run/tailrace.sock    ipc:///run/tailrace.sock.2
"""

from __future__ import annotations


def front_address(address: str, front: int, bound_port: int = 0) -> str:
    """The address of front number `front`.

    `bound_port` is its port if `address` has port 0; 0 if it is not bound yet.
    """
    if address.startswith("ipc://"):
        return f"{address}.{front}" if front else address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + front if int(port) else bound_port}"
