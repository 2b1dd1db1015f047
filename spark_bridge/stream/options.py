"""Options of `spark.readStream`: those of a batch read that choose the data, and limits of a
micro-batch.

Names and meanings are those of Spark's Kafka source: maxOffsetsPerTrigger, minOffsetsPerTrigger,
maxTriggerDelay; the default of startingOffsets is "latest". Tailrace's own is maxBytesPerTrigger (a
soft limit, as Delta's), and schemaChange.

Invariants: pure. An unknown option, or a value out of range, is refused by name before any request
to the appliance.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from spark_bridge.source.read_options import NAMES, ReadOptions, parse_options
from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import whole_number

STARTS = ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp")
MAX_TRIGGER_DELAY_MS = 900_000


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream, checked."""

    read: ReadOptions
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_trigger_delay_ms: int = MAX_TRIGGER_DELAY_MS
    max_bytes: int | None = None
    stops_at_new_schema: bool = False
    """True: the query stops when a topic's schema was altered. False: it goes on with the columns
    that it began with.
    """

    @property
    def task_count_max(self) -> int:
        """Most tasks of a micro-batch: the larger of minPartitions and this machine's number of
        cores.
        """
        return max(self.read.min_partitions or 0, len(os.sched_getaffinity(0)))


def parse_stream_options(given: Mapping[str, str]) -> StreamOptions:
    """Check the options of spark.readStream. Raises InvalidSettingError, which names the option."""
    options = {name.lower(): value for name, value in given.items()}
    if not any(name in STARTS for name in options):
        options["startingoffsets"] = "latest"
    read = parse_options(options)
    for name in given:
        if name.lower().startswith("ending"):
            raise InvalidSettingError(
                f"option {NAMES.get(name.lower(), name)} is for batch reads: a stream has no end "
                "(a batch read, or Trigger.AvailableNow, has one)"
            )
    if read.is_latest:
        raise InvalidSettingError(
            "view=latest is for batch reads: a stream has every change, of which your query takes "
            "the latest"
        )
    most, least = _number(options, "maxOffsetsPerTrigger"), _number(options, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise InvalidSettingError(
            f"minOffsetsPerTrigger is {least} and maxOffsetsPerTrigger {most}: lower "
            "minOffsetsPerTrigger"
        )
    return StreamOptions(
        read,
        most,
        least,
        _number(
            options, "maxTriggerDelay", "delay_ms", "milliseconds, or a duration such as 30s or 15m"
        )
        or MAX_TRIGGER_DELAY_MS,
        _number(
            options,
            "maxBytesPerTrigger",
            "max_bytes",
            "a number of bytes from 1 on, or a size such as 64MiB",
        ),
        _stops_at_new_schema(options),
    )


def _stops_at_new_schema(options: Mapping[str, str]) -> bool:
    chosen = options.get("schemachange", "keep")
    if chosen.lower() not in ("keep", "stop"):
        raise InvalidSettingError(f"option schemaChange is {chosen!r:.100}; it takes keep or stop")
    return chosen.lower() == "stop"


def _number(
    options: Mapping[str, str],
    name: str,
    kind: str = "count",
    takes: str = "a whole number from 1 on",
) -> int | None:
    """`kind`: a name whose ending says the unit, as `whole_number` knows them."""
    text = options.get(name.lower())
    if text is None:
        return None
    found = whole_number(kind, text.replace("min", "m") if kind.endswith("_ms") else text)
    if found is None or found < 1:
        raise InvalidSettingError(f"option {name} is {text!r}; it takes {takes}")
    return found
