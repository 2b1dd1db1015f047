"""The HANDSHAKE request: the versions that a client supports, and those that both sides know."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import API_VERSIONS, Api, WireError, malformed
from tailrace.protocol.json_messages import decode_request, is_integer

HANDSHAKE_MAX_BYTES = 16 << 10
CLIENT_ID_MAX = 100


class HandshakeRequest(NamedTuple):
    """A HANDSHAKE request with the negotiated versions."""

    versions: dict[int, int]
    """API number -> the highest version in common."""
    client_id: str
    acting_for: str = ""
    """JSON of an `ActingFor`. The front reads it of the appliance's own clients alone."""


class ActingFor(NamedTuple):
    """The user of the console's page whom a client of the appliance's own acts for."""

    user: str
    """Empty: the console's token has let them in."""
    address: str
    event: str = ""
    """Event that the connection reports to the audit log: "login", "denied" or "query". Empty: its
    requests alone.
    """
    detail: str = ""
    """Reason of a denied login, or the text of the query."""


def decode_acting_for(text: str) -> ActingFor:
    """Decode the field. Raises WireError."""
    fields = decode_request(text.encode(), HANDSHAKE_MAX_BYTES)
    known = {name: fields.get(name, "") for name in ActingFor._fields}
    if not all(isinstance(value, str) for value in known.values()):
        raise malformed("`acting_for` has text alone")
    return ActingFor(**known)


def decode_handshake(frame: Readable) -> HandshakeRequest:
    """Decode a HANDSHAKE request and choose the highest version in common of each API.

    Raises WireError if there is none for HANDSHAKE itself.
    """
    request = decode_request(frame, HANDSHAKE_MAX_BYTES)
    offered, client_id = request.get("versions"), request.get("client_id")
    if not isinstance(offered, dict):
        raise malformed("the handshake needs `versions`: API number -> [lowest, highest]")
    if client_id is not None and not isinstance(client_id, str):
        raise malformed("`client_id` must be text")
    acting_for = request.get("acting_for", "")
    if not isinstance(acting_for, str):
        raise malformed("`acting_for` must be text")
    chosen: dict[int, int] = {}
    for api, (low, high) in API_VERSIONS.items():
        theirs = offered.get(str(int(api)))
        if (
            isinstance(theirs, list)
            and len(theirs) == 2
            and all(is_integer(v, 0, 0xFFFF) for v in theirs)
        ):
            common = min(high, theirs[1])
            if common >= max(low, theirs[0]):
                chosen[int(api)] = common
    if Api.HANDSHAKE not in chosen:
        raise WireError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"no version in common; this front supports {API_VERSIONS[Api.HANDSHAKE]} of HANDSHAKE",
        )
    return HandshakeRequest(chosen, (client_id or "")[:CLIENT_ID_MAX], acting_for)
