"""METADATA of the topics that a producer sends to, requested again and again.

A topic's added partitions and changed settings are noticed this way. Moved hash slots and topics
that were made again are noticed by the appliance's responses, and change a topic by
`tailrace.producer.topic_changes.topic_change` alone.

Owner: a Producer, under its lock.
Invariants: at most one request is pending. A response without a topic changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import Response

TOPICS_MAX = 100
"""The most topics of one request; a producer of more asks for the next ones at the next time."""
NS_PER_MS = 1_000_000
SOON_NS = 500 * NS_PER_MS
"""The least time between two requests after refusals."""


class MetadataRefresh:
    """Requests METADATA each `max_age_ms`."""

    def __init__(self, connection: Connection, max_age_ms: int) -> None:
        self._connection = connection
        self._interval_ns = max_age_ms * NS_PER_MS
        self._due_ns: int | None = None
        self._is_asked = False
        self._asked_ns = -SOON_NS
        self._first = 0
        """The index of the first topic of the next request."""
        self.topics: Callable[[], list[str]] = list
        """The names of the topics to ask for."""
        self.on_described: Callable[[TopicInfo], None] = lambda _info: None
        """Called with the METADATA of a topic."""

    def step(self, now_ns: int) -> None:
        """Request METADATA if it is time. The connection is ready."""
        if self._due_ns is None:
            self._due_ns = now_ns + self._interval_ns
        if now_ns < self._due_ns or self._is_asked:
            return
        self._due_ns = now_ns + self._interval_ns
        self._asked_ns = now_ns
        topics = self.topics()
        if self._first >= len(topics):
            self._first = 0
        topics = topics[self._first : self._first + TOPICS_MAX]
        if topics:
            self._first += TOPICS_MAX
            self._is_asked = self._connection.request(
                Api.METADATA, [encode_json({"topics": topics})], self._on_metadata
            )

    def request_soon(self) -> None:
        """Request METADATA with the next step, at most once in `SOON_NS`: a refusal may show that a
        topic has changed.
        """
        self._due_ns = min(self._due_ns or 0, self._asked_ns + SOON_NS)

    def restart(self) -> None:
        """Forget the pending request: its connection is lost."""
        self._is_asked = False

    def _on_metadata(self, response: Response | None) -> None:
        self._is_asked = False
        if response is None or response.code is not ErrorCode.OK:
            return
        try:
            described = decode_json(response.body[0]).get("topics")
        except TailraceError:
            return
        for one in described if isinstance(described, list) else ():
            try:
                topics = topics_from_metadata({"topics": [one]})
            except TailraceError:  # deleted: the response to its next batch says so
                continue
            for info in topics.values():
                self.on_described(info)
