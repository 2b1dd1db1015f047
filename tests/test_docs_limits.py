"""docs/limits.md is true of groups: every bound in the code has a row, with its value and a
test.
"""

from __future__ import annotations

import dataclasses
import re

from appliance.groups.agent import agent
from appliance.groups.base import limits
from appliance.groups.share import request_validation as share_requests
from netfront.forward import forwarder as deciders
from tailrace.protocol import json_messages as requests
from tests.kit.runs.documents import ROOT

BOUNDS_OF_GROUPS = {
    "GROUP_NAME_MAX": ("a group's name", "{:,} characters"),
    "MEMBER_ID_MAX": ("ids and names of a member", "{:,} characters of its id"),
    "PATTERN_MAX": ("ids and names of a member", "; {:,} of a pattern"),
    "CLIENT_TEXT_MAX": ("ids and names of a member", "{:,} of client and instance id"),
    "TOPICS_MAX": ("topics that a member subscribes to; characters of a name", "{:,};"),
    "TOPIC_NAME_MAX": ("topics that a member subscribes to; characters of a name", "; {:,}"),
    "MEMBERS_IN_ALL_MAX": ("members of all consumer groups; their subscriptions", "{:,};"),
    "SUBSCRIPTIONS_MAX_BYTES": (
        "members of all consumer groups; their subscriptions",
        "; {:,} bytes",
    ),
    "PARTITIONS_FOLLOWED_MAX": (
        "partitions that consumer groups subscribe to, summed over the groups",
        "{:,}",
    ),
    "SHARED_PARTITIONS_MAX": (
        (
            "members of all share groups; their subscriptions; partitions that share groups have "
            "begun on, summed"
        ),
        "; {:,}",
    ),
    "SHARE_ACQUIRED_MAX": (
        "unacknowledged records of one member of a share group",
        "{:,}",
    ),
    "COMMITS_MAX": ("partitions in one commit; metadata of each", "{:,};"),
    "PARTITIONS_ASKED_MAX": ("partitions whose offsets are asked for in one request", "{:,};"),
    "DELETED_AT_ONCE_MAX": ("groups deleted in one request", "{:,}"),
    "REBALANCE_TIMEOUT_MAX_MS": ("rebalance timeout (`max_poll_interval_ms`)", "{:,} ms"),
    "members_max": ("members of a group", "{:,}"),
    "groups_max": ("groups", "{:,}"),
    "session_timeout_min_ms": ("session timeout", "{:,} ms to"),
    "session_timeout_max_ms": ("session timeout", "to {:,} ms"),
    "offsets_retention_minutes": ("committed offsets of a group without members", "{:,} minutes"),
    "metadata_bytes_max": ("partitions in one commit; metadata of each", "; {:,} bytes"),
    "REQUESTS_AT_ONCE": ("requests that one step of the process takes from a front", "{:,},"),
    "ANSWERS_MAX": ("responses that a front does not read", "{:,};"),
    "PUSHES_MAX": ("responses that a front does not read", "above {:,}"),
    "CLOSED_MAX": ("ends of sessions that wait for the process, for each front", "{:,}"),
    "SHARE_RUNS_MAX": (
        "runs of offsets in one acknowledgement; records in one SHARE_ACQUIRE",
        "{:,};",
    ),
    "RECORDS_MAX": (
        "runs of offsets in one acknowledgement; records in one SHARE_ACQUIRE",
        "; {:,}",
    ),
}
"""Name in the code -> the row of limits.md, and how its value is written there."""
NO_BOUNDS = {"OFFSET_MAX"}
"""Bounds of an offset alone: no client makes it grow."""


def in_plain_numbers(text: str) -> str:
    """`text` with sizes in bytes and times in ms, as the code has them; retention in minutes."""
    text = re.sub(r"(\d+) MiB", lambda found: f"{int(found[1]) << 20:,} bytes", text)
    text = re.sub(r"(\d+) days after", lambda found: f"{int(found[1]) * 1_440:,} minutes", text)
    for unit, ms in ((r"days", 86_400_000), (r"minutes(?=$)", 60_000), (r"s\b", 1_000)):
        text = re.sub(rf"(\d+) {unit}", lambda found, ms=ms: f"{int(found[1]) * ms:,} ms", text)  # type: ignore[misc]
    return text


def test_every_bound_of_groups_is_listed_with_its_value_and_a_test() -> None:
    page = (ROOT / "docs/limits.md").read_text()
    section = page[page.index("## Groups") : page.index("## Transactions")]
    rows = {
        cells[0].strip(): cells
        for cells in re.findall(r"^\|(.*?)\|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$", section, re.M)[2:]
    }
    assert all(re.search(r"`test_\w+`", cells[4]) for cells in rows.values())
    values: dict[str, int] = {
        name: value
        for name, value in vars(limits).items()
        if re.search(r"_MAX(_BYTES|_MS)?$", name)
    }
    values |= dataclasses.asdict(limits.GroupLimits())
    assert values.keys() - NO_BOUNDS <= BOUNDS_OF_GROUPS.keys(), (
        "a bound is not in BOUNDS_OF_GROUPS"
    )
    values |= {
        name: getattr(agent, name) for name in ("REQUESTS_AT_ONCE", "ANSWERS_MAX", "PUSHES_MAX")
    }
    values |= {
        "CLOSED_MAX": deciders.CLOSED_MAX,
        "SHARE_RUNS_MAX": requests.SHARE_RUNS_MAX,
        "RECORDS_MAX": share_requests.RECORDS_MAX,
    }
    for name, (row, written) in BOUNDS_OF_GROUPS.items():
        bound = in_plain_numbers(rows[row][1].strip())
        assert written.format(values[name]) in bound, (
            f"{name} is {values[name]:,}; limits.md says {bound!r}"
        )
