"""The wire protocol, sans-IO: bytes to values and back, state machines, the error table. Nothing here touches a socket."""
