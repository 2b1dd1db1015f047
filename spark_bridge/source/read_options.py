"""Options of `spark.read`, checked. Pure: no request to the appliance.

Names, meanings and refusals are those of Spark's Kafka source
(https://spark.apache.org/docs/latest/streaming/structured-streaming-kafka-integration.html):
kafka.bootstrap.servers; subscribe, subscribePattern or assign; startingTimestamp before
startingOffsetsByTimestamp before startingOffsets, and the same for the end; failOnDataLoss;
minPartitions; maxRecordsPerPartition; includeHeaders; groupIdPrefix. Tailrace's own are in
OWN_OPTIONS and documented in docs/spark.md.

Invariants:
- All options are strings. The case of names does not matter.
- An unknown name or a value out of range raises InvalidSettingError, which names the option as it
  is written.
- The callers check the options that only a stream or only a batch read takes
  (`check_batch_options`).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.client.config.setting_fields import build
from tailrace.client.config.settings import DEFAULT_BOOTSTRAP, ConsumerSettings
from tailrace.core.errors import InvalidSettingError
from tailrace.core.records import TIMESTAMP_MAX_MS
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.units import whole_number

EARLIEST = -2
LATEST = -1
REQUEST_TIMEOUT_MS = 60_000
LATEST_MEMORY_MIN = 1 << 16
OWN_OPTIONS = (
    "bootstrap", "columns", "includeMetadata", "skipDamaged", "fromFiles", "validateBatches",
    "maxDecompressedBatchBytes", "requestTimeoutMs", "view", "keyColumn", "latestMemoryBytes",
)  # fmt: skip
KAFKA_OPTIONS = (
    "kafka.bootstrap.servers", "subscribe", "subscribePattern", "assign", "startingOffsets",
    "endingOffsets", "startingTimestamp", "endingTimestamp",
    "startingOffsetsByTimestamp", "endingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "failOnDataLoss", "minPartitions",
    "maxRecordsPerPartition", "includeHeaders", "groupIdPrefix",
)  # fmt: skip
STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
    "schemaChange",
)
NAMES = {name.lower(): name for name in (*KAFKA_OPTIONS, *OWN_OPTIONS, *STREAM_ONLY)}
EARLIER_NAMES = {
    "checkbatches": "validatebatches",
    "maxunpackedbatchbytes": "maxdecompressedbatchbytes",
}
KNOWN_OPTIONS = (*NAMES, "path")
"""Known options in lower case. `path` is the argument of `load("topic")`."""
_NUMBER = re.compile("[0-9]{1,9}")
_WRONG_JSON = (AttributeError, ValueError, TypeError, RecursionError)
OffsetsByPartition = str | dict[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read, checked."""

    bootstrap: str
    requested: dict[str, list[int] | None]
    """topic -> partitions; None: all. Empty with a pattern."""
    starting: OffsetsByPartition
    ending: OffsetsByPartition
    include_headers: bool
    max_decompressed_batch_bytes: int
    pattern: str = ""
    """Regular expression of subscribePattern, for complete topic names."""
    starting_ms: int | dict[TopicPartition, int] | None = None
    """A time of all partitions or of each, ms since 1970; it comes before `starting`."""
    ending_ms: int | dict[TopicPartition, int] | None = None
    no_record_is_latest: bool = False
    """True: begin at the end where no record is as late as the starting time. False: refuse."""
    fail_on_data_loss: bool = True
    skip_damaged: bool = False
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    columns: tuple[str, ...] | None = None
    include_metadata: bool = False
    from_files: bool | None = None
    validate_batches: bool = True
    request_timeout_ms: int = REQUEST_TIMEOUT_MS
    client_id: str = "spark"
    is_latest: bool = False
    """True: only the latest row of each key (`view`)."""
    key_column: str | None = None
    latest_memory_bytes: int | None = None
    """None: the default of `tailrace.scan`."""


def parse_options(given: Mapping[str, str]) -> ReadOptions:
    """Check the options of spark.read. Raises InvalidSettingError, which names the option."""
    options = {
        EARLIER_NAMES.get(name.lower(), name.lower()): value for name, value in given.items()
    }
    if len(options) < len(given):
        raise InvalidSettingError("one option is given under two of its names; give it once")
    for name in options:
        if name not in KNOWN_OPTIONS:
            raise InvalidSettingError(
                f"unknown option {name!r} of the tailrace data source; {_hint(name)}"
            )
    servers = options.get("kafka.bootstrap.servers")  # the name in Spark's Kafka source
    if servers is not None and options.setdefault("bootstrap", servers) != servers:
        raise InvalidSettingError(
            "the options bootstrap and kafka.bootstrap.servers name two appliances; give one of "
            "them"
        )
    requested, pattern = _topics(options)
    fail_on_data_loss = _flag(options, "failOnDataLoss", True)
    return ReadOptions(
        bootstrap=options.get("bootstrap") or DEFAULT_BOOTSTRAP,
        requested=requested,
        pattern=pattern,
        starting=_offsets_option("startingOffsets", options.get("startingoffsets", "earliest")),
        ending=_offsets_option("endingOffsets", options.get("endingoffsets", "latest")),
        starting_ms=_times(options, "startingTimestamp", "startingOffsetsByTimestamp"),
        ending_ms=_times(options, "endingTimestamp", "endingOffsetsByTimestamp"),
        no_record_is_latest=_strategy(options) == "latest",
        fail_on_data_loss=fail_on_data_loss,
        skip_damaged=_flag(options, "skipDamaged", not fail_on_data_loss),
        min_partitions=_count(options, "minPartitions"),
        max_records_per_partition=_count(options, "maxRecordsPerPartition"),
        columns=_columns(options),
        include_headers=_flag(options, "includeHeaders", False),
        include_metadata=_flag(options, "includeMetadata", False),
        from_files=_flag(options, "fromFiles", False) if "fromfiles" in options else None,
        validate_batches=_flag(options, "validateBatches", True),
        max_decompressed_batch_bytes=_bytes_option(
            "maxDecompressedBatchBytes", options.get("maxdecompressedbatchbytes")
        ),
        request_timeout_ms=_count(options, "requestTimeoutMs") or REQUEST_TIMEOUT_MS,
        client_id=options.get("groupidprefix") or "spark",
        is_latest=_view(options) == "latest",
        key_column=options.get("keycolumn"),
        latest_memory_bytes=_memory(options),
    )


def check_batch_options(given: Mapping[str, str], options: ReadOptions) -> None:
    """Check the options of a batch read, as Kafka's source does.

    Raises: InvalidSettingError.
    """
    for name in given:
        if name.lower() in (stream.lower() for stream in STREAM_ONLY):
            raise InvalidSettingError(
                f"option {NAMES[name.lower()]} is for streams (spark.readStream): a batch read "
                "covers everything at once"
            )
    for name, bound, wrong, word in (
        ("startingOffsets", options.starting, LATEST, "latest"),
        ("endingOffsets", options.ending, EARLIEST, "earliest"),
    ):
        by_time = options.starting_ms if name == "startingOffsets" else options.ending_ms
        if by_time is None and bound == word:
            raise InvalidSettingError(
                f"{name} can't be {word} for batch queries: nothing would be read"
            )
        for key, offset in bound.items() if by_time is None and isinstance(bound, dict) else ():
            if offset == wrong:
                raise InvalidSettingError(
                    f"{name} for {key.topic}-{key.partition} can't be {word} for batch queries: "
                    "nothing would be read"
                )


def _hint(name: str) -> str:
    if name == "provider":  # what Spark's catalog adds of its own
        return (
            "Spark's catalog cannot hold topics (CREATE TABLE, toTable): CREATE TEMPORARY VIEW "
            "... USING tailrace reads one"
        )
    near = difflib.get_close_matches(name, NAMES, 1, 0.7)
    if near:
        return f"did you mean {NAMES[near[0]]}?"
    of_kafka = (
        "an appliance does not have this setting of Kafka's clients; "
        if name.startswith(("kafka.", "kafkaconsumer.", "fetchoffset."))
        else ""
    )
    return f"{of_kafka}known are {', '.join((*OWN_OPTIONS, *KAFKA_OPTIONS))}"


def _topics(options: Mapping[str, str]) -> tuple[dict[str, list[int] | None], str]:
    """Topics that subscribe, assign or subscribePattern name."""
    subscribe = options.get("subscribe", options.get("path"))
    ways = {
        "subscribe": subscribe,
        "subscribePattern": options.get("subscribepattern"),
        "assign": options.get("assign"),
    }
    given = {name: text for name, text in ways.items() if text is not None}
    if len(given) != 1:
        context = f"; {' and '.join(given)} were given" if given else ""
        raise InvalidSettingError(
            'name what to read: .option("subscribe", "topic1,topic2"), '
            '.option("subscribePattern", "logs-.*") or '
            f'.option("assign", \'{{"topic": [0, 1]}}\'), one of the two or three{context}'
        )
    ((way, text),) = given.items()
    if way == "subscribe":
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise InvalidSettingError(f"the option subscribe names no topic: {text!r}")
        return dict.fromkeys(names), ""
    if way == "assign":
        return _assigned(text), ""
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidSettingError(
            f"option subscribePattern is {text!r}, which is not a regular expression: {error}"
        ) from None
    if not text.strip():
        raise InvalidSettingError("the option subscribePattern is empty")
    return {}, text


def _assigned(text: str) -> dict[str, list[int] | None]:
    found: dict[str, list[int] | None] = {}
    for topic, partitions in _json_object("assign", text).items():
        if (
            not isinstance(partitions, list)
            or not partitions
            or not all(type(p) is int and p >= 0 for p in partitions)
        ):
            raise InvalidSettingError(
                f"option assign names partitions {partitions!r:.100} of {topic!r}; it takes "
                '{"topic": [0, 1]}'
            )
        found[topic] = sorted(set(partitions))
    if not found:
        raise InvalidSettingError("no partitions to assign: the option assign names no topic")
    return found


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSettingError(f"option {name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidSettingError(f"option {name} must be a JSON object")
    return value


def _by_partition(text: str, least: int, most: float = math.inf) -> dict[TopicPartition, int]:
    """JSON {topic: {partition: number}}. Raises ValueError, and AttributeError, TypeError or
    RecursionError for other JSON.
    """
    found = {}
    for topic, partitions in json.loads(text).items():
        for partition, number in partitions.items():
            if (
                type(number) is not int
                or not least <= number <= most
                or not _NUMBER.fullmatch(partition)
            ):
                raise ValueError
            found[TopicPartition(topic, int(partition))] = number
    return found


def _offsets_option(name: str, text: str) -> OffsetsByPartition:
    if text.strip().lower() in ("earliest", "latest"):
        return text.strip().lower()
    try:
        return _by_partition(text, EARLIEST)
    except _WRONG_JSON:
        raise InvalidSettingError(
            f'option {name} is {text!r:.300}; it takes "earliest", "latest" or JSON such as '
            '{"topic": {"0": 23, "1": -2}}'
        ) from None


def _times(
    options: Mapping[str, str], one: str, each: str
) -> int | dict[TopicPartition, int] | None:
    """A time of all partitions, which comes first, or of each; ms since 1970."""
    if (text := options.get(one.lower())) is not None:
        try:
            if 0 <= (stamp := int(text)) <= TIMESTAMP_MAX_MS:
                return stamp
        except ValueError:
            pass
        raise InvalidSettingError(
            f"option {one} is {text!r:.300}; it takes a time in ms since 1970"
        )
    if (text := options.get(each.lower())) is None:
        return None
    try:
        return _by_partition(text, 0, TIMESTAMP_MAX_MS)
    except _WRONG_JSON:
        raise InvalidSettingError(
            f"option {each} is {text!r:.300}; it takes times in ms since 1970 as JSON, such as "
            '{"topic": {"0": 1000, "1": 2000}}'
        ) from None


def _strategy(options: Mapping[str, str]) -> str:
    text = options.get("startingoffsetsbytimestampstrategy", "error").strip().lower()
    if text not in ("error", "latest"):
        raise InvalidSettingError(
            f"option startingOffsetsByTimestampStrategy is {text!r}; it takes error or latest"
        )
    return text


def _view(options: Mapping[str, str]) -> str:
    text = options.get("view", "log").strip().lower()
    if text not in ("log", "latest"):
        raise InvalidSettingError(f"option view is {text!r}; it takes log or latest")
    for name in ("keyColumn", "latestMemoryBytes"):
        if text != "latest" and name.lower() in options:
            raise InvalidSettingError(f"option {name} is for view=latest; give both, or none")
    return text


def _memory(options: Mapping[str, str]) -> int | None:
    text = options.get("latestmemorybytes")
    number = None if text is None else whole_number("max_bytes", text)
    if text is not None and (number is None or number < LATEST_MEMORY_MIN):
        raise InvalidSettingError(
            f"option latestMemoryBytes is {text!r}; it takes a number of bytes from "
            f"{LATEST_MEMORY_MIN} on, or a size such as 64MiB"
        )
    return number


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise InvalidSettingError(f"option {name} is {text!r}; it takes true or false")
    return text == "true"


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name.lower())
    number = 1 if text is None else whole_number(name.lower().replace("timeoutms", "_ms"), text)
    if number is None or number < 1:
        raise InvalidSettingError(f"option {name} is {text!r}; it takes a whole number from 1 on")
    return None if text is None else number


def _columns(options: Mapping[str, str]) -> tuple[str, ...] | None:
    text = options.get("columns")
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise InvalidSettingError(
            f"option columns is {text!r}; it takes names with commas between them, each once"
        )
    return names


def _bytes_option(name: str, text: str | None) -> int:
    number = None if text is None else whole_number("max_bytes", text)
    if text is not None and number is None:
        raise InvalidSettingError(
            f"option {name} is {text!r}; it takes a number of bytes, or a size such as 64MiB"
        )
    return build(
        ConsumerSettings, {} if number is None else {"max_decompressed_batch_bytes": number}
    ).max_decompressed_batch_bytes
