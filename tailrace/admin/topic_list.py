"""The list of all topics, fetched page by page."""

from __future__ import annotations

from tailrace.client.connections.steps import Call, Steps
from tailrace.client.topics.topic_metadata import is_internal
from tailrace.protocol.frame import Api


def partition_counts(call: Call, internal: bool = False) -> Steps[dict[str, int]]:
    """Topic -> partition count, names ascending. `call` makes a request. `internal` adds topics
    that are not a user's (see `tailrace.client.topics.topic_metadata`).
    """
    counts: dict[str, int] = {}
    after: str | None = ""
    while after is not None:
        answer = yield from call(Api.METADATA, {"topics": None, "names_only": True, "after": after})
        counts.update(
            (topic["name"], topic["partitions"])
            for topic in answer["topics"]
            if internal or not is_internal(topic["name"])
        )
        after = answer.get("after")
    return counts
