"""Delay owners in the front: batches and changes name the user, and a client cannot."""

from __future__ import annotations

from typing import Any

from netfront.access.delay_owners import owner_number, stamped, with_owners
from tailrace.core.schedule.delays import delay_id
from tailrace.format.record_batch.batch_header import checksum_seed, verify_batch
from tests.kit.batches import TOPIC_ID, make_batch
from tests.kit.peers.needs import NAMES, ORDERS, principal_with

SEED = checksum_seed(TOPIC_ID, 3)
TOKEN = delay_id(bytes.fromhex(ORDERS), 0, 5, 7)


def owners_of(request: dict[str, Any], *allowed: str) -> list[Any]:
    changes = with_owners(principal_with(*allowed), request, NAMES.get)["changes"]
    return [change.get("owner") for change in changes]


def test_a_number_is_that_of_a_name() -> None:
    numbers = {owner_number(f"user{number}") for number in range(10_000)}
    assert len(numbers) == 10_000
    assert all(0 < number < 1 << 62 for number in numbers)
    assert owner_number("ann") == 428_725_694_569_069_198, "pending records have it on disk"


def test_a_stamped_batch_is_proven_and_names_its_owner_alone_anew() -> None:
    batch = make_batch(seed=SEED)
    found = stamped(batch, TOPIC_ID, 3, 77)
    assert found is not None
    before, after = verify_batch(memoryview(batch), SEED), verify_batch(memoryview(found), SEED)
    assert after.delay_position == 77
    after.delay_position, after.header_crc32c = before.delay_position, before.header_crc32c
    assert after == before


def test_a_batch_that_is_not_proven_stays_as_it_is() -> None:
    batch = bytearray(make_batch(seed=SEED))
    assert stamped(bytes(batch), TOPIC_ID, 4, 77) is None, "another partition's"
    assert stamped(bytes(batch)[:40], TOPIC_ID, 3, 77) is None
    for place in range(0, len(batch), 7):
        bent = bytearray(batch)
        bent[place] ^= 0x11
        found = stamped(bytes(bent), TOPIC_ID, 3, 77)
        if found is not None:  # the body: its own checksum is left to the worker
            assert found[place] == bent[place]


def test_entries_name_the_user_unless_it_may_alter_the_delays_of_the_topic() -> None:
    own = owner_number("a")
    forged = {"changes": [{"delay_id": TOKEN, "owner": 5}, {"delay_id": "none"}]}
    assert owners_of(forged, "write topic orders") == [own, own]
    assert owners_of(forged, "alter delay orders") == [None, own]
    assert owners_of(forged, "alter delay other") == [own, own]
    foreign = {"changes": [{"delay_id": delay_id(bytes(16), 0, 1, 1), "owner": None}]}
    assert owners_of(foreign, "alter delay any") == [own], "this front does not know the topic"
