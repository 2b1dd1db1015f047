"""Answers and pushes of the step that is under way.

Owner: the service.
Invariants: each is taken once. An answer that says what a rollback has undone becomes a refusal: it
    names the group that it is about, ANY (lists), or NOTHING (it says only what was kept before the
    step).
"""

from __future__ import annotations

from collections.abc import Collection

from appliance.groups.base.messages import Answer, Push, Requester, SessionKey
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol.messages import encode_error

ANY = "\0any"
NOTHING = "\0nothing"


class Responses:
    """What is to be sent when the step is kept."""

    def __init__(self) -> None:
        self._answers: list[tuple[Answer, str]] = []
        self._pushes: dict[SessionKey, Push] = {}

    def answer(self, requester: Requester, about: str, body: bytes) -> None:
        """`about`: the group's name, ANY or NOTHING."""
        self._answers.append((Answer(requester, 0, body), about))

    def refuse(
        self, requester: Requester, error: TailraceError, *, is_undone: bool = False
    ) -> None:
        """`is_undone`: a rollback, not the request, is the reason."""
        self._answers.append(
            (Answer(requester, int(error.code), encode_error(error.detail), is_undone), NOTHING)
        )

    def push(self, session: SessionKey, api: int, body: bytes) -> None:
        """One at most for each session and step: the first says it."""
        self._pushes.setdefault(session, Push(session.front, session.session, api, body))

    def is_answered(self, session: SessionKey) -> None:
        """The session has an answer with the news that it would be pushed."""
        self._pushes.pop(session, None)

    def drain_answers(self) -> list[Answer]:
        answers, self._answers = [answer for answer, _ in self._answers], []
        return answers

    def drain_pushes(self) -> list[Push]:
        pushes, self._pushes = list(self._pushes.values()), {}
        return pushes

    def undone(self, groups: Collection[str], error: TailraceError) -> None:
        """What these groups had changed in this step was rolled back."""
        self._pushes = {}
        body = encode_error(error.detail)
        for answer, about in self._answers:
            if answer.code == ErrorCode.OK and (about == ANY or about in groups):
                answer.code, answer.body, answer.is_undone = int(error.code), body, True
