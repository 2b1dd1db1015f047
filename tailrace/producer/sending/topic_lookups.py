"""Topics that a `send` needed and could not wait for: looked up by the sender, for the next `send`.

A lookup that a caller waits for ends with `max_block_ms`. With 0 no `send` would ever know its
topic. So the sender looks it up, and creates it where the appliance allows that.

Owner: a Producer, under its lock.
Invariants:
- At most one request is pending.
- A topic is looked up until a response says that it is there, or why it is not. Only the next
  `send` to it gets that error.
- At most LOOKUPS_MAX topics are remembered. The next `send` to another one begins its lookup anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import TailraceError, UnknownTopicError, error_for
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import Response

LOOKUPS_MAX = 100
RETRY_INTERVAL_NS = 100_000_000
Creation = Callable[[], dict[str, Any]]
"""Makes the entry of CREATE_TOPICS that creates a topic."""


class TopicLookups:
    """The lookups, and their errors."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pending: dict[str, Creation] = {}
        self._missing: dict[str, Creation] = {}
        """Those that are to be created."""
        self._created: set[str] = set()
        """Those that were, and that the appliance may not show yet."""
        self._errors: dict[str, TailraceError] = {}
        self._is_asked = False
        self._ask_at_ns = 0
        self.on_found: Callable[[TopicInfo], None] = lambda _info: None
        """Called with the METADATA of a topic that was found. Raises TailraceError if it cannot be
        used.
        """

    @property
    def is_waiting(self) -> bool:
        """True if a topic is looked up."""
        return bool(self._pending)

    def begin(self, topic: str, creation: Creation) -> None:
        """Look a topic up."""
        if len(self._pending) < LOOKUPS_MAX:
            self._pending.setdefault(topic, creation)

    def take_error(self, topic: str) -> TailraceError | None:
        """The error of the last lookup of a topic, once."""
        return self._errors.pop(topic, None)

    def restart(self) -> None:
        """Forget the pending request: its connection is lost."""
        self._is_asked = False

    def step(self, now_ns: int) -> None:
        """Make the next request if it is time. The connection is ready."""
        if self._is_asked or now_ns < self._ask_at_ns:
            return
        self._ask_at_ns = now_ns + RETRY_INTERVAL_NS
        if self._missing:
            requests = [creation() for creation in self._missing.values()]
            self._is_asked = self._connection.request(
                Api.CREATE_TOPICS, [encode_json({"topics": requests})], self._on_created
            )
        else:
            self._is_asked = self._connection.request(
                Api.METADATA, [encode_json({"topics": [*self._pending]})], self._on_described
            )

    def _on_created(self, response: Response | None) -> None:
        later_ns = self._ask_at_ns
        for result in self._answered(response, "results"):
            topic = str(result.get("name"))
            if self._missing.pop(topic, None) is None:
                continue
            code = code_of(result.get("code", ErrorCode.INTERNAL_ERROR))
            if code is ErrorCode.OK:
                self._created.add(topic)
            elif code is ErrorCode.TOPIC_EXISTS:  # another client's, or one that is being deleted
                self._ask_at_ns = later_ns
            else:
                self._end(topic, error_for(code, result.get("message", "")))

    def _on_described(self, response: Response | None) -> None:
        for described in self._answered(response, "topics"):
            topic = str(described.get("name"))
            if topic not in self._pending:
                continue
            try:
                self.on_found(topics_from_metadata({"topics": [described]}, topic)[topic])
            except UnknownTopicError as error:
                if topic in self._created:
                    continue  # its front shows it in a moment
                if self._connection.session.auto_create_topics:
                    self._missing[topic] = self._pending[topic]
                else:
                    self._end(topic, error)
            except TailraceError as error:
                self._end(topic, error)
            else:
                self._end(topic, None)

    def _answered(self, response: Response | None, name: str) -> list[dict[str, Any]]:
        """The entries of a response. A response without any is repeated, or ends the lookups."""
        self._is_asked = False
        if response is None or response.code in (ErrorCode.NOT_READY, ErrorCode.TOO_MANY_REQUESTS):
            return []
        self._ask_at_ns = 0
        error: TailraceError | None = None
        try:
            if response.code is not ErrorCode.OK:
                raise error_for(response.code, response.detail(), response.correlation_id)
            return list(decode_json(response.body[0])[name])
        except (TailraceError, IndexError, KeyError, TypeError) as problem:
            error = problem if isinstance(problem, TailraceError) else None
        for topic in [*self._pending]:
            self._end(topic, error or UnknownTopicError(f"topic {topic!r} was not described"))
        return []

    def _end(self, topic: str, error: TailraceError | None) -> None:
        self._pending.pop(topic, None)
        self._missing.pop(topic, None)
        self._created.discard(topic)
        if error is not None and len(self._errors) < LOOKUPS_MAX:
            self._errors[topic] = error
