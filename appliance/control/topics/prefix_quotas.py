"""Quotas of topics: how many topics and partitions may begin with a prefix. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from appliance.catalog.catalog import Topic
from shm.quotas.quota_rules import begins, of_topic, parse_rules
from tailrace.core.errors import InvalidSettingError, QuotaExceededError


def check_topic_quotas(
    rules: Sequence[str], topics: Iterable[Topic], name: str, *, topics_added: int, added: int
) -> None:
    """Check that the topic `name` may have `added` partitions more. Raises QuotaExceededError."""
    try:
        parsed = parse_rules(rules)
    except InvalidSettingError:
        return  # rules of a newer version; the front says so
    known = [topic for topic in topics if not topic.delay_of and topic.state != "deleting"]
    for quota, more in (("topics_max", topics_added), ("partitions_max", added)):
        if not more:
            continue
        for share in of_topic(parsed, quota, name):
            mine = [topic for topic in known if begins(topic.name, share.key.prefix or "")]
            used = (
                len(mine) if quota == "topics_max" else sum(len(topic.partitions) for topic in mine)
            )
            if used + more > share.value:
                raise QuotaExceededError(
                    f"{share.key.text} has {used} of {share.value} "
                    f"{quota.removesuffix('_max')}; {name!r} needs {more} more. Delete topics, or "
                    f"raise its quota {quota} with `tailrace quota set`"
                )
