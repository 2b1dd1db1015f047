"""ZAP handler: libzmq asks it about each connection whose handshake is nearly done.

It runs in the front's loop, which answers a few requests a step. A connection waits for its answer;
nothing else does.

Owner: one front's `Router`.

Invariants:
- Every request is answered with the decision of `allows`, or not at all. An error is a refusal.
- Each accepted connection has a user id, which no property of its peer can replace.

Source: RFC 27 (ZAP). libzmq accepts the statuses 200 (accepted), 300, 400 and 500. A refused CURVE
client is told 400.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"tailrace"
ANSWERS_AT_ONCE = 32
_VERSION = b"1.0"
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)

logger = logging.getLogger(__name__)


class Claim(NamedTuple):
    """Facts about a connection that were checked: by libzmq, or by the Kafka gateway's login."""

    key: bytes
    """Public key of the client, 32 bytes. Empty over a Unix socket."""
    account: int
    """User id of the process at the other end of a Unix socket. -1: another kind of socket."""
    host: str
    user: str = ""
    """Name that the client has logged in with. Empty: the key or the account says who it is."""
    credential: str = ""
    """Credential that the login has proven (see `User.is_proven_by`), or CERTIFICATE, TOKEN."""


CERTIFICATE, TOKEN = "certificate", "token"
"""Credentials that the user's entry in the catalog does not have: a certificate of TLS that an
authority of the operator's choice has signed, and a token of OAUTHBEARER.
"""
Allows = Callable[[Claim], bool]


class ZapHandler:
    """The handler of one context. Make it before its sockets are bound."""

    def __init__(self, context: zmq.Context[Any], allows: Allows) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ADDRESS)
        self._allows = allows
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def step(self) -> int:
        """Answer some requests. Return their number. Connections wait until it is called."""
        for count in range(ANSWERS_AT_ONCE):
            if not int(self._socket.get(_EVENTS)) & _POLLIN:
                return count
            self._answer(self._socket.recv_multipart(_NOBLOCK))
        return ANSWERS_AT_ONCE

    def _answer(self, frames: list[bytes]) -> None:
        at = frames.index(b"") + 1
        request = frames[at:]
        request_id = request[1] if len(request) > 1 else b""
        claim = None
        try:
            claim = claim_of(request)
            is_allowed = claim is not None and self._allows(claim)
        except Exception:
            logger.exception("zap_failed")
            is_allowed = False
        user_id = b"" if claim is None or not is_allowed else encode_claim(claim)
        status = b"200" if is_allowed else b"400"
        self._socket.send_multipart(
            [*frames[:at], _VERSION, request_id, status, b"", user_id, b""], _NOBLOCK
        )

    def close(self) -> None:
        """Close the socket, after the sockets of the context."""
        self._socket.close(0)


def claim_of(request: list[bytes]) -> Claim | None:
    """The claim of a request's frames (version, id, domain, address, identity, mechanism,
    credentials). None: of a mechanism that is not accepted.
    """
    version, _, domain, address, _, mechanism, *credentials = request
    if version != _VERSION or domain != DOMAIN:
        return None
    host = address.decode("ascii", "replace")
    if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
        return Claim(credentials[0], -1, host)
    if mechanism == b"NULL":
        # of a Unix socket: HOST:UID:GID:PID, by SO_PEERCRED
        _, uid, gid, pid = ("", "", "", *host.rsplit(":", 3))[-4:]
        if uid.isdecimal() and gid.isdecimal() and pid.isdecimal():
            return Claim(b"", int(uid), "")
    return None


def encode_claim(claim: Claim) -> bytes:
    """The claim as ZAP's user id."""
    return f"{claim.key.hex()}/{claim.account}/{claim.host}".encode()


def decode_claim(user_id: str) -> Claim:
    """The claim of a connection whose user id is this. Raises ValueError."""
    key, account, host = user_id.split("/", 2)
    return Claim(bytes.fromhex(key), int(account), host)


def protect(socket: zmq.Socket[bytes]) -> None:
    """Have the handler decide about every connection of the socket, also those without
    encryption.
    """
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
