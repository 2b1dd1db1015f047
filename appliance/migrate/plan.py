"""The plan of a migration: which topics, with which settings, and what stands against it.

Owner: pure, but for what it asks of both sides.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from appliance.migrate.clusters.kafka_client import TopicDescription
from appliance.migrate.errors import MigrationError
from appliance.migrate.journal import Journal, is_journal
from appliance.migrate.offset_map import Mode
from appliance.migrate.topic_settings import Mapped
from tailrace.core.topic_partition import TopicPartition

INTERNAL = "__"
"""The beginning of Kafka's internal topics, which no pattern chooses."""


class Cluster(Protocol):
    """The topics of one side."""

    def topic_names(self) -> Mapping[str, int]: ...

    def describe(self, names: Collection[str]) -> Mapping[str, TopicDescription]: ...


class Creator(Protocol):
    """The topics of the other side."""

    def topics(self) -> Mapping[str, int]: ...

    def refusal_of(self, name: str, partitions: int, configs: Mapping[str, str]) -> str: ...


@dataclass(slots=True)
class TopicPlan:
    """One topic."""

    source: TopicDescription
    mapped: Mapped
    first: int = 0
    """The lowest offset of a partition in the source."""
    offset_count: int = 0
    """The sum of the partitions' offsets, which is the number of records without gaps."""
    refusals: list[str] = field(default_factory=list)
    exists: bool = False
    was_begun: bool = False
    keeps_offsets: bool = True
    """The target can keep offsets."""

    @property
    def offsets(self) -> str:
        """`kept` or `mapped`, as far as can be foreseen."""
        is_compacted = "compact" in self.source.configs.get("cleanup.policy", "")
        if (
            not self.keeps_offsets
            or self.first
            or is_compacted
            or (self.exists and not self.was_begun)
        ):
            return "mapped"
        return "kept"


def chosen_topics(patterns: Sequence[str], existing: Collection[str]) -> list[str]:
    """The topics that names and patterns (`orders`, `shop.*`) choose. Raises MigrationError."""
    found: dict[str, None] = {}
    parts = [part.strip() for pattern in patterns for part in pattern.split(",") if part.strip()]
    for pattern in parts:
        if pattern in existing:
            found[pattern] = None
            continue
        matching = [
            name
            for name in sorted(existing)
            if fnmatch.fnmatchcase(name, pattern)
            and not name.startswith(INTERNAL)
            and not is_journal(name)
        ]
        if not matching:
            raise MigrationError(
                f"the source has no topic {pattern!r}. Write names, or patterns such as 'shop.*', "
                "with commas between them."
            )
        found.update(dict.fromkeys(matching))
    if not found:
        raise MigrationError("--topics names no topic.")
    return list(found)


def check_topic(
    plan: TopicPlan, creator: Creator, existing: Mapping[str, int], journal: Journal, appends: bool
) -> None:
    """Note what stands against a topic."""
    name, count = plan.source.name, plan.source.partition_count
    maps = [journal.maps.get(TopicPartition(name, number)) for number in range(count)]
    plan.was_begun = any(found is not None and found.mode is not Mode.NEW for found in maps)
    plan.exists = name in existing
    if not plan.exists:
        if plan.was_begun:
            plan.refusals.append(
                f"topic {name} was copied and is gone from the target. Begin under another --name."
            )
        refusal = creator.refusal_of(name, count, plan.mapped.configs)
        if refusal:
            plan.refusals.append(f"topic {name} cannot be created: {refusal}")
    elif existing[name] != count and not (plan.was_begun and existing[name] < count):
        plan.refusals.append(
            f"topic {name} has {count} partitions in the source and {existing[name]} in the "
            "target. Delete it there, or give it as many."
        )
    begun_id = journal.topic_ids.get(name, "")
    if begun_id and plan.source.topic_id and begun_id != plan.source.topic_id:
        plan.refusals.append(
            f"topic {name} was deleted and created again in the source. Begin under another "
            "--name, with a new topic in the target."
        )
    if appends and plan.exists:
        plan.mapped.notes.append(
            "records are appended to those of the target; offsets are mapped"
            if plan.keeps_offsets
            else "all records are written behind those of the target, also those that once came "
            "from it"
        )


def unmapped_partitions(
    plans: Sequence[TopicPlan], existing: Mapping[str, int], journal: Journal
) -> list[TopicPartition]:
    """Partitions that the target has and whose copy has not begun."""
    return [
        each
        for each in partitions_of(plans)
        if each.partition < existing.get(each.topic, 0)
        and (each not in journal.maps or journal.maps[each].mode is Mode.NEW)
    ]


def taken_sentence(topic: str, *, keeps_offsets: bool) -> str:
    """The refusal of a topic of the target that has records of others."""
    advice = (
        "Delete it there, or append with --append, which maps offsets."
        if keeps_offsets
        else "Delete it in Kafka first; --append would write all records again behind those."
    )
    return (
        f"the topic {topic} of the target has records that this migration did not bring. {advice}"
    )


def partitions_of(plans: Sequence[TopicPlan]) -> list[TopicPartition]:
    """All partitions of the source's topics."""
    return [
        TopicPartition(plan.source.name, number)
        for plan in plans
        for number in range(plan.source.partition_count)
    ]
