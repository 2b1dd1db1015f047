"""Dead letters: records that a group has given up, written to a topic of their own, with their
origin and the reason in their headers.

The topic is `dead.letter.topic` of the record's topic, or `<topic>.dlq`. It is created when it is
first needed, with the settings of the record's topic (`tailrace.client.topics.derived_topics`). A
record keeps its partition number, key, value and headers; the added headers come last. A row of a
typed topic is stored as JSON. A record that is too large for the dead-letter topic loses its value,
then its key, then the sender's headers.

Owner: one consumer, in its thread or event loop. The producer has its own thread, or runs in the
same loop.

Crash: a record is acknowledged (or its group goes on) once it is in the dead-letter topic. If the
program is killed in between, the next one writes it again, so a dead letter may be there twice, and
is never missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import orjson

from tailrace.client.connections.runtime import Runtime
from tailrace.client.connections.steps import Call, Steps, Wait, Wakeup, invoke
from tailrace.client.topics.derived_topics import ensure
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidTopicNameError, RecordTooLargeError, TailraceError
from tailrace.core.records import Record
from tailrace.core.topic_names import dead_letter_name

PREFIX = "dlq."
REASON_MAX = 1_000
KNOWN_WITHIN_NS = 30_000_000_000
"""The longest time until a topic that is being created is known: the appliance's limit for a change
of topics.
"""
RETRY_INTERVAL_NS = 20_000_000

T = TypeVar("T")


class DeadLetter(NamedTuple):
    """A record of the topic `info` that a group has given up. `record` is in its stored form,
    without deserializers.
    """

    record: Record
    info: TopicInfo
    group: str
    reason: str
    delivery_count: int
    topic_id: str = ""
    """The id of the record's topic in hexadecimal; empty: that of `info`."""
    handle: Any = None
    """The future of the letter, if an interrupted attempt has sent it."""


def dead_letter_topic(info: TopicInfo) -> str:
    """The name of the topic's dead-letter topic. Raises InvalidTopicNameError for a topic that
    names itself.
    """
    name = str(info.settings.get("dead.letter.topic") or dead_letter_name(info.name))
    if name == info.name:
        raise InvalidTopicNameError(
            f"topic {info.name!r} is its own dead-letter topic; set dead.letter.topic to another "
            "one"
        )
    return name


def until_known(now_ns: Callable[[], int], ask: Callable[[], Steps[T | None]]) -> Steps[T | None]:
    """Repeat `ask` until a topic that another client creates is known. Returns None after
    KNOWN_WITHIN_NS.
    """
    give_up_ns = now_ns() + KNOWN_WITHIN_NS
    while (found := (yield from ask())) is None and now_ns() < give_up_ns:
        retry_ns = now_ns() + RETRY_INTERVAL_NS
        while now_ns() < retry_ns:
            yield Wait(retry_ns, Wakeup())
    return found


class Producers:
    """Makes a consumer's producers, for dead letters and retries. These have threads;
    `tailrace.aio` has those of an event loop.
    """

    def __init__(self, bootstrap: str, runtime: Runtime, tracing: Any = None) -> None:
        """`tracing`: the consumer's setting, which its producers share."""
        self._bootstrap = bootstrap
        self._runtime = runtime
        self._tracing = tracing

    def make(self, **settings: Any) -> Any:
        """A producer. Its methods are called by `Invoke`."""
        from tailrace.producer.producer import Producer

        return Producer(
            bootstrap=self._bootstrap, runtime=self._runtime, tracing=self._tracing, **settings
        )

    @staticmethod
    def outcome(handle: Any) -> Any:
        """Wait for a sent record. Raises the error of sending."""
        return handle.result()


class DeadLetters:
    """Writes dead letters. Its producer is made with the first."""

    def __init__(
        self,
        client_id: str,
        call: Call,
        now_ns: Callable[[], int],
        producers: Producers,
        timeout_ms: int,
    ) -> None:
        """`call` makes a request. `timeout_ms` limits one attempt to write."""
        self._client_id = client_id
        self._call = call
        self._now_ns = now_ns
        self._producers = producers
        self._timeout_ms = timeout_ms
        self._producer: Any = None
        self._partitions: dict[Prepared, int] = {}
        """The partition counts of dead-letter topics that were created or checked."""
        self.count = 0
        """Dead letters written since construction."""

    def write(
        self, letters: Iterable[DeadLetter], sent: list[Any]
    ) -> Steps[list[TailraceError | None]]:
        """Write dead letters, and wait until they are on the disk. Returns for each None, or the
        error; it is to be tried again. `sent`: an empty list, which gets the future of each letter
        or its error. After an interruption a letter is written with its future as its `handle`, so
        that it is there once.
        """
        refused: dict[str, TailraceError] = {}
        # The errors of topics, asked for once: a timeout for each of hundreds of letters could
        # take hours.
        for letter in letters:
            if letter.handle is not None:
                sent.append(letter.handle)
                continue
            error = refused.get(letter.info.name)
            if error is None:
                try:
                    count = yield from self._prepare(letter.info)
                except TailraceError as failure:
                    error = refused[letter.info.name] = failure
            sent.append((yield from self._send(letter, count)) if error is None else error)
        outcomes = []
        for handle in sent:
            outcomes.append(
                handle if isinstance(handle, TailraceError) else (yield from self._outcome(handle))
            )
        self.count += outcomes.count(None)
        if any(outcomes):
            self._partitions.clear()  # a topic may have been deleted: it is created again
        return outcomes

    def _outcome(self, handle: Any) -> Steps[TailraceError | None]:
        try:
            yield from invoke(self._producers.outcome, handle)
        except TailraceError as error:
            return error
        return None

    def _send(self, letter: DeadLetter, count: int) -> Steps[Any]:
        """The future of the sent record, or the error."""
        if self._producer is None:
            self._producer = self._producers.make(
                **producer_settings(self._client_id, self._timeout_ms)
            )
        error: TailraceError
        for parts in sendables(letter, count):
            try:
                return (yield from invoke(self._producer.send, *parts))
            except RecordTooLargeError as too_large:
                error = too_large
            except TailraceError as refused:
                return refused
        return error

    def _prepare(self, info: TopicInfo) -> Steps[int]:
        """Create or check the dead-letter topic. Returns its partition count."""
        key = prepared_as(info)
        if key not in self._partitions:
            self._partitions[key] = (
                yield from until_known(self._now_ns, lambda: prepare(self._call, info))
            ) or 0
            producer, self._producer = self._producer, None
            if producer is not None:  # it may have old metadata of the topic
                yield from invoke(producer.close)
        return self._partitions[key]

    def close(self) -> Steps[None]:
        """Close the producer."""
        if self._producer is not None:
            yield from invoke(self._producer.close)


Prepared = tuple[str, bytes, int, int]


def prepared_as(info: TopicInfo) -> Prepared:
    """The dead-letter topic and what it depends on in the record's topic. Raises
    InvalidTopicNameError.
    """
    return (
        dead_letter_topic(info),
        info.topic_id,
        info.settings["max.message.bytes"],
        len(info.partitions),
    )


def prepare(call: Call, info: TopicInfo) -> Steps[int | None]:
    """Create the dead-letter topic if there is none. Returns its partition count; None: another
    client creates it. Raises the error of creating it.
    """
    found = yield from ensure(
        call, dead_letter_topic(info), info, is_own=not info.settings.get("dead.letter.topic")
    )
    return None if found is None else len(found.partitions)


def producer_settings(client_id: str, timeout_ms: int) -> dict[str, Any]:
    """The settings of the producer of dead letters."""
    return {
        "client_id": f"{client_id}-dead-letters", "acks": "all", "delivery_timeout_ms": timeout_ms,
        "max_block_ms": timeout_ms,
        "request_timeout_ms": timeout_ms, "linger_ms": 0, "max_request_size": 64 << 20,
    }  # fmt: skip


DeadLetterRecord = tuple[str, Any, Any, list[tuple[str, bytes]], int | None]
"""(topic, value, key, headers, partition)."""


def sendables(letter: DeadLetter, partitions: int) -> Iterator[DeadLetterRecord]:
    """The arguments of `send` for a dead letter. The next ones are for a record that is too large:
    without its value, then its key, then the sender's headers. `partitions` is the partition count
    of its topic. Raises InvalidTopicNameError.
    """
    record = letter.record
    topic, partition = (
        dead_letter_topic(letter.info),
        record.partition if record.partition < partitions else None,
    )
    value = (
        orjson.dumps(record.value, default=_as_text, option=orjson.OPT_NON_STR_KEYS)
        if letter.info.typed
        else record.value
    )
    sent, added = list(record.headers), added_headers(letter)
    yield topic, value, record.key, sent + added, partition
    added.append((PREFIX + "is_cut", b"true"))
    yield topic, None, record.key, sent + added, partition
    yield topic, None, None, sent + added, partition
    yield topic, None, None, added, partition


def added_headers(letter: DeadLetter) -> list[tuple[str, bytes]]:
    """The added headers. They come after the sender's, which may have the same names."""
    record = letter.record
    added = {
        "topic": record.topic, "partition": record.partition, "offset": record.offset,
        "group": letter.group, "reason": letter.reason[:REASON_MAX],
        "delivery_count": letter.delivery_count, "timestamp": record.timestamp,
        "topic_id": letter.topic_id or letter.info.topic_id.hex(),
    }  # fmt: skip
    return [
        (PREFIX + name, str(value).encode(errors="backslashreplace"))
        for name, value in added.items()
    ]


def _as_text(value: Any) -> Any:
    """Text for a value that JSON cannot represent."""
    return value.hex() if isinstance(value, (bytes, bytearray, memoryview)) else str(value)
