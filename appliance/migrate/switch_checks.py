"""Checks before a switch: nothing is written to the source any more, and its groups are at rest.

Owner: pure; they change nothing.
Invariants: a switch that is not forced leaves no record and no offset behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.migrate.errors import MigrationError
from appliance.migrate.groups import CopiedGroups, GroupSource, active_groups
from appliance.migrate.plan import TopicPlan, partitions_of
from appliance.migrate.session import Session

STILL_WRITTEN = (
    "records are still written to the source. Stop its producers first, or switch with --force, "
    "which may leave later records behind."
)


def refuse_members(source: GroupSource, plans: Sequence[TopicPlan], groups: Sequence[str]) -> None:
    """Raise MigrationError if consumers of the source still run. A copy that follows goes on."""
    active = active_groups(source, set(partitions_of(plans)), groups)
    if active:
        raise MigrationError(
            f"groups have members in the source: {', '.join(active)}. Stop their consumers "
            "first, or switch with --force, after which these read records twice."
        )


def leftovers(session: Session, *, is_forced: bool) -> str:
    """A sentence about records that stay behind; empty: there are none. Unless `is_forced`, raises
    MigrationError if the source has records that are not copied: behind an open transaction, or
    just written.
    """
    partitions = list(session.standings)
    sentence = ""
    unstable = session.source.unstable(partitions)
    if unstable:
        where = ", ".join(
            f"{each.topic}-{each.partition} (offsets {stable} to {end - 1})"
            for each, (stable, end) in sorted(unstable.items())
        )
        sentence = f"records behind an open transaction of the source are not copied: {where}."
        if not is_forced:
            raise MigrationError(
                f"{sentence} Let its producer commit or abort it, or wait for its time limit, "
                "then switch again; --force leaves these records behind."
            )
    if not is_forced and session.lag(session.source.bounds(partitions)):
        raise MigrationError(STILL_WRITTEN)
    return sentence


def refuse_offsets(copied: CopiedGroups) -> None:
    """Raise MigrationError if the offsets of a group could not be set as they are in the source."""
    if copied.refused:
        raise MigrationError(
            f"the offsets of groups were refused: {', '.join(sorted(copied.refused))}. Stop "
            "their consumers in the target first, or switch with --force."
        )
    if copied.waiting:
        raise MigrationError(
            f"groups have offsets behind the last record: {', '.join(copied.waiting)}. Look "
            "at them in the source, or switch with --force, which leaves these offsets out."
        )
