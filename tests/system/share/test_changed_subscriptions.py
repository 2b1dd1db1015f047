"""A share consumer that subscribes to other topics: what it has acquired of the earlier ones is
given back, and no delivery of it is counted.
"""

from __future__ import annotations

import pytest

from tailrace import Admin
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.share.record import ShareRecord
from tests.kit.members.queues import describe, fill, make, share, take
from tests.kit.processes import wait_until

COUNT = 5


@pytest.mark.parametrize("recreated", [False, True])
def test_an_answer_that_comes_after_the_subscription_has_changed_is_given_back_uncounted(
    appliance: EmbeddedAppliance, topic: str, recreated: bool
) -> None:
    """With `recreated` the consumer does not know the topic whose records it has acquired."""
    make(appliance, topic)
    make(appliance, f"{topic}-other")
    with share(appliance, topic) as consumer:
        assert consumer.poll(100) == []
        if recreated:
            with Admin(appliance.address) as admin:
                admin.delete_topics([topic])
            make(appliance, topic)
        fill(appliance, topic, COUNT)
        came: list[ShareRecord] = []

        def has_acquired() -> bool:
            came.extend(consumer.poll(0, 1))
            return bool(came) or _acquired(appliance, topic) > 0

        wait_until(has_acquired, "acquired")
        consumer.subscribe([f"{topic}-other"])
        for _ in range(3):
            assert consumer.poll(100) == []
    with share(appliance, topic) as consumer:
        records = take(consumer, COUNT - len(came))
    assert {record.delivery_count for record in records} == {1}


def _acquired(appliance: EmbeddedAppliance, topic: str) -> int:
    return sum(row["acquired"] for row in describe(appliance, f"g-{topic}", "partitions"))
