"""Dead letters: records that are given up go to a topic of their own, with where they came from and why in their headers.

The topic is `dead.letter.topic` of the record's topic, `<topic>.dlq` where that is empty; it is made when it is first needed, with as many partitions, and a
record keeps its partition's number, key, value and headers; one that the added headers make too large is written without key and value. A row of a typed
topic is stored as JSON. Records are acknowledged (or their group goes on) only
when they are in the dead-letter topic: a program that is killed in between does it again, so a dead letter may be there twice, and is never missing.

Owner: one consumer, one thread; the producer has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import orjson

from tailrace.environment import Environment
from tailrace.errors import InvalidTopicNameError, RecordTooLargeError, TailraceError, error_for
from tailrace.handles import Handle
from tailrace.new_topic import create_request
from tailrace.producer import Producer
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.wire import Api
from tailrace.records import Record
from tailrace.retry_topics import DEAD_LETTER_SUFFIX
from tailrace.topics import TopicInfo

NAME_MAX = 249
PREFIX = "dlq."
REASON_MAX = 1_000
KNOWN_WITHIN_NS = 30_000_000_000
"""How long a topic that exists may take until it is known; as long as the appliance takes for a change of topics at most."""
AGAIN_NS = 20_000_000

Call = Callable[[Api, dict[str, Any]], dict[str, Any]]
T = TypeVar("T")


class Letter(NamedTuple):
    """A record that is given up, of the topic `info`. `record` as it was stored, without deserializers."""

    record: Record
    info: TopicInfo
    group: str
    reason: str
    delivery_count: int


def dead_letter_topic(info: TopicInfo) -> str:
    """Where the topic's dead letters go. Raises InvalidTopicNameError for a name that cannot be."""
    name = info.settings.get("dead.letter.topic") or info.name + DEAD_LETTER_SUFFIX
    if len(name) > NAME_MAX:
        raise InvalidTopicNameError(
            f"the dead-letter topic of {info.name!r} would have a name of {len(name)} characters, and {NAME_MAX} are allowed; "
            "set dead.letter.topic of the topic to a shorter one"
        )
    if name == info.name:
        raise InvalidTopicNameError(f"topic {info.name!r} is its own dead-letter topic; set dead.letter.topic to another one")
    return str(name)


def ask_for_topic(call: Call, name: str, partitions: int, configs: dict[str, Any] | None = None) -> bool:
    """Make a topic, unless it exists; whether it is known. TOPIC_EXISTS is also said of one that somebody else is making at the moment, and which no METADATA
    shows yet: then ask again. Raises what the appliance refuses it with.
    """
    answer = call(Api.CREATE_TOPICS, {"topics": [create_request(name, partitions, configs)], "validate_only": False})
    (code,) = (code_of(result["code"]) for result in answer["results"])
    if code is ErrorCode.OK:
        return True
    if code is not ErrorCode.TOPIC_EXISTS:
        raise error_for(code, answer["results"][0].get("message", ""))
    (described,) = call(Api.METADATA, {"topics": [name]})["topics"]
    return bool(described.get("code") != ErrorCode.UNKNOWN_TOPIC)


def until_known(environment: Environment, ask: Callable[[], T | None]) -> T | None:
    """Ask again and again for a topic that somebody else is making; None: it was not known within KNOWN_WITHIN_NS."""
    give_up_ns = environment.monotonic_ns() + KNOWN_WITHIN_NS
    while (found := ask()) is None and environment.monotonic_ns() < give_up_ns:
        environment.sleep_on((), AGAIN_NS)
    return found


def make_topic(call: Call, environment: Environment, name: str, partitions: int, configs: dict[str, Any] | None = None) -> None:
    """Make a topic, unless it exists, and wait until it is known. Raises what the appliance refuses it with."""
    until_known(environment, lambda: ask_for_topic(call, name, partitions, configs) or None)


class DeadLetters:
    """Writes dead letters; its producer is made with the first."""

    def __init__(self, bootstrap: str, client_id: str, call: Call, environment: Environment, timeout_ms: int) -> None:
        """`call`: a request and its answer. `timeout_ms`: how long one attempt to write may take."""
        self._bootstrap = bootstrap
        self._client_id = client_id
        self._call = call
        self._environment = environment
        self._timeout_ms = timeout_ms
        self._producer: Producer | None = None
        self._partitions: dict[str, int] = {}
        """Dead-letter topics that are known to exist -> how many partitions they have."""
        self.count = 0
        """Written since construction."""

    def write(self, letters: Iterable[Letter]) -> list[TailraceError | None]:
        """Write records, and wait until they are on the disk. Returns for each None, or why it is not known to be there: it is to be tried again."""
        sent: list[Handle | TailraceError] = []
        refused: dict[str, TailraceError] = {}
        """Topics whose dead letters cannot be written now: to ask for each of hundreds of letters could take hours."""
        for letter in letters:
            error = refused.get(letter.info.name)
            if error is None:
                try:
                    count = self._prepare(letter.info)
                except TailraceError as met:
                    error = refused[letter.info.name] = met
            sent.append(self._send(letter, count) if error is None else error)
        if self._producer is not None:
            self._producer.flush()
        outcomes = [handle if isinstance(handle, TailraceError) else self._outcome(handle) for handle in sent]
        self.count += outcomes.count(None)
        if any(outcomes):
            self._partitions.clear()  # a topic may have been deleted: it is made anew
        return outcomes

    @staticmethod
    def _outcome(handle: Handle) -> TailraceError | None:
        error = handle.exception()
        return error if error is None or isinstance(error, TailraceError) else TailraceError(str(error))

    def _send(self, letter: Letter, count: int) -> Handle | TailraceError:
        if self._producer is None:
            self._producer = Producer(
                **producer_settings(self._bootstrap, self._client_id, self._timeout_ms), environment=self._environment
            )
        try:
            try:
                return self._producer.send(*sendable(letter, count))
            except RecordTooLargeError:  # by the headers that are added: it can still be read where it came from
                return self._producer.send(*cut(letter, count))
        except TailraceError as error:
            return error

    def _prepare(self, info: TopicInfo) -> int:
        """How many partitions the dead-letter topic has, which is made where there is none."""
        name = dead_letter_topic(info)
        if name not in self._partitions:
            self._partitions[name] = until_known(self._environment, lambda: prepare(self._call, info)) or 0
        return self._partitions[name]

    def close(self) -> None:
        """End the producer."""
        if self._producer is not None:
            self._producer.close()


def prepare(call: Call, info: TopicInfo) -> int | None:
    """Make the topic's dead-letter topic where there is none; how many partitions it has, None: it is being made. Raises what the appliance refuses it with."""
    name = dead_letter_topic(info)
    if not ask_for_topic(call, name, len(info.partitions), {"max.message.bytes": info.settings["max.message.bytes"]}):
        return None
    return len(call(Api.METADATA, {"topics": [name]})["topics"][0].get("partitions") or ())


def producer_settings(bootstrap: str, client_id: str, timeout_ms: int) -> dict[str, Any]:
    """Of the producer that writes dead letters."""
    return {
        "bootstrap": bootstrap, "client_id": f"{client_id}-dead-letters", "acks": "all", "delivery_timeout_ms": timeout_ms, "max_block_ms": timeout_ms,
        "request_timeout_ms": timeout_ms, "linger_ms": 0, "max_request_size": 64 << 20,
    }  # fmt: skip


Sendable = tuple[str, Any, Any, list[tuple[str, bytes]], int | None]
"""Topic, value, key, headers, partition."""


def sendable(letter: Letter, partitions: int) -> Sendable:
    """A letter as a producer's `send` takes it. `partitions`: how many its topic has. Raises InvalidTopicNameError."""
    record = letter.record
    value = orjson.dumps(record.value, default=_as_text, option=orjson.OPT_NON_STR_KEYS) if letter.info.typed else record.value
    return dead_letter_topic(letter.info), value, record.key, _headers(letter), record.partition if record.partition < partitions else None


def cut(letter: Letter, partitions: int) -> Sendable:
    """The same without key and value, which are too large."""
    name, _, _, headers, partition = sendable(letter, partitions)
    return name, None, None, [*headers, (PREFIX + "is_cut", b"true")], partition


def _headers(letter: Letter) -> list[tuple[str, bytes]]:
    record = letter.record
    added = {
        "topic": record.topic, "partition": record.partition, "offset": record.offset, "group": letter.group, "reason": letter.reason[:REASON_MAX],
        "delivery_count": letter.delivery_count, "timestamp": record.timestamp,
    }  # fmt: skip
    kept = [header for header in record.headers if not header[0].startswith(PREFIX)]
    return kept + [(PREFIX + name, str(value).encode(errors="backslashreplace")) for name, value in added.items()]


def _as_text(value: Any) -> Any:
    """What JSON has no form for."""
    return value.hex() if isinstance(value, (bytes, bytearray, memoryview)) else str(value)
