"""The decision log of the former sink, read once: at the first batch of a query that this sink
writes.

The former sink staged rows, and recorded in a topic of one partition which batch was decided, and
which was published. A record is valid if it names the newest valid record before it.

    {"on": offset, "kind": "claim" | "begin" | "done" | "void", "published": batch id, "rows"}

Owner: the driver's commit, which only reads it.
Invariants: a batch that the former sink has published is not written again. One that it has decided
and not finished is refused, since a part of it may be in the topics.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from dataclasses import dataclass
from typing import Any

from spark_bridge.sink.messages import Mark
from spark_bridge.sink.options import CLIENT_ID, SinkOptions
from tailrace.admin.admin import Admin
from tailrace.client.topics.topic_metadata import INTERNAL_PREFIX
from tailrace.core.errors import InvalidRequestError

logger = logging.getLogger("tailrace.spark")


@dataclass(slots=True)
class FormerState:
    """The state according to the log."""

    at: int = -1
    """The offset of the newest valid record; -1: there is none."""
    published: int = -1
    rows: int = -1
    open_batch: int = -1
    """The batch that is decided and not known to be published; -1: none."""

    def follow(self, offset: int, record: dict[str, Any]) -> None:
        """Take one more record, if it is valid."""
        if record["on"] != self.at:
            return
        kind, manifest = record["kind"], record.get("manifest")
        self.at, self.published = offset, int(record["published"])
        self.rows = int(record.get("rows", -1))
        if kind != "claim":
            self.open_batch = int(manifest["batch_id"]) if kind == "begin" and manifest else -1


def log_topic(identity: str) -> str:
    """The topic with the decisions of the former sink."""
    return f"{INTERNAL_PREFIX}sink_{_short(identity)}"


def topics_of(identity: str, names: list[str]) -> list[str]:
    """Those of these topics that the former sink has made: its log, and staged rows."""
    stages = f"{INTERNAL_PREFIX}stage_{_short(identity)}_"
    return [name for name in names if name == log_topic(identity) or name.startswith(stages)]


def _short(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def read_mark(identity: str, options: SinkOptions) -> Mark | None:
    """The last batch that the former sink has published; None: it has written none. Raises
    TailraceError, InvalidRequestError for a batch that it has not finished.
    """
    topic = log_topic(identity)
    with Admin(
        options.bootstrap, client_id=CLIENT_ID, connect_timeout_ms=options.publish_timeout_ms
    ) as admin:
        if topic not in admin.partition_counts(internal=True):
            return None
    state = _read(topic, options)
    if state.open_batch >= 0:
        raise InvalidRequestError(
            f"batch {state.open_batch} of this query was being published by the sink of an "
            "earlier build, which did not finish: a part of its rows may be in the topics. Start "
            "the query once with that build, which finishes the batch. To write the whole batch "
            "again instead, what is there of it twice, delete what the sink keeps of the query "
            "(spark_bridge.sink.writer.forget_query) and start it again"
        )
    if state.published < 0:
        return None
    logger.info("sink_moved topic=%s published=%d", topic, state.published)
    return Mark(state.published, state.rows)


def _read(topic: str, options: SinkOptions) -> FormerState:
    from tailrace import scan

    state, is_first = FormerState(), True
    for batch in scan(topic, options.bootstrap, columns=["offset", "value"]):
        for row in batch.to_pylist():
            record = _decoded(row["value"])
            if record is not None:
                if is_first:
                    record["on"] = -1  # earlier records are deleted; the first is valid
                state.follow(row["offset"], record)
            is_first = False
    return state


def _decoded(value: bytes | None) -> dict[str, Any] | None:
    """Decode a record; None for one that the sink has not written."""
    try:
        record = json.loads(zlib.decompress(value or b""))
        return record if type(record["on"]) is int and record["kind"] else None
    except (zlib.error, ValueError, TypeError, KeyError):
        return None
