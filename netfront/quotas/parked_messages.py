"""Parked messages: those of connections that are beyond a rate of requests or of changes.

A message is paid for at its gates when it is handled. If one of them is closed, the message waits
there, and so does everything that its connection sends later.

Owner: the QuotaService of one front.

Invariants:
- Parked messages of a connection are handled in the order of arrival, before any later one.
- Parked bytes of an entity are at most PARKED_MAX_BYTES, parked messages of a connection at most
  PARKED_MAX. More are refused with TOO_MANY_REQUESTS.
"""

from __future__ import annotations

from collections.abc import Callable

from netfront.quotas.message_cost import api_of, mutation_count
from netfront.quotas.session_quotas import ParkedMessage, SessionQuotas
from shm.quotas.quota_rules import Entity
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api, WireError

PARKED_MAX = 1_024
PARKED_MAX_BYTES = 64 << 20
_NEVER_PARKED = frozenset(map(int, (Api.HANDSHAKE, Api.CREDIT, Api.PING, Api.GROUP_HEARTBEAT)))
_MUTATIONS = frozenset(
    (
        int(Api.CREATE_TOPICS), int(Api.DELETE_TOPICS), int(Api.ALTER_TOPICS),
        int(Api.UNDELETE_TOPICS), int(Api.PURGE_TOPICS),
    )
)  # fmt: skip


class ParkedMessages:
    """The parked messages of all connections."""

    def __init__(self, handle: Callable[[list[bytes]], None]) -> None:
        """`handle` handles a message without looking at the rate of requests."""
        self._handle = handle
        self._bytes: dict[Entity, int] = {}

    @property
    def is_empty(self) -> bool:
        return not self._bytes

    def parks(self, quotas: SessionQuotas, frames: list[bytes]) -> bool:
        """Park a message if its session is beyond a rate. Raises WireError at the bounds."""
        requests, mutations = quotas.request_gate, quotas.mutation_gate
        if requests is None and mutations is None and not quotas.parked:
            return False
        api = api_of(frames)
        if api in _NEVER_PARKED:
            if requests is not None and requests.room(0):
                requests.take(1)
            return False
        if not quotas.parked and self._passes(quotas, api, frames):
            return False
        self._park(quotas, frames)
        return True

    def drain(self, quotas: SessionQuotas) -> None:
        """Handle the parked messages that the gates let pass."""
        while quotas.parked and quotas.session.quota in (quotas, None):
            frames = quotas.parked[0].frames
            if not self._passes(quotas, api_of(frames), frames):
                return
            self._handle(self._unpark(quotas))

    def drop(self, quotas: SessionQuotas) -> None:
        """Drop the messages of a session that has ended."""
        while quotas.parked:
            self._unpark(quotas)

    def _passes(self, quotas: SessionQuotas, api: int, frames: list[bytes]) -> bool:
        """Pay for a message if its gates are open, else wait at the first that is closed."""
        mutations = quotas.mutation_gate if api in _MUTATIONS else None
        for gate in (quotas.request_gate, mutations):
            if gate is not None and not gate.room(1):
                gate.wait(quotas)
                return False
        if quotas.request_gate is not None:
            quotas.request_gate.take(1)
        if mutations is not None:
            mutations.take(mutation_count(frames))
        return True

    def _park(self, quotas: SessionQuotas, frames: list[bytes]) -> None:
        key = _key(quotas)
        byte_count = sum(map(len, frames))
        parked_bytes = self._bytes.get(key, 0) + byte_count
        if len(quotas.parked) >= PARKED_MAX or parked_bytes > PARKED_MAX_BYTES:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{len(quotas.parked)} requests of this connection wait for the quota of requests "
                f"of {key.text}; wait for their responses",
            )
        self._bytes[key] = parked_bytes
        quotas.parked.append(ParkedMessage(list(frames), byte_count))

    def _unpark(self, quotas: SessionQuotas) -> list[bytes]:
        parked = quotas.parked.popleft()
        key = _key(quotas)
        left = self._bytes.get(key, 0) - parked.byte_count
        if left > 0:
            self._bytes[key] = left
        else:
            self._bytes.pop(key, None)
        return parked.frames


def _key(quotas: SessionQuotas) -> Entity:
    gate = quotas.request_gate or quotas.mutation_gate
    return Entity(client=quotas.session.client_id) if gate is None else gate.key
