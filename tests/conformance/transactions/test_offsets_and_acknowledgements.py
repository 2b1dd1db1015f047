"""Offsets of groups and acknowledgements of queues that go with a commit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tailrace.client.records.attached_records import AttachedMember, AttachedRecords
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    CommitFailedError,
    InvalidRequestError,
    InvalidTransactionError,
    TailraceError,
    TransactionAbortedError,
)
from tailrace.core.records import ConsumerGroupMetadata, OffsetAndMetadata, Record, TopicName
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import SHARE_RUNS_MAX
from tailrace.share.outcomes import AcknowledgeType
from tests.conformance.transactions.transaction_front import (
    LOST_AFTER,
    Refused,
)
from tests.conformance.transactions.transaction_worlds import (
    SCRIPTED,
    Made,
    ScriptedWorld,
)

END = Api.END_TRANSACTION


@SCRIPTED
def test_offsets_go_with_the_commit_and_with_nothing_else(world: ScriptedWorld) -> None:
    topic_id = bytes(range(16))
    key = TopicPartition(TopicName("in", topic_id), 0)
    member = ConsumerGroupMetadata("g", 4, "m-1", None, is_subscribed=True)

    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await producer.send_offsets_to_transaction({key: 1}, member)
        await producer.abort_transaction()
        assert made.front.offsets == []
        async with producer.transaction():
            await producer.send_offsets_to_transaction({key: 4}, member)
            await producer.send_offsets_to_transaction(
                {key: OffsetAndMetadata(5, "m", 2), TopicPartition("other", 1): 7}, member
            )
            await producer.send_offsets_to_transaction({TopicPartition("x", 0): 1}, "by hand")
        assert made.front.offsets == [
            {
                "group": "g", "member_id": "m-1", "member_epoch": 4,
                "entries": [["in", 0, 5, 2, "m", topic_id.hex()], ["other", 1, 7, -1, ""]],
            },
            {
                "group": "by hand", "member_id": None, "member_epoch": -1,
                "entries": [["x", 0, 1, -1, ""]],
            },
        ]  # fmt: skip

    world.run(body)


@SCRIPTED
def test_offsets_that_are_refused_make_the_transaction_abortable(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        made.front.plan[END].append(
            Refused(ErrorCode.FENCED_MEMBER, "the member has joined again since")
        )

        async def fails() -> None:
            async with made.producer.transaction():
                await made.send(b"x")
                await made.producer.send_offsets_to_transaction(
                    {TopicPartition("in", 0): 1}, ConsumerGroupMetadata("g", 4, "m-1", None, True)
                )

        with pytest.raises(TransactionAbortedError, match="joined again since") as caught:
            await fails()
        assert isinstance(caught.value.__cause__, TailraceError)
        assert caught.value.__cause__.code is ErrorCode.FENCED_MEMBER
        async with made.producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"y"]
        assert made.front.offsets == []

    world.run(body)


@SCRIPTED
def test_a_commit_that_no_request_can_carry_is_refused_at_once_and_the_producer_goes_on(
    world: ScriptedWorld,
) -> None:
    """Sent, it would end the connection, and be sent again until its timeout."""
    offsets = {
        TopicPartition("in", number): OffsetAndMetadata(1, "m" * 4_096) for number in range(300)
    }

    async def body(made: Made) -> None:
        producer = made.producer
        for end in (producer.commit_transaction, producer.prepare_transaction):
            await producer.begin_transaction()
            await made.send(b"too much")
            await producer.send_offsets_to_transaction(offsets, "g")
            with pytest.raises(TransactionAbortedError, match="Commit more often") as caught:
                await end()
            assert isinstance(caught.value.__cause__, TailraceError)
            assert caught.value.__cause__.code is ErrorCode.REQUEST_TOO_LARGE
            await producer.abort_transaction()
        async with producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"y"]
        outcomes = [one.outcome for one in made.front.decisions]
        assert outcomes[1:] == ["abort", "abort", "commit"], "the first is that of its init"
        assert made.front.offsets == []

    world.run(body)


@SCRIPTED
def test_offsets_of_nobody_are_refused(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        async with made.producer.transaction():
            with pytest.raises(CommitFailedError, match="not a member"):
                await made.producer.send_offsets_to_transaction(
                    {}, ConsumerGroupMetadata("g", -1, "m-1", None, is_subscribed=True)
                )
            with pytest.raises(InvalidRequestError, match=r"consumer.group_metadata\(\)"):
                await made.producer.send_offsets_to_transaction({}, None)
            with pytest.raises(InvalidRequestError, match="offsets"):
                await made.producer.send_offsets_to_transaction([1], "g")

    world.run(body)


class _Queue:
    """A share consumer without an appliance: it attaches what it is given."""

    def __init__(self, epoch: int = 3) -> None:
        self.member = AttachedMember("q", "m-1", epoch)
        self.attached: list[AttachedRecords] = []

    def _attach(self, records: Iterable[Record], outcome: str) -> AttachedRecords:
        places = tuple((one.topic, one.partition, one.offset) for one in records)
        rows = [(f"id of {topic}", number, offset) for topic, number, offset in places]
        self.attached.append(AttachedRecords(self.member, places, rows, outcome))
        return self.attached[-1]

    @property
    def ends(self) -> list[str | None]:
        return [one.ended_by for one in self.attached]


def _record(offset: int) -> Record:
    return Record("jobs", 0, offset, 0, 0, None, b"x", [], 0)


@SCRIPTED
def test_acknowledgements_go_with_the_commit_and_end_with_the_transaction(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        producer, queue = made.producer, _Queue()
        acknowledge = producer.send_acknowledgements_to_transaction
        with pytest.raises(InvalidTransactionError, match="begin_transaction"):
            await acknowledge(queue, [_record(0)])
        await producer.begin_transaction()
        await acknowledge(queue, [_record(0)])
        await producer.abort_transaction()
        assert "acknowledgements" not in made.front.requests[-1][1]
        made.front.plan[END].append(LOST_AFTER)  # asked again, with the same acknowledgements
        async with producer.transaction():
            await acknowledge(queue, [_record(offset) for offset in (4, 3, 1)])
            await acknowledge(queue, _record(5), AcknowledgeType.RELEASE)
            await acknowledge(queue, [])
            assert queue.ends == ["abort", None, None]
        carried = [
            {
                "group": "q", "member_id": "m-1", "member_epoch": 3,
                "acknowledge": [
                    ["id of jobs", 0, 1, 1, "accept"], ["id of jobs", 0, 3, 4, "accept"],
                    ["id of jobs", 0, 5, 5, "release"],
                ],
            }
        ]  # fmt: skip
        sent = [request for api, request in made.front.requests if api is END]
        assert [one.get("acknowledgements") for one in sent[-2:]] == [carried, carried]
        assert queue.ends == ["abort", "commit", "commit"]

    world.run(body)


@SCRIPTED
def test_a_lost_lock_makes_the_transaction_abortable(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        queue = _Queue()
        made.front.plan[END].append(Refused(ErrorCode.LOCK_LOST, "the lock has expired"))

        async def fails() -> None:
            async with made.producer.transaction():
                await made.send(b"x")
                await made.producer.send_acknowledgements_to_transaction(queue, _record(0))

        with pytest.raises(TransactionAbortedError, match="lock has expired"):
            await fails()
        assert queue.ends == ["abort"]
        assert made.front.committed() == []

    world.run(body)


@SCRIPTED
def test_acknowledgements_that_a_commit_cannot_carry_are_refused(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        acknowledge, queue = made.producer.send_acknowledgements_to_transaction, _Queue()
        async with made.producer.transaction():
            for given, sentence in (
                ((made.producer, [_record(0)]), "no share consumer"),
                ((queue, [1]), "pass a record"),
                ((queue, 1), "pass a record"),
                ((queue, [_record(0)], "reject"), "dead-letter topic"),
                ((queue, [_record(0)], "renew"), "accept or release"),
                ((queue, [_record(0)], []), "accept or release"),
                ((queue, [_record(2 * n) for n in range(SHARE_RUNS_MAX + 1)]), "commit more often"),
            ):
                with pytest.raises(InvalidRequestError, match=sentence):
                    await acknowledge(*given)
        assert queue.ends == ["abort"]  # the one that was too large

    world.run(body)
