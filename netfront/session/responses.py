"""Responses of a front: answers, refusals and pushes.

Owner: one front.

Invariants:
- A response carries its request's API, version and correlation id.
- A client that cannot receive its response loses its session, so that it does not wait for it.
- A refusal has a one-sentence reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from netfront.session.sessions import Session, Sessions
from netfront.socket.flow_control import Credit
from netfront.socket.transport import Transport
from shm.memory.layout import ProcessWord
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.logs.slow_operations import SLOW
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.protocol import json_messages
from tailrace.protocol.frame import (
    API_VERSIONS,
    PUSH_CORRELATION_ID,
    Api,
    WireError,
    encode_response,
)

logger = logging.getLogger(__name__)


def api_name(number: int) -> str:
    """The name of an API for the log; its number, if there is none of this number."""
    try:
        return Api(number).name
    except ValueError:
        return str(number)


def error_detail(body: Readable) -> str:
    """The sentence in the body of an error response, "" if there is none."""
    try:
        return str(json_messages.decode_json(body).get("message", ""))
    except WireError:
        return ""


_PUSH_VERSIONS = {int(api): low for api, (low, _) in API_VERSIONS.items()}
"""Version of pushes by API: the lowest, which every supported client understands."""


OnAnswered = Callable[[Session | None, int, int, ErrorCode, Readable], None]
"""(Session, API, correlation id, code, body) of an answer."""


class Responses:
    """Sends everything that leaves a front."""

    def __init__(
        self,
        transport: Transport,
        sessions: Sessions,
        slot: ProcessSlot,
        error_handler: CountedErrorHandler,
        on_unreachable: Callable[[Session], None],
    ) -> None:
        self._transport = transport
        self._sessions = sessions
        self._generation = sessions.generation
        self._slot = slot
        self._errors = slot.errors
        self._error_handler = error_handler
        self._on_unreachable = on_unreachable
        self.on_answered: OnAnswered | None = None
        """Gets what is answered for other processes, and refused, where it is audited."""

    def send(
        self,
        session: Session,
        api: int,
        version: int,
        correlation_id: int,
        code: ErrorCode,
        body: Sequence[Readable] = (),
    ) -> None:
        """Send the response of a request."""
        frames = encode_response(
            api, version, correlation_id, code, session.credit.limit, self._generation, body
        )
        if not self._transport.try_send(session.identity, frames):
            self._on_unreachable(session)

    def send_batches(
        self,
        session: Session,
        api: int,
        version: int,
        correlation_id: int,
        entries: bytes,
        data: memoryview,
    ) -> None:
        """Send a response whose last frame is part of a transport buffer. Without that frame if
        `data` is empty.
        """
        if not len(data):
            self.send(session, api, version, correlation_id, ErrorCode.OK, [entries])
            return
        head = encode_response(
            api,
            version,
            correlation_id,
            ErrorCode.OK,
            session.credit.limit,
            self._generation,
            [entries, data],
        )[:-1]
        if not self._transport.try_send_buffer(session.identity, head, data):
            self._on_unreachable(session)

    def answer_deferred(
        self,
        word: int,
        api: int,
        version: int,
        correlation_id: int,
        code: ErrorCode,
        body: Readable,
    ) -> None:
        """Answer a request that waited for another process, if its session still exists.

        Raises nothing.
        """
        session = self._sessions.by_word(word)
        if session is None:
            return
        if self.on_answered is not None:
            self.on_answered(session, api, correlation_id, code, body)
        if code is not ErrorCode.OK:
            self._log_refused(session, api, correlation_id, code, error_detail(body))
            self._errors.add(code)
        try:
            self.send(session, api, version, correlation_id, code, [body])
        except Exception as error:
            self.fail(session.identity, session, api, version, correlation_id, error)

    def refuse(
        self,
        identity: bytes,
        session: Session | None,
        api: int,
        version: int,
        correlation_id: int,
        error: WireError,
    ) -> None:
        """Send an error response. The session may be None."""
        if self.on_answered is not None:
            detail = json_messages.encode_error(error.detail)
            self.on_answered(session, api, correlation_id, error.code, detail)
        if error.code is not ErrorCode.SESSION_UNKNOWN:
            self._log_refused(session, api, correlation_id, error.code, error.detail)
        self._slot.store(ProcessWord.REFUSED_COUNT, self._slot.load(ProcessWord.REFUSED_COUNT) + 1)
        self._errors.add(error.code)
        body = [json_messages.encode_error(error.detail)]
        limit = session.credit.limit if session else 0
        self._transport.try_send(
            identity,
            encode_response(
                api, version, correlation_id, error.code, limit, self._generation, body
            ),
        )

    def _log_refused(
        self, session: Session | None, api: int, correlation_id: int, code: ErrorCode, reason: str
    ) -> None:
        logger.info(
            "request_refused client=%s request=%x api=%s code=%s reason=%r",
            session.client_id if session else "?", correlation_id, api_name(api), code.name, reason,
        )  # fmt: skip

    def note_slow(self, word: int, api: Api, correlation_id: int, duration_ns: int) -> None:
        """Log a request that took longer than it may."""
        session = self._sessions.by_word(word)
        SLOW.log(
            api.name.lower(), duration_ns, client=session.client_id if session else "?",
            request=f"{correlation_id:x}",
        )  # fmt: skip

    def note_refused(
        self, session: Session, api: int, correlation_id: int, codes: Sequence[ErrorCode]
    ) -> None:
        """Log and count the refused parts of a request whose response has codes for each part."""
        names = ",".join(sorted({code.name for code in codes}))
        logger.info(
            "request_refused client=%s request=%x api=%s code=%s parts=%d",
            session.client_id, correlation_id, api_name(api), names, len(codes),
        )  # fmt: skip
        self._slot.store(
            ProcessWord.REFUSED_COUNT, self._slot.load(ProcessWord.REFUSED_COUNT) + len(codes)
        )
        for code in codes:
            self._errors.add(code)

    def fail(
        self,
        identity: bytes,
        session: Session | None,
        api: int,
        version: int,
        correlation_id: int,
        error: Exception,
    ) -> None:
        """Answer a request that failed with an unexpected error, and log it.

        Other requests are unaffected.
        """
        sentence = self._error_handler.on_error(
            f"api={api_name(api)} request={correlation_id:x} "
            f"client={session.client_id if session else '?'}",
            error,
        )
        self.refuse(
            identity,
            session,
            api,
            version,
            correlation_id,
            WireError(ErrorCode.INTERNAL_ERROR, sentence),
        )

    def refuse_or_fail(
        self, session: Session, api: int, version: int, correlation_id: int, error: Exception
    ) -> None:
        """Call `refuse` for an error with a code, `fail` for any other."""
        if isinstance(error, WireError):
            self.refuse(session.identity, session, api, version, correlation_id, error)
        else:
            self.fail(session.identity, session, api, version, correlation_id, error)

    # ---- pushes ----------------------------------------------------------------------------------

    def send_credit(self, raised: list[Credit], but: Session | None = None) -> None:
        """Push new limits to their clients. `but` gets its limit with its next response."""
        for credit in raised:
            session = self._sessions.by_credit(credit)
            if session is not None and session is not but:
                # A failed push does not end the session: a client that left after acks=0 batches
                # still has some unread.
                self.push(session)

    def push(self, session: Session) -> bool:
        """Push a client's limit. Return False if it cannot be reached."""
        frames = encode_response(
            Api.CREDIT,
            _PUSH_VERSIONS[Api.CREDIT],
            PUSH_CORRELATION_ID,
            ErrorCode.OK,
            session.credit.limit,
            self._generation,
        )
        return self._transport.try_send(session.identity, frames)

    def push_latest(self, word: int, api: int, body: Readable) -> None:
        """Push a message from another process to a client, if its session still exists. Clients
        ignore pushes they do not know.
        """
        session = self._sessions.by_word(word)
        if session is None or api not in _PUSH_VERSIONS:
            return
        limit = session.credit.limit
        frames = encode_response(
            api,
            _PUSH_VERSIONS[api],
            PUSH_CORRELATION_ID,
            ErrorCode.OK,
            limit,
            self._generation,
            [body],
        )
        self._transport.try_send(session.identity, frames)
