"""What a front sends: responses, refusals, and pushes that tell of credit.

Owner: one front. Invariants: a response carries its request's API, version and correlation id; a client that cannot be sent its answer loses its session,
    so that it does not wait for it; what a client is refused for is said in one sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from netfront.credits import Credit
from netfront.sessions import Session, Sessions
from netfront.transport import Transport
from shm.control import ProcessSlot
from shm.layout import ProcessWord
from shm.runtime.boundary import Boundary
from tailrace.formats.checksum import Readable
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import API_VERSIONS, PUSH_CORRELATION_ID, Api, WireError, encode_response

logger = logging.getLogger(__name__)

_PUSH_VERSIONS = {int(api): low for api, (low, _) in API_VERSIONS.items()}
"""API -> the version of what is said without being asked: the lowest, which every client that is served understands."""


class Replies:
    """The one way out of a front."""

    def __init__(
        self, transport: Transport, sessions: Sessions, slot: ProcessSlot, boundary: Boundary, on_unreachable: Callable[[Session], None]
    ) -> None:
        self._transport = transport
        self._sessions = sessions
        self._generation = sessions.generation
        self._slot = slot
        self._boundary = boundary
        self._on_unreachable = on_unreachable

    def send(self, session: Session, api: int, version: int, correlation_id: int, code: ErrorCode, body: Sequence[Readable] = ()) -> None:
        """Answer a request."""
        frames = encode_response(api, version, correlation_id, code, session.credit.limit, self._generation, body)
        if not self._transport.try_send(session.identity, frames):
            self._on_unreachable(session)

    def send_batches(self, session: Session, api: int, version: int, correlation_id: int, entries: bytes, data: memoryview) -> None:
        """Answer a request, with part of one of the transport's buffers as the last frame; none where `data` is empty."""
        if not len(data):
            self.send(session, api, version, correlation_id, ErrorCode.OK, [entries])
            return
        head = encode_response(api, version, correlation_id, ErrorCode.OK, session.credit.limit, self._generation, [entries, data])[:-1]
        if not self._transport.try_send_buffer(session.identity, head, data):
            self._on_unreachable(session)

    def answer_late(self, word: int, api: int, version: int, correlation_id: int, code: ErrorCode, body: Readable) -> None:
        """Answer a request that waited for another process, if its session is still there. Raises nothing."""
        session = self._sessions.by_word(word)
        if session is None:
            return
        try:
            self.send(session, api, version, correlation_id, code, [body])
        except Exception as error:
            self.fail(session.identity, session, api, version, correlation_id, error)

    def refuse(self, identity: bytes, session: Session | None, api: int, version: int, correlation_id: int, error: WireError) -> None:
        """Answer with an error, also where there is no session."""
        if error.code is not ErrorCode.SESSION_UNKNOWN:
            logger.info(
                "request_refused client=%s api=%d code=%s reason=%r",
                session.client_id if session else "?", api, error.code.name, error.detail,
            )  # fmt: skip
        self._slot.store(ProcessWord.REFUSED_COUNT, self._slot.load(ProcessWord.REFUSED_COUNT) + 1)
        body = [requests.encode_error(error.detail)]
        limit = session.credit.limit if session else 0
        self._transport.try_send(identity, encode_response(api, version, correlation_id, error.code, limit, self._generation, body))

    def note_refused(self, session: Session, api: int, codes: Sequence[ErrorCode]) -> None:
        """Parts of a request are refused, in the answer to the whole."""
        names = ",".join(sorted({code.name for code in codes}))
        logger.info("request_refused client=%s api=%d code=%s parts=%d", session.client_id, api, names, len(codes))
        self._slot.store(ProcessWord.REFUSED_COUNT, self._slot.load(ProcessWord.REFUSED_COUNT) + len(codes))

    def fail(self, identity: bytes, session: Session | None, api: int, version: int, correlation_id: int, error: Exception) -> None:
        """Answer a request that failed for an unexpected reason: it is logged, and costs nothing but this request."""
        sentence = self._boundary.caught(f"api={api} correlation_id={correlation_id} session={session.number if session else 0}", error)
        self.refuse(identity, session, api, version, correlation_id, WireError(ErrorCode.INTERNAL_ERROR, sentence))

    def refuse_or_fail(self, session: Session, api: int, version: int, correlation_id: int, error: Exception) -> None:
        """`refuse` for an error that has a code, `fail` for every other."""
        if isinstance(error, WireError):
            self.refuse(session.identity, session, api, version, correlation_id, error)
        else:
            self.fail(session.identity, session, api, version, correlation_id, error)

    # ---- pushes ----------------------------------------------------------------------------------------------------------------------

    def tell_credit(self, raised: list[Credit], but: Session | None = None) -> None:
        """Tell connections of a new limit; `but` hears it with its next answer."""
        for credit in raised:
            session = self._sessions.by_credit(credit)
            if session is not None and session is not but:
                # A client that has sent its last with acks=0 and gone hears nothing, but what it sent is still being read: the session stays.
                self.push(session)

    def push(self, session: Session) -> bool:
        """Tell a client its limit; False: it cannot be reached."""
        frames = encode_response(
            Api.CREDIT, _PUSH_VERSIONS[Api.CREDIT], PUSH_CORRELATION_ID, ErrorCode.OK, session.credit.limit, self._generation
        )
        return self._transport.try_send(session.identity, frames)

    def push_news(self, word: int, api: int, body: Readable) -> None:
        """Tell a client what another process has for it, if its session is still there. Clients that know no such news pass over them."""
        session = self._sessions.by_word(word)
        if session is None or api not in _PUSH_VERSIONS:
            return
        limit = session.credit.limit
        frames = encode_response(api, _PUSH_VERSIONS[api], PUSH_CORRELATION_ID, ErrorCode.OK, limit, self._generation, [body])
        self._transport.try_send(session.identity, frames)
