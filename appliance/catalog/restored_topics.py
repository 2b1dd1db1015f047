"""Topics that the files of their partitions describe, for a start without a usable catalog.

Owner: pure.
Invariants:
- A topic is restored from the newest of its files.
- SurveyError is raised where the files contradict each other: two topics claim one name, one
  partition is in two places, or a partition is missing while others of its topic hold records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from appliance.catalog.catalog import PartitionRow, Topic
from appliance.catalog.deleted_topics import DeletedTopic, deleted_topic
from appliance.catalog.log_dir_scan import FoundPartition
from appliance.catalog.rows import SchemaVersion
from appliance.config.default_schema import DEFAULT_DELAY_SCHEMA_MESSAGE, DEFAULT_SCHEMA_MESSAGE
from tailrace.core.hash_slots import HandOver, births, missing_sources, owners_after, ranges_of
from tailrace.core.schedule.delays import DELAY_SUFFIX, delay_log_name
from tailrace.format.directory.partition_metadata import PARTITION_FILE, Decision, PartitionMetadata

SENTENCES_MAX = 5


class SurveyError(RuntimeError):
    """Contradictory or incomplete files; the message says what to do."""


class LiveSlot(NamedTuple):
    """A partition that processes serve while the catalog is rebuilt."""

    topic_id: bytes
    partition: int
    data_dir: int
    slot: int
    version: int


@dataclass(slots=True)
class Restored:
    """Topics that the partition files of all data directories describe together."""

    topics: list[Topic] = field(default_factory=list)
    """Partitions' `data_dir` is the index of the data directory here."""
    warnings: list[str] = field(default_factory=list)

    @staticmethod
    def with_numbers(topic: Topic, numbers: list[int]) -> Topic:
        """The topic with the catalog's numbers of the data directories."""
        return topic._replace(
            partitions=tuple(
                row._replace(data_dir=numbers[row.data_dir]) for row in topic.partitions
            ),
        )


def restored_topics(
    found: list[FoundPartition], live: list[LiveSlot], slot_count: int, dir_count: int, now_us: int
) -> Restored:
    """The topics that these directories belong to. Raises SurveyError."""
    by_topic: dict[str, list[FoundPartition]] = {}
    for each in found:
        by_topic.setdefault(each.topic, []).append(each)
    _leave_out_lonely_copies(by_topic)
    restored, wrong = Restored(), []
    slots = _Slots(live, slot_count)
    counts = Counter(dict.fromkeys(range(dir_count), 0))
    counts.update(each.data_dir for each in found)
    for name, directories in by_topic.items():
        try:
            topic = _restore(name, directories, slots, counts, restored.warnings, now_us)
        except SurveyError as error:
            wrong.append(str(error))
        else:
            restored.topics += [topic] if topic is not None else []
    if wrong:
        more = f" And {len(wrong) - SENTENCES_MAX} more." if len(wrong) > SENTENCES_MAX else ""
        raise SurveyError(" ".join(wrong[:SENTENCES_MAX]) + more)
    _match_delay_logs(restored)
    return restored


def _restore(
    name: str,
    directories: list[FoundPartition],
    slots: _Slots,
    counts: Counter[int],
    warnings: list[str],
    now_us: int,
) -> Topic | None:
    """Restore one topic; None if the directories belong to no topic.

    Raises: SurveyError.
    """
    known = [
        (each, each.file)
        for each in directories
        if each.file is not None and _is_its_own(each, each.file)
    ]
    if not known:
        _check_nothing_is_lost(name, directories, warnings)
        return None
    _check_one_topic(known)
    by_number = _newest_by_number(directories)
    newest = max(
        (file for _, file in known), key=lambda file: file.decision.version if file.decision else 0
    )
    decision = _decision_of(name, newest, max(by_number) + 1, warnings, now_us)
    count = max(decision.partition_count, max(by_number) + 1)
    _check_none_is_missing(name, directories, by_number, count, warnings)
    topic_id = newest.topic_id
    version = max([decision.version, *(slot.version for slot in slots.of(topic_id))])
    slot_counts = tuple(decision.slot_counts)
    if slot_counts and slot_counts[-1] < count:
        slot_counts = (*slot_counts, count)
    ranges = ranges_of(owners_after(slot_counts)) if slot_counts else {}
    ends = {(each.partition, end.version): end.end for each, file in known for end in file.map_ends}
    rows = tuple(
        PartitionRow(
            number, by_number[number].data_dir if number in by_number else _emptiest(counts),
            slots.take(topic_id, number, name), 0,
            ranges.get(number, ""), _hand_over(slot_counts, number, ends),
        )
        for number in range(count)
    )  # fmt: skip
    is_settled = (
        len(known) == count
        and newest.decision is not None
        and len({file.decision.version if file.decision else 0 for _, file in known}) == 1
        and not any(missing_sources(slot_counts, row.partition, row.hand_over) for row in rows)
    )
    return Topic(
        topic_id, name, "active" if is_settled else "changing",
        version if is_settled else version + 1, decision.typed, decision.schema_id,
        newest.schemas[decision.schema_id], dict(decision.given), rows, decision.created_us,
        bytes.fromhex(decision.delay_of), slot_counts, versions=_versions(newest, decision),
    )  # fmt: skip


def _leave_out_lonely_copies(by_topic: dict[str, list[FoundPartition]]) -> None:
    """A partition and that of its delay log are in one data directory. Where one was opened in
    another directory, and the other was not yet, nothing was appended there: leave its copy out.
    """
    for log_name in [name for name in by_topic if name.endswith(DELAY_SUFFIX)]:
        name = log_name.removesuffix(DELAY_SUFFIX)
        places: dict[int, list[set[int]]] = {}
        for at, each_name in enumerate((name, log_name)):
            for each in by_topic.get(each_name, ()):
                if not each.is_in_bin:
                    places.setdefault(each.partition, [set(), set()])[at].add(each.data_dir)
        for each_name in (name, log_name):
            by_topic[each_name] = [
                each
                for each in by_topic.get(each_name, ())
                if each.is_in_bin
                or not (common := set.intersection(*places[each.partition]))
                or each.data_dir in common
            ]
        if not by_topic[name]:
            del by_topic[name]


def _decision_of(
    name: str, newest: PartitionMetadata, count: int, warnings: list[str], now_us: int
) -> Decision:
    """The topic's decision; of an older build, which noted none, a guess. Raises SurveyError."""
    decision = newest.decision
    if decision is None:
        decision = _guessed(name, newest, count, now_us)
        warnings.append(
            f"topic={name} partitions={decision.partition_count} settings=unknown reason='written "
            "by an older build: everything is kept for ever'"
        )
    if decision.schema_id not in newest.schemas:
        raise SurveyError(f"{name}: its {PARTITION_FILE} lacks schema {decision.schema_id}.")
    return decision


def _check_one_topic(known: list[tuple[FoundPartition, PartitionMetadata]]) -> None:
    ids = {file.topic_id for _, file in known}
    if len(ids) > 1:
        places = " and ".join(sorted(each.path for each, _ in known))
        raise SurveyError(
            f"{places} belong to {len(ids)} topics of one name: move those of all but one away."
        )


def _newest_by_number(directories: list[FoundPartition]) -> dict[int, FoundPartition]:
    """Partition -> its newest directory. Raises SurveyError."""
    found: dict[int, FoundPartition] = {}
    for each in directories:
        other = found.get(each.partition)
        found[each.partition] = each if other is None else _newer(other, each)
    return found


def _check_none_is_missing(
    name: str,
    directories: list[FoundPartition],
    by_number: dict[int, FoundPartition],
    count: int,
    warnings: list[str],
) -> None:
    """Warn of partitions without a directory, or without a metadata file. Raises SurveyError when
    others hold records.
    """
    missing = [number for number in range(count) if number not in by_number]
    if missing and any(each.has_records for each in directories):
        shown = ", ".join(f"{name}-{number}" for number in missing[:SENTENCES_MAX])
        raise SurveyError(
            f"{len(missing)} of {count} partitions of topic {name} are missing ({shown}) and "
            "others hold records: list every directory in data_dirs. If they are lost, make "
            "empty directories of those names in a data directory."
        )
    if missing:
        warnings.append(f"topic={name} missing={missing} made=empty")
    lost = [number for number, each in by_number.items() if each.file is None]
    if lost:
        warnings.append(f"topic={name} without_partition_file={lost}")


def _versions(file: PartitionMetadata, decision: Decision) -> tuple[SchemaVersion, ...]:
    """The schema versions of a typed topic. Only the time of the first one is known."""
    if not decision.typed:
        return ()
    ids = sorted(schema_id for schema_id in file.schemas if schema_id <= decision.schema_id)
    return tuple(
        SchemaVersion(schema_id, file.schemas[schema_id], decision.created_us if not at else 0)
        for at, schema_id in enumerate(ids)
    )


def _newer(one: FoundPartition, other: FoundPartition) -> FoundPartition:
    """The newer of two directories of a partition, which has moved: it was opened with a later
    version of its topic. A copy in the bin is not opened yet; the other is as good. Raises
    SurveyError.
    """
    if one.is_in_bin != other.is_in_bin:
        return other if one.is_in_bin else one
    versions = [
        each.file.decision.version if each.file is not None and each.file.decision else 0
        for each in (one, other)
    ]
    if versions[0] == versions[1]:
        raise SurveyError(
            f"{one.path} and {other.path} hold the same partition: move the older one away."
        )
    return one if versions[0] > versions[1] else other


def _hand_over(
    counts: tuple[int, ...], partition: int, ends: dict[tuple[int, int], int]
) -> HandOver:
    """The end offsets of the partitions that gave slots to `partition`, as their metadata files
    have them.

    A partition whose file has none is asked for its log's end when the topic is sent to the
    workers.
    """
    birth = births(counts).get(partition) if counts else None
    if birth is None:
        return ()
    return tuple(
        (source, ends[source, birth.version])
        for source in birth.sources
        if (source, birth.version) in ends
    )


def _is_its_own(each: FoundPartition, file: PartitionMetadata) -> bool:
    """True if the file names this directory's partition: it is not a copy under another name."""
    return (file.topic, file.partition) == (each.topic, each.partition)


def _check_nothing_is_lost(
    name: str, directories: list[FoundPartition], warnings: list[str]
) -> None:
    full = [each.path for each in directories if each.has_records]
    copies = [each.path for each in directories if each.file is not None]
    if full and not copies:
        raise SurveyError(
            f"{full[0]} holds records, and no {PARTITION_FILE} names its topic: restore that "
            "file, or move the directory away."
        )
    warnings.append(
        f"directories={[each.path for each in directories][:SENTENCES_MAX]} topic={name} "
        "ignored=yes"
    )


def _guessed(name: str, file: PartitionMetadata, count: int, now_us: int) -> Decision:
    """A decision with safe settings, from metadata files of an older build."""
    schema_id = max(file.schemas)
    typed = file.schemas[schema_id] not in (DEFAULT_SCHEMA_MESSAGE, DEFAULT_DELAY_SCHEMA_MESSAGE)
    given: dict[str, Any] = {"retention.ms": -1, "retention.bytes": -1}
    return Decision(0, count, schema_id, typed, now_us, "", given)


def _emptiest(counts: Counter[int]) -> int:
    index = min(counts, key=lambda each: (counts[each], each))
    counts[index] += 1
    return index


def _match_delay_logs(restored: Restored) -> None:
    """Check that a topic with delays has its delay log, and a delay log its topic."""
    by_name = {topic.name: topic for topic in restored.topics}
    owners = {topic.topic_id for topic in restored.topics}
    kept = []
    for topic in restored.topics:
        if topic.name.endswith(DELAY_SUFFIX):
            owner = by_name.get(topic.name.removesuffix(DELAY_SUFFIX))
            if (topic.delay_of and topic.delay_of not in owners) or owner is None:
                restored.warnings.append(
                    f"delay_log={topic.name} ignored=yes reason='its topic is gone'"
                )
                continue
            kept.append(
                topic._replace(
                    delay_of=owner.topic_id, given={**topic.given, "delay.enabled": True}
                )
            )
        elif delay_log_name(topic.name) in by_name:
            kept.append(topic._replace(given={"delay.enabled": True, **topic.given}))
        elif topic.given.get("delay.enabled"):
            restored.warnings.append(
                f"topic={topic.name} delay.enabled=false reason='its delay log is gone'"
            )
            kept.append(topic._replace(given={**topic.given, "delay.enabled": False}))
        else:
            kept.append(topic)
    restored.topics = kept


class _Slots:
    """Slots that partitions have in shared memory, and free ones."""

    def __init__(self, live: list[LiveSlot], slot_count: int) -> None:
        self._live = {(slot.topic_id, slot.partition): slot for slot in live}
        taken = {slot.slot for slot in live}
        self._count = slot_count
        self._free: Iterator[int] = (slot for slot in range(slot_count) if slot not in taken)

    def of(self, topic_id: bytes) -> list[LiveSlot]:
        return [slot for (owner, _), slot in self._live.items() if owner == topic_id]

    def take(self, topic_id: bytes, partition: int, name: str) -> int:
        """Take the slot of a partition, or a free one.

        Raises: SurveyError.
        """
        live = self._live.get((topic_id, partition))
        slot = live.slot if live is not None else next(self._free, None)
        if slot is None:
            raise SurveyError(
                f"topic {name} needs more than the {self._count} partition slots of this "
                "appliance: raise `slots`."
            )
        return slot


def deleted_topics(
    binned: list[FoundPartition], numbers: list[int], now_us: int, expires_ms: int
) -> list[DeletedTopic]:
    """The topics that these directories of the bins belong to. `numbers`: the catalog's number of
    each data directory. A missing partition is noted as one in the first directory.
    """
    by_id: dict[bytes, list[FoundPartition]] = {}
    for each in binned:
        assert each.file is not None, "those without are left out"
        by_id.setdefault(each.file.topic_id, []).append(each)
    deleted = []
    for topic_id, directories in by_id.items():
        files = [each.file for each in directories if each.file is not None]
        newest = max(files, key=lambda file: file.decision.version if file.decision else 0)
        by_number = {each.partition: each for each in directories}
        decision = newest.decision or _guessed(newest.topic, newest, max(by_number) + 1, now_us)
        if decision.schema_id not in newest.schemas:
            continue
        counts = tuple(decision.slot_counts)
        ranges = ranges_of(owners_after(counts)) if counts else {}
        ends = {(file.partition, end.version): end.end for file in files for end in file.map_ends}
        rows = tuple(
            PartitionRow(
                number, numbers[by_number[number].data_dir if number in by_number else 0], 0, 0,
                ranges.get(number, ""), _hand_over(counts, number, ends),
            )
            for number in range(max(decision.partition_count, max(by_number) + 1))
        )  # fmt: skip
        topic = Topic(
            topic_id, newest.topic, "kept", decision.version, decision.typed, decision.schema_id,
            newest.schemas[decision.schema_id], dict(decision.given), rows, decision.created_us,
            bytes.fromhex(decision.delay_of), counts, versions=_versions(newest, decision),
        )  # fmt: skip
        deleted.append(deleted_topic(topic, now_us, expires_ms, 0))
    return deleted
