"""Derived topics: retry topics and dead-letter topics that clients create for an origin topic.

A derived topic gets the settings KEPT from its origin when it is created. Its setting
`derived.from` names the origin, so that both can be deleted together (`Admin.delete_topics(...,
with_derived=True)`). Its max.message.bytes is ADDED_BYTES more than the origin's. Every record of
the origin fits, with headers that name its source. It is raised when the origin's was. Other
settings stay as an operator has set them. `durability` is always `disk`, since the original record
is given up. The origin's compaction is not passed on.

Owner: pure, except for the requests of `call`.
Invariants: a topic that `dead.letter.topic` names belongs to its operator. It is created if it is
    missing, and never altered.
Crash: the next client that needs the topic completes an interrupted change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tailrace.client.connections.steps import Call, Steps
from tailrace.client.topics.new_topic import create_request
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import InvalidSettingError, TopicExistsError, UnknownTopicError, error_for
from tailrace.protocol.frame import Api

ORIGIN = "derived.from"
ADDED_BYTES = 16 << 10
"""Room for the headers that are added to a record: a reason of 1,000 characters, names, numbers."""
KEPT = ("retention.ms", "retention.bytes", "segment.bytes", "segment.ms", "compression.type")
TOPICS_AT_ONCE = 16
"""Topics in one METADATA request. The response has their schemas."""


def configs_of(origin: TopicInfo, *, is_own: bool = True) -> dict[str, Any]:
    """The settings of a topic derived from `origin`. `is_own`: it has no other origin."""
    configs = {name: origin.settings[name] for name in KEPT if name in origin.settings}
    configs["cleanup.policy"] = "delete"  # two records of one key may be two failures
    configs["max.message.bytes"] = origin.settings["max.message.bytes"] + ADDED_BYTES
    return {**configs, ORIGIN: origin.topic_id.hex()} if is_own else configs


def ensure(
    call: Call,
    name: str,
    origin: TopicInfo,
    more: dict[str, Any] | None = None,
    *,
    is_own: bool = True,
) -> Steps[TopicInfo | None]:
    """The topic `name` derived from `origin`, created or altered as needed. None: the change is
    under way. Call again.

    `more`: settings beside those of the origin. `is_own`: see `configs_of`. A topic with other
    origins is never altered. Raises the appliance's errors.
    """
    requested = {**configs_of(origin, is_own=is_own), **(more or {})}
    found = yield from _known(call, name)
    if found is None:
        try:
            yield from _with_room(
                requested,
                lambda configs: _change(
                    call, Api.CREATE_TOPICS, create_request(name, len(origin.partitions), configs)
                ),
            )
        except TopicExistsError:
            return None
        return (yield from _known(call, name))
    if not is_own:
        return found
    changed = {
        key: requested[key]
        for key in (ORIGIN, *(more or {}))
        if found.settings.get(key) != requested[key]
    }
    if found.settings["max.message.bytes"] < requested["max.message.bytes"]:
        changed["max.message.bytes"] = requested["max.message.bytes"]
    request: dict[str, Any] = {"name": name}
    if len(found.partitions) < len(origin.partitions):
        request["partitions"] = len(origin.partitions)
    if not changed and len(request) == 1:
        return found
    room = yield from _with_room(
        changed, lambda configs: _change(call, Api.ALTER_TOPICS, {**request, "configs": configs})
    )
    is_as_large_as_can_be = (
        not room and found.settings["max.message.bytes"] >= origin.settings["max.message.bytes"]
    )
    return (
        found
        if is_as_large_as_can_be and changed.keys() == {"max.message.bytes"} and len(request) == 1
        else None
    )


def _known(call: Call, name: str) -> Steps[TopicInfo | None]:
    """The topic as the front knows it now, or None."""
    try:
        return topics_from_metadata((yield from call(Api.METADATA, {"topics": [name]})), name)[name]
    except UnknownTopicError:
        return None


def _with_room(
    configs: dict[str, Any], change: Callable[[dict[str, Any]], Steps[None]]
) -> Steps[bool]:
    """Make a change, without ADDED_BYTES if the appliance's lanes are too small for them. Returns
    True with them.
    """
    try:
        yield from change(configs)
    except InvalidSettingError:
        if "max.message.bytes" not in configs:
            raise
        yield from change(
            {**configs, "max.message.bytes": configs["max.message.bytes"] - ADDED_BYTES}
        )
        return False
    return True


def _change(call: Call, api: Api, request: dict[str, Any]) -> Steps[None]:
    (result,) = (yield from call(api, {"topics": [request], "validate_only": False}))["results"]
    if result["code"] != ErrorCode.OK:
        raise error_for(code_of(result["code"]), result.get("message", ""))


def derived_from(call: Call, origins: list[str], existing: Iterable[str]) -> Steps[dict[str, str]]:
    """The existing topics derived from `origins`, directly or not: name -> the name of its origin.
    Dead-letter topics that other topics name are left out. Raises UnknownTopicError.
    """
    names = [name for name in existing if name not in origins]
    infos: dict[str, TopicInfo] = {}
    for start in range(0, len(names), TOPICS_AT_ONCE):
        answer = yield from call(Api.METADATA, {"topics": names[start : start + TOPICS_AT_ONCE]})
        # A topic may have been deleted meanwhile.
        present = [one for one in answer["topics"] if one.get("code") != ErrorCode.UNKNOWN_TOPIC]
        infos.update(topics_from_metadata({**answer, "topics": present}))
    ids = {}
    for start in range(0, len(origins), TOPICS_AT_ONCE):
        some = origins[start : start + TOPICS_AT_ONCE]
        answer = yield from call(Api.METADATA, {"topics": some})
        ids.update(
            {
                info.topic_id.hex(): info.name
                for info in topics_from_metadata(answer, *some).values()
            }
        )
    found: dict[str, str] = {}
    while more := {
        name: ids[origin]
        for name, info in infos.items()
        if name not in found and (origin := info.settings.get(ORIGIN, "")) in ids
    }:
        found.update(more)
        ids.update({infos[name].topic_id.hex(): name for name in more})
    used = {
        info.settings.get("dead.letter.topic") for name, info in infos.items() if name not in found
    }
    return {name: origin for name, origin in found.items() if name not in used}
