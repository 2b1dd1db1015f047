"""Offsets of a transaction: one entry for a group, its latest member, and an end of waiting."""

from __future__ import annotations

import pytest

from netfront.kafka.producers import transactional_producer
from netfront.kafka.producers.transaction_offsets import Committer, TransactionOffsets
from netfront.kafka.producers.transactional_producer import (
    TransactionalProducer,
    TransactionalProducers,
)

MS = 1_000_000


def test_an_earlier_epoch_of_a_member_does_not_replace_a_later_one() -> None:
    offsets = TransactionOffsets()
    offsets.keep("g", Committer("m", 3, True), ("t", 0), ["t", 0, 5])
    offsets.keep("g", Committer("m", 4, True), ("t", 0), ["t", 0, 7])
    offsets.keep("g", Committer("m", 3, True), ("t", 0), ["t", 0, 6])
    offsets.keep("g", Committer("m", 3, True), ("t", 1), ["t", 1, 2])
    assert offsets.groups_json() == [
        {"group": "g", "member_id": "m", "member_epoch": 4,
         "entries": [["t", 0, 7], ["t", 1, 2]]}
    ]  # fmt: skip


def test_the_last_member_of_a_group_commits_and_a_classic_one_is_not_named() -> None:
    offsets = TransactionOffsets()
    offsets.keep("g", Committer("a", 5, False), ("t", 0), ["t", 0, 5])
    offsets.keep("g", Committer("b", 1, False), ("t", 0), ["t", 0, 8])
    assert offsets.groups_json() == [{"group": "g", "entries": [["t", 0, 8]]}]


def test_offsets_are_pending_until_their_time_and_then_the_transaction_is_incomplete() -> None:
    producers = TransactionalProducers()
    one = TransactionalProducer(1, 0, 1, timeout_ms=10)
    producers.put("one", one)
    one.offsets.keep("g", Committer("", -1, False), ("t", 0), ["t", 0, 5])
    producers.note_offsets("one")
    one.offsets_until_ns = 10 * MS
    assert producers.pending_offsets("g", 10 * MS - 1) == {("t", 0)}
    found = [one.is_incomplete]
    assert producers.pending_offsets("g", 10 * MS) == set()
    found.append(one.is_incomplete)
    one.begin(1, 1)
    assert [*found, one.is_incomplete] == [False, True, False]


def test_a_question_for_pending_offsets_looks_at_the_producers_that_have_some_alone() -> None:
    producers, asked = TransactionalProducers(), []

    class Noted(TransactionalProducer):
        def drop_late_offsets(self, now_ns: int) -> None:
            asked.append(self.producer_id)
            super().drop_late_offsets(now_ns)

    def put(name: str, producer_id: int) -> Noted:
        one = Noted(producer_id, 0, 1, timeout_ms=10)
        one.offsets_until_ns = 10 * MS
        producers.put(name, one)
        return one

    made = [put(f"id-{number}", number) for number in range(100)]
    for one in made[40:42]:
        one.offsets.keep("g", Committer("", -1, False), ("t", one.producer_id), [])
        producers.note_offsets(f"id-{one.producer_id}")
    producers.note_offsets("id-7")  # it has none
    assert producers.pending_offsets("g", 0) == {("t", 40), ("t", 41)}
    made[40].begin(40, 1)
    put("id-41", 41)  # another owner
    assert producers.pending_offsets("g", 0) == set()
    assert producers.pending_offsets("g", 0) == set()
    assert asked == [40, 41, 40]


def test_offsets_that_an_earlier_process_has_left_are_pending_until_their_owner_is_known() -> None:
    left = TransactionalProducer(1, 0, 1, timeout_ms=10)
    left.offsets.keep("g", Committer("", -1, False), ("t", 0), ["t", 0, 5])
    left.offsets_until_ns = 10 * MS
    for now_ns, is_given_up in ((9 * MS, False), (10 * MS, True)):
        producers = TransactionalProducers()
        left.is_incomplete, left.offsets_until_ns = False, 10 * MS
        producers.leave("one", left)
        expected = set() if is_given_up else {("t", 0)}
        assert producers.pending_offsets("g", now_ns) == expected
        one = TransactionalProducer(1, 0, 1, timeout_ms=10)
        one.offsets.keep("g", Committer("", -1, False), ("t", 0), ["t", 0, 5])
        one.offsets_until_ns = 30 * MS
        producers.recover("one", one)
        assert (one.is_incomplete, bool(one.offsets)) == (is_given_up, not is_given_up)
        assert producers.pending_offsets("g", 10 * MS) == set(), "its time goes on"
        producers.leave("one", left)
        assert producers.pending_offsets("g", 0) == set(), "what is known here is newer"


def test_a_text_of_another_client_counts_as_lost() -> None:
    for text in ("{", "[]", "7", "[[[1]],1,1,[],false]", '[[],1,1,[["zz",0,1]],false]'):
        one = TransactionalProducer(9, 4, 1, timeout_ms=10)
        assert one.restore(text, (9, 4))
        assert (one.is_incomplete, one.is_partial, bool(one.offsets)) == (True, True, False)


def test_a_producer_with_offsets_alone_stays_when_an_idle_one_can_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transactional_producer, "PRODUCERS_MAX", 2)
    producers = TransactionalProducers()
    for name in ("busy", "idle", "new"):
        one = TransactionalProducer(1, 0, 1, timeout_ms=10)
        if name == "busy":
            one.offsets.keep("g", Committer("", -1, False), ("t", 0), ["t", 0, 5])
        producers.put(name, one)
    assert producers.get("busy") is not None
    assert producers.get("idle") is None


def test_what_is_staged_comes_back_and_too_much_of_it_is_known_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = TransactionalProducer(9, 4, 1, timeout_ms=10)
    one.client_producer_id, one.client_epoch = 8, 2
    one.following[b"t" * 16, 3] = 70
    one.offsets.keep("g", Committer("m", 3, True), ("t", 0), ["t", 0, 5])
    metadata = "\0\x7f\u200b\u2028é"
    one.offsets.keep("h", Committer("", -1, False), ("t", 1), ["t", 1, 7, metadata])
    text = one.staged_text(one.offsets)
    assert all(" " <= character <= "~" for character in text)
    again = TransactionalProducer(9, 4, 1, timeout_ms=10)
    assert again.restore(text, (8, 2))
    assert again.offsets.groups_json() == one.offsets.groups_json()
    assert (again.following, again.is_incomplete) == (one.following, False)
    assert again.has_batches, "an earlier process may have had some"
    assert not TransactionalProducer(9, 4, 1, timeout_ms=10).restore(text, (8, 1))
    assert TransactionalProducer(9, 4, 1, timeout_ms=10).restore("", (9, 4))
    monkeypatch.setattr(transactional_producer, "STAGED_MAX", 10)
    lost = TransactionalProducer(9, 4, 1, timeout_ms=10)
    assert not lost.restore(one.staged_text(one.offsets), (8, 2))
    assert lost.is_incomplete
