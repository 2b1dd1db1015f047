"""Options of `spark.readStream`: those of a batch read that say what is read, and how much of it a micro-batch takes.

Names and meanings are those of Spark's Kafka source: maxOffsetsPerTrigger, minOffsetsPerTrigger, maxTriggerDelay, minPartitions, maxRecordsPerPartition,
failOnDataLoss; startingOffsets is "latest" unless it is given. Tailrace's own are maxBytesPerTrigger (as Delta's: a soft limit) and requestTimeoutMs.
Invariants: pure; an option that is misspelt or out of range is refused by name before anything is asked of the appliance.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from spark_bridge.planner import EARLIEST, KNOWN_OPTIONS, LATEST, ReadOptions, parse_options
from tailrace.errors import InvalidSettingError
from tailrace.records import TopicPartition
from tailrace.units import whole_number

STREAM_OPTIONS = {
    name.lower(): name
    for name in (
        "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger", "minPartitions", "maxRecordsPerPartition",
        "failOnDataLoss", "requestTimeoutMs",
    )
}  # fmt: skip
"""In lower case -> as they are written."""
STARTS = ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp")
MAX_TRIGGER_DELAY_MS = 900_000
REQUEST_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream, checked."""

    read: ReadOptions
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_trigger_delay_ms: int = MAX_TRIGGER_DELAY_MS
    max_bytes: int | None = None
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    request_timeout_ms: int = REQUEST_TIMEOUT_MS

    @property
    def task_count_max(self) -> int:
        """Tasks of a micro-batch that is large enough: as many as this machine has cores, where minPartitions does not ask for more."""
        return max(self.min_partitions or 0, len(os.sched_getaffinity(0)))


def without_stream_options(given: Mapping[str, str]) -> dict[str, str]:
    """What is left for `parse_options`, which refuses what it does not know. Raises InvalidSettingError for a name that neither knows."""
    known = {*STREAM_OPTIONS.values(), "startingOffsets", "endingOffsets", "includeHeaders", "subscribe", "assign", "bootstrap"}
    for name in given:
        lower = name.lower()
        if lower in STREAM_OPTIONS or lower in KNOWN_OPTIONS or lower == "kafka.bootstrap.servers":
            continue
        near = difflib.get_close_matches(lower, [option.lower() for option in known], 1, 0.6)
        if near:
            meant = next(option for option in known if option.lower() == near[0])
            raise InvalidSettingError(f"unknown option {name!r} of the tailrace data source; did you mean {meant}?")
    return {name: value for name, value in given.items() if name.lower() not in STREAM_OPTIONS}


def parse_stream_options(given: Mapping[str, str]) -> StreamOptions:
    """Check the options of spark.readStream. Raises InvalidSettingError, which names the option."""
    shared = without_stream_options(given)
    for name in shared:
        if name.lower().startswith("ending"):
            raise InvalidSettingError(
                f"option {name} is for batch reads: a stream has no end (a batch read, or Trigger.AvailableNow, has one)"
            )
    if not any(name.lower() in STARTS for name in shared):
        shared["startingOffsets"] = "latest"
    options = {name.lower(): value for name, value in given.items()}
    most, least = _count(options, "maxOffsetsPerTrigger"), _count(options, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise InvalidSettingError(f"minOffsetsPerTrigger is {least} and maxOffsetsPerTrigger {most}: no micro-batch could have so many")
    return StreamOptions(
        parse_options(shared),
        most,
        least,
        _with_unit(options, "maxTriggerDelay", "delay_ms", "milliseconds, or a duration such as 30s or 15m") or MAX_TRIGGER_DELAY_MS,
        _with_unit(options, "maxBytesPerTrigger", "max_bytes", "a number of bytes from 1 on, or a size such as 64MiB"),
        _count(options, "minPartitions"),
        _count(options, "maxRecordsPerPartition"),
        _flag(options, "failOnDataLoss", True),
        _count(options, "requestTimeoutMs") or REQUEST_TIMEOUT_MS,
    )


def initial_offsets(options: ReadOptions, held: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]:
    """Where a new query begins in partitions that hold offsets `beginning` to `end - 1`; one that startingOffsets does not name, at its beginning. Raises
    InvalidSettingError.
    """
    words = {"earliest": EARLIEST, "latest": LATEST}
    result = {}
    for key, (beginning, end) in held.items():
        wanted = words[options.starting] if isinstance(options.starting, str) else options.starting.get(key, EARLIEST)
        offset = {EARLIEST: beginning, LATEST: end}.get(wanted, wanted)
        if not beginning <= offset <= end:
            raise InvalidSettingError(
                f"startingOffsets asks for offset {offset} of {key.topic}-{key.partition}, which holds {beginning} to {end}"
            )
        result[key] = offset
    return result


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise InvalidSettingError(f"option {name} is {text!r}; it takes a whole number from 1 on")
    return number


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise InvalidSettingError(f"option {name} is {text!r}; it takes true or false")
    return text == "true"


def _with_unit(options: Mapping[str, str], name: str, kind: str, takes: str) -> int | None:
    """`kind`: a name whose ending says the unit, as `whole_number` knows them."""
    text = options.get(name.lower())
    if text is None:
        return None
    found = whole_number(kind, text.replace("min", "m") if kind.endswith("_ms") else text)
    if found is None or found < 1:
        raise InvalidSettingError(f"option {name} is {text!r}; it takes {takes}")
    return found
