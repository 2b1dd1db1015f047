"""A migration: its plan, its sessions, its groups, and the switch.

Owner: the process that runs `tailrace migrate`.
Invariants:
- Nothing is created or written before the plan is without refusals.
- A session that is interrupted is followed by another one, from what the target has.
Crash: the journal and the target's logs are all that a later run needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from appliance.migrate.errors import InterruptedSessionError, MigrationError, TakenOverError
from appliance.migrate.groups import CopiedGroups, GroupSource, copy_groups
from appliance.migrate.journal import Journal
from appliance.migrate.plan import (
    Cluster,
    TopicPlan,
    check_topic,
    chosen_topics,
    partitions_of,
    taken_sentence,
    unmapped_partitions,
)
from appliance.migrate.session import Counts, Session, Source, Target
from appliance.migrate.switch_checks import (
    STILL_WRITTEN,
    leftovers,
    refuse_members,
    refuse_offsets,
)
from appliance.migrate.topic_settings import Mapped
from shm.crash_points import crash_point
from tailrace.core.errors import NotReachableError, RequestTimeoutError, TailraceError
from tailrace.core.topic_partition import TopicPartition

GROUPS_S = 10.0
RETRY_S = 300.0
"""A copy that gets no further for this long is given up."""
BACKOFF_S = 0.2
BACKOFF_MAX_S = 5.0
FOLLOWER_ENDED = "A copy with --follow has ended with this attempt: start it again."
QUIET_S = 2.0
"""Nothing may come for this long before the switch."""


class SourceCluster(Cluster, GroupSource, Protocol):
    """The source's topics and groups."""


class TargetCluster(Target, Protocol):
    """The target's topics, groups and records."""

    def topics(self) -> Mapping[str, int]: ...

    def refusal_of(self, name: str, partitions: int, configs: Mapping[str, str]) -> str: ...

    def create(self, name: str, partitions: int, configs: Mapping[str, str]) -> None: ...

    def add_partitions(self, name: str, partitions: int) -> None: ...

    def alter(self, name: str, configs: Mapping[str, str]) -> None: ...

    def peek(self) -> list[bytes | None]: ...

    def end(self) -> None: ...

    def set_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, tuple[int, str]]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """The user's choices."""

    name: str
    topics: Sequence[str]
    groups: Sequence[str]
    isolation: str = "read_committed"
    appends: bool = False
    left_out: Sequence[str] = ()
    rate: int = 0
    """Bytes of keys and values a second; 0: as fast as it goes."""
    session: Mapping[str, Any] = field(default_factory=dict)
    """Added to the journal's entry of the session."""


class Report(Protocol):
    """Hears of what happens."""

    def note(self, sentence: str) -> None: ...

    def progress(self, session: Session, lag: int) -> None: ...

    def caught_up(self, session: Session) -> None: ...


def is_passing(error: TailraceError) -> bool:
    """True if the same may succeed in a moment."""
    return error.retriable or isinstance(error, NotReachableError | RequestTimeoutError)


class Migration:
    """One migration, in one process."""

    def __init__(
        self,
        source: SourceCluster,
        make_source: Callable[[str], Source],
        target: TargetCluster,
        map_settings: Callable[..., Mapped],
        options: Options,
        report: Report,
    ) -> None:
        """`make_source`: a reader of the source, by its isolation level. `map_settings`: settings
        of a topic in the source, and names to leave out, as they become in the target.
        """
        self.source = source
        self._make_source = make_source
        self.target = target
        self.options = options
        self.counts = Counts()
        self.is_stopped = False
        """Set by a signal: the copy ends at the next record."""
        self.is_taken_over = False
        """Another run of the same name has ended this one."""
        self._map_settings = map_settings
        self._report = report
        self._begun_s = time.monotonic()

    # ---- the plan --------------------------------------------------------------------------------

    def plan(self) -> list[TopicPlan]:
        """The plan, which changes nothing. Raises MigrationError."""
        return self._plan(Journal(self.target.peek()))

    def _plan(self, journal: Journal) -> list[TopicPlan]:
        if journal.switched_ms is not None:
            raise MigrationError(
                f"the migration {self.options.name} was switched already. Another one needs "
                "another --name."
            )
        patterns = self.options.topics or journal.session.get("topics", ())
        if not patterns:
            raise MigrationError("give --topics: names, or patterns such as 'shop.*'.")
        names = chosen_topics(patterns, self.source.topic_names())
        existing = self.target.topics()
        plans = []
        for description in self.source.describe(names).values():
            plan = TopicPlan(
                description,
                self._map_settings(description.configs, self.options.left_out),
                keeps_offsets=self.target.writes_plainly,
            )
            check_topic(plan, self.target, existing, journal, self.options.appends)
            plans.append(plan)
        source = self._make_source(self.options.isolation)
        try:
            bounds = source.bounds(partitions_of(plans))
        except InterruptedSessionError as error:
            raise MigrationError(str(error)) from None
        finally:
            source.close()
        self._refuse_taken(plans, existing, journal)
        for plan in plans:
            found = [bounds[each] for each in partitions_of([plan])]
            plan.first = min((first for first, _ in found), default=0)
            plan.offset_count = sum(end - first for first, end in found)
        return plans

    def _refuse_taken(
        self, plans: Sequence[TopicPlan], existing: Mapping[str, int], journal: Journal
    ) -> None:
        """Note topics of the target with records of others."""
        asked = unmapped_partitions(plans, existing, journal)
        if self.options.appends or not asked:
            return
        try:
            ends = self.target.ends(asked)
        except InterruptedSessionError as error:
            raise MigrationError(str(error)) from None
        taken = {partition.topic for partition, end in ends.items() if end}
        for plan in plans:
            if plan.source.name in taken:
                plan.refusals.append(
                    taken_sentence(plan.source.name, keeps_offsets=plan.keeps_offsets)
                )

    # ---- the copy --------------------------------------------------------------------------------

    def run(self, *, follow: bool = False, switches: bool = False, is_forced: bool = False) -> bool:
        """Copy up to the end of the source; with `follow` on and on; with `switches` to the very
        end. Returns True if every partition has everything. Raises MigrationError.
        """
        plans = self._plan(Journal(self._guarded_peek()))
        refusals = [sentence for plan in plans for sentence in plan.refusals]
        if refusals:
            raise MigrationError(" ".join(refusals))
        if switches and not is_forced:
            refuse_members(self.source, plans, self.options.groups)
        self._create(plans)
        progress_s, backoff_s, copied = time.monotonic(), BACKOFF_S, 0
        while True:
            session = None
            try:
                session = self._begin(plans)
                return self._copy_and_note_end(session, plans, follow, switches, is_forced)
            except TakenOverError as error:
                self._report.note(str(error))
                self.is_taken_over = True
                return False
            except (InterruptedSessionError, TailraceError) as error:
                if isinstance(error, TailraceError) and not is_passing(error):
                    raise
                if self.counts.records != copied:
                    copied, progress_s, backoff_s = self.counts.records, time.monotonic(), BACKOFF_S
                if self.is_stopped:
                    return False
                if time.monotonic() > progress_s + RETRY_S:
                    raise MigrationError(
                        f"the copy has got no further for {RETRY_S:.0f} s: {error}. Run this again "
                        "when both sides answer; it goes on where it was."
                    ) from None
                self._report.note(f"interrupted: {error}; going on")
                time.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            finally:
                if session is not None:
                    session.source.close()
                self.target.close()

    def _guarded_peek(self) -> list[bytes | None]:
        try:
            return self.target.peek()
        except InterruptedSessionError as error:
            raise MigrationError(str(error)) from None

    def _create(self, plans: Sequence[TopicPlan]) -> None:
        existing = self.target.topics()
        for plan in plans:
            name, count = plan.source.name, plan.source.partition_count
            for sentence in plan.mapped.notes:
                self._report.note(f"{name}: {sentence}")
            if name not in existing:
                self.target.create(name, count, plan.mapped.configs)
                crash_point("migrate.after_create")
            elif existing[name] < count:
                self.target.add_partitions(name, count)

    def _begin(self, plans: Sequence[TopicPlan]) -> Session:
        journal = Journal(self.target.open())
        if journal.switched_ms is not None:
            raise MigrationError(f"the migration {self.options.name} was switched meanwhile.")
        entry = {
            "kind": "session", "at_ms": time.time_ns() // 1_000_000,
            "topics": list(self.options.topics or journal.session.get("topics", ())),
            "groups": list(self.options.groups), **self.options.session,
        }  # fmt: skip
        self.target.commit(lambda _: [entry])
        journal.add(entry)
        session = Session(
            self._make_source(self.options.isolation),
            self.target,
            journal,
            {plan.source.name: plan.source.topic_id for plan in plans},
            self.counts,
            appends=self.options.appends,
        )
        try:
            session.begin(partitions_of(plans))
        except BaseException:
            session.source.close()
            raise
        return session

    def _copy_and_note_end(
        self,
        session: Session,
        plans: Sequence[TopicPlan],
        follow: bool,
        switches: bool,
        is_forced: bool,
    ) -> bool:
        try:
            is_complete = self._copy(session, plans, follow, switches, is_forced)
        except TakenOverError:
            raise
        except MigrationError as error:
            self._note_end(session)
            if switches:
                raise MigrationError(f"{error} {FOLLOWER_ENDED}") from None
            raise
        self._note_end(session)
        return is_complete

    def _note_end(self, session: Session) -> None:
        try:
            session.note_end()
        except (InterruptedSessionError, MigrationError, TailraceError) as error:
            self._report.note(f"the journal does not know that this run has ended: {error}")

    def _copy(
        self,
        session: Session,
        plans: Sequence[TopicPlan],
        follow: bool,
        switches: bool,
        is_forced: bool,
    ) -> bool:
        groups_at_s = time.monotonic() + GROUPS_S
        was_at_end = False
        while not self.is_stopped:
            session.step()
            self._keep_rate()
            session.note_progress()
            now_s = time.monotonic()
            self._report.progress(session, -1)
            if session.is_at_end and not was_at_end:
                was_at_end = True
                if not follow:
                    break
                session.finish()
                self._try_to_copy_groups(session)
                self._report.caught_up(session)
                groups_at_s = now_s + GROUPS_S
            was_at_end = session.is_at_end
            if follow and now_s >= groups_at_s:
                session.finish()
                self._try_to_copy_groups(session)
                groups_at_s = now_s + GROUPS_S
        session.finish()
        session.note_progress(is_forced=True)
        for sentence in session.refused.values():
            self._report.note(sentence)
        if switches and not self.is_stopped and not session.refused:
            self._switch(session, plans, is_forced)
        else:
            self._copy_groups(session)
        if not self.is_stopped:
            self._report.caught_up(session)
        return not session.refused and not self.is_stopped

    def _keep_rate(self) -> None:
        rate = self.options.rate
        if rate:
            ahead_s = self.counts.byte_count / rate - (time.monotonic() - self._begun_s)
            while ahead_s > 0 and not self.is_stopped:
                time.sleep(min(ahead_s, 0.2))
                ahead_s -= 0.2

    # ---- groups and the switch -------------------------------------------------------------------

    def _try_to_copy_groups(self, session: Session) -> None:
        """Copy groups while the copy follows: what fails now is done again later."""
        try:
            self._copy_groups(session)
        except TakenOverError:
            raise
        except MigrationError as error:
            self._report.note(f"the offsets of groups are set later: {error}")

    def _copy_groups(self, session: Session) -> CopiedGroups:
        ends = {
            partition: max(standing.source_next, standing.end_seen)
            for partition, standing in session.standings.items()
        }
        if not self.options.groups:
            return CopiedGroups()
        copied = copy_groups(self.source, self.target, session.journal, ends, self.options.groups)
        crash_point("migrate.after_groups")
        for group, sentence in copied.refused.items():
            self._report.note(f"the offsets of group {group} were not set: {sentence}")
        return copied

    def _switch(self, session: Session, plans: Sequence[TopicPlan], is_forced: bool) -> None:
        """Make sure that nothing comes any more, then copy the offsets a last time. A stop leaves
        the migration as it was.
        """
        until_s = time.monotonic() + QUIET_S
        while time.monotonic() < until_s and not self.is_stopped:
            count = session.step()
            if count and not is_forced:
                raise MigrationError(STILL_WRITTEN)
        session.finish()
        if self._was_stopped():
            return
        if session.refused:
            raise MigrationError(" ".join(session.refused.values()))
        left_behind = leftovers(session, is_forced=is_forced)
        if left_behind:
            self._report.note(left_behind)
        if not is_forced:
            refuse_members(self.source, plans, self.options.groups)
        copied = self._copy_groups(session)
        if not is_forced:
            refuse_offsets(copied)
        if self._was_stopped():
            return
        for plan in plans:
            if plan.mapped.at_switch:
                self.target.alter(plan.source.name, plan.mapped.at_switch)
        crash_point("migrate.before_switch")
        session.commit([{"kind": "switched", "at_ms": time.time_ns() // 1_000_000}])
        self.is_stopped = False  # a stop has come too late
        count = len(copied.groups)
        self._report.note(
            f"switched: {'' if is_forced else 'the lag is zero, '}"
            f"{f'{count} groups have their' if count != 1 else '1 group has its'} offsets. "
            "Start producers and consumers on the target."
        )

    def _was_stopped(self) -> bool:
        return self.is_stopped  # set by a signal, at any time
