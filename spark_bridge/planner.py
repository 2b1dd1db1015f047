"""Which offsets a Spark read covers, and how they are divided into tasks. Pure decisions: the `Admin` that is passed in tells what exists.

Options are those of Spark's Kafka source (strings, names in any case): kafka.bootstrap.servers; subscribe or assign; startingOffsets and endingOffsets
("earliest", "latest" or JSON {"topic": {"0": 23, "1": -2}}, where -2 means earliest and -1 latest); includeHeaders. Tailrace's own are bootstrap, the same
as kafka.bootstrap.servers, and maxUnpackedBatchBytes, the consumer's setting.
Invariants: one task for each range of a partition; the ranges are fixed when the plan is made, so that a retried task reads the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.admin import Admin
from tailrace.errors import InvalidSettingError, OffsetOutOfRangeError, SchemaMismatchError
from tailrace.offset_lookup import check_offsets_answer
from tailrace.records import TopicPartition
from tailrace.scanning.options import ScanSettings
from tailrace.scanning.planner import PartitionRange, ScanPlan, own_directories, plan_of
from tailrace.settings import DEFAULT_BOOTSTRAP, ConsumerSettings, build
from tailrace.topics import TopicInfo

EARLIEST = -2
LATEST = -1
LEASE_MS = 600_000
LEASE_ATTEMPTS = 3
KNOWN_OPTIONS = ("bootstrap", "subscribe", "assign", "startingoffsets", "endingoffsets", "includeheaders", "maxunpackedbatchbytes", "path")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read, checked."""

    bootstrap: str
    wanted: dict[str, list[int] | None]
    """topic -> partitions; None: all."""
    starting: str | dict[TopicPartition, int]
    ending: str | dict[TopicPartition, int]
    include_headers: bool
    max_unpacked_batch_bytes: int


def parse_options(given: Mapping[str, str]) -> ReadOptions:
    """Check the options of spark.read. Raises InvalidSettingError, which names the option."""
    options = {name.lower(): value for name, value in given.items()}
    if "kafka.bootstrap.servers" in options:  # the name in Spark's Kafka source
        servers = options.pop("kafka.bootstrap.servers")
        if options.setdefault("bootstrap", servers) != servers:
            raise InvalidSettingError("the options bootstrap and kafka.bootstrap.servers name two appliances; give one of them")
    for name in options:
        if name not in KNOWN_OPTIONS:
            raise InvalidSettingError(
                f"unknown option {name!r} of the tailrace data source; known are bootstrap, subscribe, assign, startingOffsets, endingOffsets, includeHeaders, "
                "maxUnpackedBatchBytes"
            )
    subscribe = options.get("subscribe", options.get("path"))
    assign = options.get("assign")
    if (subscribe is None) == (assign is None):
        raise InvalidSettingError(
            'name what to read: .option("subscribe", "topic1,topic2") or .option("assign", \'{"topic": [0, 1]}\'), one of the two'
        )
    wanted: dict[str, list[int] | None]
    if subscribe is not None:
        wanted = {name.strip(): None for name in subscribe.split(",") if name.strip()}
    else:
        wanted = {topic: [int(p) for p in partitions] for topic, partitions in _json_object("assign", str(assign)).items()}
    if not wanted:
        raise InvalidSettingError("the option subscribe names no topic")
    return ReadOptions(
        options.get("bootstrap") or DEFAULT_BOOTSTRAP,
        wanted,
        _offsets_option("startingOffsets", options.get("startingoffsets", "earliest")),
        _offsets_option("endingOffsets", options.get("endingoffsets", "latest")),
        options.get("includeheaders", "false").lower() == "true",
        _bytes_option("maxUnpackedBatchBytes", options.get("maxunpackedbatchbytes")),
    )


def _json_object(name: str, text: str) -> dict[str, list[int]]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidSettingError(f"option {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidSettingError(f"option {name} must be a JSON object")
    return value


def _offsets_option(name: str, text: str) -> str | dict[TopicPartition, int]:
    if text in ("earliest", "latest"):
        return text
    try:
        return {
            TopicPartition(topic, int(partition)): int(offset)
            for topic, partitions in json.loads(text).items()
            for partition, offset in partitions.items()
        }
    except (json.JSONDecodeError, AttributeError, ValueError, TypeError):
        raise InvalidSettingError(
            f'option {name} is {text!r}; it takes "earliest", "latest" or JSON such as {{"topic": {{"0": 23, "1": -2}}}}'
        ) from None


def _bytes_option(name: str, text: str | None) -> int:
    try:
        wanted = {} if text is None else {"max_unpacked_batch_bytes": int(text)}
    except ValueError:
        raise InvalidSettingError(f"option {name} is {text!r}; it takes a number of bytes") from None
    return build(ConsumerSettings, wanted).max_unpacked_batch_bytes


def load_topics(admin: Admin, options: ReadOptions) -> dict[str, TopicInfo]:
    """The topics to read. Raises UnknownTopicError; SchemaMismatchError when their columns differ, so that one DataFrame cannot hold them."""
    infos = admin.topic_info(list(options.wanted))
    first = next(iter(infos.values()))
    for info in infos.values():
        if info.typed != first.typed or (info.typed and info.schema != first.schema):
            raise SchemaMismatchError(
                f"topics {first.name!r} and {info.name!r} have different columns; read each in a DataFrame of its own"
            )
    return infos


def plan(admin: Admin, options: ReadOptions, infos: Mapping[str, TopicInfo]) -> list[PartitionRange]:
    """The ranges to read, without empty ones. Raises InvalidSettingError for offsets outside the log."""
    ranges = []
    for topic, info in infos.items():
        chosen = options.wanted[topic]
        for partition in range(len(info.partitions)) if chosen is None else chosen:
            key = TopicPartition(topic, partition)
            found = check_offsets_answer(admin.offsets({key: "latest"})[key])
            start = _resolve(options.starting, key, found["beginning"], found["end"], "startingOffsets", EARLIEST)
            end = _resolve(options.ending, key, found["beginning"], found["end"], "endingOffsets", LATEST)
            if start < end:
                ranges.append(PartitionRange(topic, info.topic_id, partition, start, end))
    return ranges


def plan_leased(admin: Admin, options: ReadOptions, infos: Mapping[str, TopicInfo], columns: list[str], lease: str) -> list[ScanPlan]:
    """A plan for each task, under a lease that keeps what it reads from retention for LEASE_MS; tasks renew it. Raises InvalidSettingError,
    OffsetOutOfRangeError.
    """
    for attempt in range(LEASE_ATTEMPTS):
        ranges = plan(admin, options, infos)
        try:
            admin.lease_offsets(lease, {r.key: r.start for r in ranges}, LEASE_MS)
            break
        except OffsetOutOfRangeError:
            if attempt == LEASE_ATTEMPTS - 1:  # retention moved the beginning between plan and lease each time
                raise
    data_dirs = own_directories(admin) if ranges else []
    settings = ScanSettings(client_id="spark", max_unpacked_batch_bytes=options.max_unpacked_batch_bytes)

    def task(topic: str, *of_task: PartitionRange) -> ScanPlan:
        return plan_of(infos[topic], options.bootstrap, of_task, data_dirs, columns, settings, lease)

    # Spark would turn an empty list into one task without a plan, so an empty one stands in for it.
    return [task(r.topic, r) for r in ranges] or [task(next(iter(infos)))]


def _resolve(option: str | dict[TopicPartition, int], key: TopicPartition, beginning: int, end: int, name: str, default: int) -> int:
    wanted = {"earliest": EARLIEST, "latest": LATEST}[option] if isinstance(option, str) else option.get(key, default)
    if wanted == EARLIEST:
        return beginning
    if wanted == LATEST:
        return end
    if not beginning <= wanted <= end:
        raise InvalidSettingError(f"{name} asks for offset {wanted} of {key.topic}-{key.partition}, which holds {beginning} to {end}")
    return wanted
