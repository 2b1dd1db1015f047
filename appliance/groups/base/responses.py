"""Answers and pushes of the current step.

Owner: the service.
Invariants:
- Each is drained once.
- Each answer names its subject: a group, ANY (a list of groups), or NOTHING (it depends on no
  change of this step). A rollback turns the answers about undone changes into refusals.
"""

from __future__ import annotations

from collections.abc import Collection

from appliance.groups.base.messages import Answer, Push, Requester, SessionKey
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol.json_messages import encode_error

ANY = "\0any"
NOTHING = "\0nothing"


class Responses:
    """The messages to send after the step's commit."""

    def __init__(self) -> None:
        self._answers: list[tuple[Answer, str]] = []
        self._pushes: dict[SessionKey, Push] = {}

    def answer(self, requester: Requester, about: str, body: bytes) -> None:
        """Add an answer. `about`: the group's name, ANY or NOTHING."""
        self._answers.append((Answer(requester, 0, body), about))

    def refuse(
        self, requester: Requester, error: TailraceError, *, is_undone: bool = False
    ) -> None:
        """Add an error answer. `is_undone`: the cause is a rollback, not the request."""
        self._answers.append(
            (Answer(requester, int(error.code), encode_error(error.detail), is_undone), NOTHING)
        )

    def push(self, session: SessionKey, api: int, body: bytes) -> None:
        """Add a push. A session gets at most one in a step, the first."""
        self._pushes.setdefault(session, Push(session.front, session.session, api, body))

    def is_answered(self, session: SessionKey) -> None:
        """Drop the session's push, since an answer carries the same change."""
        self._pushes.pop(session, None)

    def drain_answers(self) -> list[Answer]:
        answers, self._answers = [answer for answer, _ in self._answers], []
        return answers

    def drain_pushes(self) -> list[Push]:
        pushes, self._pushes = list(self._pushes.values()), {}
        return pushes

    def undone(self, groups: Collection[str], error: TailraceError) -> None:
        """Refuse with `error` the answers about these groups, whose changes were rolled back."""
        self._pushes = {}
        body = encode_error(error.detail)
        for answer, about in self._answers:
            if answer.code == ErrorCode.OK and (about == ANY or about in groups):
                answer.code, answer.body, answer.is_undone = int(error.code), body, True
