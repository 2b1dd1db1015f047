"""The poll loop of a share consumer without an appliance: the test makes the responses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tailrace.aio import AsyncShareConsumer
from tailrace.client.config.setting_fields import build
from tailrace.client.connections import reachability
from tailrace.client.connections.call import PendingCall
from tailrace.client.connections.reachability import UNREACHABLE_AFTER_NS
from tailrace.client.connections.runtime import SYSTEM
from tailrace.client.connections.steps import lifted, run_at_once
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    DiskFullError,
    InvalidRequestError,
    LockLostError,
    NotReachableError,
    RequestTimeoutError,
    StorageError,
    TailraceError,
)
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.group.membership import Phase
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response, State
from tailrace.share.acknowledgements import Acknowledgement
from tailrace.share.acquired.ranges import AcquiredRange, FetchedRange
from tailrace.share.consumer import ShareConsumer
from tailrace.share.poll_loop import SharePollLoop
from tailrace.share.requests import Acquired
from tailrace.share.settings import ShareConsumerSettings
from tailrace.share.undeliverable import REJECTED
from tests.kit.appliances.topics import described
from tests.kit.batches import TOPIC_ID
from tests.kit.runs.aio import run

KEY = TopicPartition("t", 0)
NEVER_NS = 1 << 62


class Runtime:
    """SYSTEM without threads, and with a clock that the test moves."""

    has_threads = False

    def __init__(self) -> None:
        self._real = SYSTEM
        self.now_ns = 1_000_000_000

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def monotonic_ns(self) -> int:
        return self.now_ns


class PendingAnswer:
    """Replaces a PendingCall."""

    def __init__(self, answer: dict[str, Any] | TailraceError | None) -> None:
        self._answer = answer
        self.outcome_unknown = isinstance(answer, RequestTimeoutError)
        self.wake_ns = NEVER_NS

    def step(self) -> Response | None:
        if self._answer is None:
            return None
        if isinstance(self._answer, TailraceError):
            raise self._answer
        return Response(
            2, Api.SHARE_ACQUIRE, ErrorCode.OK, [memoryview(orjson.dumps(self._answer))]
        )


class Consumer:
    """A member that has joined."""

    def __init__(self) -> None:
        settings = build(
            ShareConsumerSettings, {"group_id": "g", "bootstrap_servers": "tcp://127.0.0.1:1"}
        )
        self.runtime = Runtime()
        self.poll_loop = SharePollLoop(settings, self.runtime)  # type: ignore[arg-type]
        self.poll_loop.fetch_loop._call = lifted(lambda _api, _request: {"topics": [described()]})
        self.poll_loop._until_joined = lifted(lambda: None)  # type: ignore[method-assign]
        run_at_once(self.poll_loop.subscribe("t"))
        self.poll_loop.member.membership.phase = Phase.MEMBER
        self.poll_loop.member.membership.epoch = 3
        self.poll_loop.member.membership.has_events = False

    def answer(self, answer: dict[str, Any] | TailraceError | None) -> None:
        """Set the response to the request in flight."""
        self.poll_loop.requests._call = PendingAnswer(answer)  # type: ignore[assignment]

    def sent(self) -> tuple[Api, dict[str, Any]]:
        request = self.poll_loop.requests._request
        assert request is not None
        return request[0], request[1]


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    made = Consumer()
    yield made
    made.poll_loop.member.thread.stop()
    made.poll_loop.connection.close()


def test_acknowledgements_are_sent_while_an_acquired_range_is_unreadable(
    consumer: Consumer,
) -> None:
    poll_loop = consumer.poll_loop
    poll_loop.fetch_loop.acquired(1, [Acquired(TOPIC_ID.hex(), 0, 10, 19, 1, False, NEVER_NS)])
    poll_loop.acknowledgements.add(KEY, 0, 1)
    poll_loop.run_once(100)
    assert not poll_loop.requests.is_busy, (
        "nothing is acknowledged, and nothing is acquired before that range is read"
    )
    poll_loop.acknowledgements.accept_remaining()
    poll_loop.run_once(100)
    api, body = consumer.sent()
    assert (api, body["acknowledge"]) == (
        Api.SHARE_ACKNOWLEDGE,
        [[TOPIC_ID.hex(), 0, 0, 1, "accept"]],
    )


def test_a_response_to_a_request_before_the_membership_was_lost_acquires_nothing(
    consumer: Consumer,
) -> None:
    poll_loop = consumer.poll_loop
    poll_loop.run_once(100)
    assert consumer.sent()[1]["member_epoch"] == 3
    poll_loop.member.membership.epoch = 9  # removed meanwhile, and joined again
    acquired = {
        "acquired": [[TOPIC_ID.hex(), 0, 0, 5, 1]],
        "dead": [],
        "ends": [],
        "lock_ms": 3_600_000,
        "refused": [],
    }
    consumer.answer(acquired)
    poll_loop.run_once(100)
    assert not poll_loop.fetch_loop.has_ranges
    poll_loop.run_once(100)
    consumer.answer(acquired)
    poll_loop.run_once(100)
    assert poll_loop.fetch_loop.has_ranges, "the same response to a request of the new epoch"


def test_a_commit_during_a_request_waits_for_its_own_acknowledgements_only(
    consumer: Consumer,
) -> None:
    poll_loop = consumer.poll_loop
    poll_loop.run_once(100)  # another task's poll
    poll_loop.acknowledgements.add(KEY, 0, 0, "accept")
    consumer.answer(None)
    number = poll_loop.flush_step(0)
    assert not poll_loop.is_flushed(number)
    assert poll_loop.next_flush_ns(NEVER_NS) == NEVER_NS
    consumer.answer({"acquired": [], "dead": [], "ends": [], "lock_ms": 0, "refused": []})
    number = poll_loop.flush_step(number)
    assert not poll_loop.is_flushed(number)
    assert poll_loop.next_flush_ns(NEVER_NS) <= consumer.runtime.now_ns, (
        "the next request begins at once"
    )
    number = poll_loop.flush_step(number)
    assert consumer.sent()[0] is Api.SHARE_ACKNOWLEDGE
    consumer.answer({"refused": [[TOPIC_ID.hex(), 0, 0, 0, 51, "too late"]]})
    number = poll_loop.flush_step(number)
    poll_loop.run_once(100)  # a poll goes on, again and again
    assert poll_loop.is_flushed(number)
    refused = poll_loop.requests.drain_failed()
    assert isinstance(refused, LockLostError)
    assert list(refused.refused) == [("t", 0, 0, 0)]


def test_a_buffered_record_is_dropped_when_its_lock_expires(consumer: Consumer) -> None:
    poll_loop = consumer.poll_loop
    for first, until_ns in ((0, 2_000_000_000), (3, 5_000_000_000)):
        records = [
            Record("t", 0, offset, 0, 0, None, b"", [], 0) for offset in range(first, first + 3)
        ]
        poll_loop.delivery.buffered.add(
            KEY,
            FetchedRange(
                AcquiredRange(first, first + 2, 1, False, until_ns), first, first + 2, records
            ),
        )
    assert [record.offset for record in poll_loop.delivery.collect(2)] == [0, 1]
    consumer.runtime.now_ns = 3_000_000_000
    assert [record.offset for record in poll_loop.delivery.collect(2)] == [3, 4]
    assert poll_loop.counters["locks_lost"] == 1
    assert [record.offset for record in poll_loop.delivery.collect(9)] == [5]
    poll_loop.delivery.settle_last()
    assert [poll_loop.acknowledgements.has("t", 0, offset) for offset in range(6)] == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    assert Acknowledgement(KEY, 2, 2, "unread") in poll_loop.acknowledgements.acknowledged(9), (
        "it was not delivered: its acquisition is not counted"
    )


def test_a_retried_error_is_logged_once_and_other_errors_are_raised(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    poll_loop = consumer.poll_loop
    poll_loop.acknowledgements.add(KEY, 0, 0, "accept")
    for _ in range(3):
        consumer.runtime.now_ns += 1_000_000_000
        poll_loop.run_once(100)
        consumer.answer(DiskFullError("no space"))
        poll_loop.run_once(100)
    assert caplog.text.count("share_request_failed") == 1
    assert poll_loop.acknowledgements.has_acknowledged, "it is sent again"
    consumer.runtime.now_ns += 1_000_000_000
    poll_loop.run_once(100)
    consumer.answer(StorageError("the disk"))
    with pytest.raises(StorageError):
        poll_loop.run_once(100)
    assert poll_loop.acknowledgements.has_acknowledged


@pytest.mark.parametrize("refusal", [StorageError("the disk"), DiskFullError("no space")])
def test_a_request_without_a_response_keeps_its_number_when_its_second_copy_is_refused(
    consumer: Consumer, refusal: TailraceError
) -> None:
    poll_loop = consumer.poll_loop
    poll_loop.acknowledgements.add(KEY, 0, 2, "accept")
    number = poll_loop.flush_step(0)
    first = consumer.sent()
    for error in (RequestTimeoutError("no answer"), refusal, refusal):
        consumer.runtime.now_ns += 1_000_000_000
        consumer.answer(error)
        with pytest.raises(type(error)):
            poll_loop.flush_step(number)
        assert consumer.sent() == first, (
            "it may have been applied: a new number would be refused, because the records are "
            "acknowledged"
        )
        assert not poll_loop.is_flushed(poll_loop.flush_step(0))
    consumer.runtime.now_ns += 1_000_000_000
    assert poll_loop.next_flush_ns(NEVER_NS) <= consumer.runtime.now_ns
    consumer.answer({"refused": []})
    assert poll_loop.is_flushed(poll_loop.flush_step(0)), "the response from the appliance's memory"
    assert poll_loop.requests.drain_failed() is None
    assert not poll_loop.acknowledgements


def test_a_retried_request_waits_and_keeps_the_time_of_its_first_copy(
    consumer: Consumer,
) -> None:
    poll_loop, runtime = consumer.poll_loop, consumer.runtime
    poll_loop.run_once(100)
    for error in (RequestTimeoutError("no answer"), DiskFullError("no space")):
        consumer.answer(error)
        poll_loop.run_once(100)
    started_ns, runtime.now_ns = runtime.now_ns, runtime.now_ns + 1_000_000
    assert poll_loop.requests.next_step_ns() == started_ns + 100_000_000, (
        "a full disk is retried after a pause"
    )
    runtime.now_ns += 10_000_000_000
    consumer.answer(
        {
            "acquired": [[TOPIC_ID.hex(), 0, 0, 5, 1]],
            "dead": [],
            "ends": [],
            "lock_ms": 30_000,
            "refused": [],
        }
    )
    poll_loop.run_once(100)
    ((run,),) = [
        acquired_ranges.runs for acquired_ranges in poll_loop.fetch_loop._acquired.values()
    ]
    assert run.locked_until_ns == started_ns + 30_000_000_000, (
        "the locks may be as old as the first copy"
    )


@pytest.mark.parametrize("kind", [ShareConsumer, AsyncShareConsumer])
def test_poll_raises_while_the_appliance_is_away(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "UNREACHABLE_AFTER_NS", -1)

    async def done(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    async def main() -> None:
        consumer = kind(bootstrap="tcp://127.0.0.1:1", group_id="g")
        consumer._poll_loop.subscribed = ["t"]
        try:
            assert await done(consumer.poll()) == []
            for _ in range(2):
                with pytest.raises(NotReachableError, match="no appliance answers"):
                    await done(consumer.poll())
        finally:
            await done(consumer.close())

    run(main())


def test_a_call_knows_if_a_copy_of_it_may_have_been_applied() -> None:
    answers: list[Any] = []

    class Front:
        """A ready connection."""

        address, fatal, is_ready, time_ns = "tcp://127.0.0.1:1", None, True, 0

        def check_usable(self) -> None: ...
        def process(self) -> None: ...
        def tick(self, _now_ns: int) -> None: ...
        def met(self) -> str:
            return ""

        def next_tick_ns(self) -> None: ...
        def now_ns(self) -> int:
            return self.time_ns

        def request(self, _api: Api, _body: Any, take: Any) -> bool:
            answers.append(take)
            return True

    refused = Response(2, Api.SHARE_ACQUIRE, ErrorCode.DISK_FULL, [])
    for lost in (False, True):
        call = PendingCall(Front(), Api.SHARE_ACQUIRE, [b""], 1_000, None, 0)  # type: ignore[arg-type]
        seen = [call.outcome_unknown]
        call.step()
        seen.append(call.outcome_unknown)
        if lost:
            answers.pop()(None)
            call.step()  # sends it again
        answers.pop()(refused)
        with pytest.raises(DiskFullError):
            call.step()
        assert [*seen, call.outcome_unknown] == [False, True, lost], (
            "before it is sent, in flight, and after a response"
        )


def test_each_poll_raises_while_the_appliance_is_away_for_long(
    consumer: Consumer,
) -> None:
    poll_loop, runtime = consumer.poll_loop, consumer.runtime
    poll_loop.check_reachable()
    runtime.now_ns += UNREACHABLE_AFTER_NS
    poll_loop.check_reachable()
    runtime.now_ns += 1
    for _ in range(2):
        with pytest.raises(
            NotReachableError, match=r"no appliance answers at tcp://127\.0\.0\.1:1"
        ):
            poll_loop.check_reachable()
    poll_loop.connection.session.state = State.READY
    assert poll_loop.connection.is_ready
    poll_loop.check_reachable()
    poll_loop.connection.session.state = State.HANDSHAKING
    poll_loop.check_reachable()


@pytest.mark.parametrize(
    ("outcome", "reason", "sentence"),
    [("accept", "no", "dlq.reason"), ("RENEW", "no", "dlq.reason"), ("release", "", "dlq.reason"),
    ("reject", ValueError("x"), "as text"),
     ("reject", b"x", "as text"), ("drop", "x", "allowed are")],
)  # fmt: skip
def test_a_reason_is_text_and_goes_with_reject_only(
    consumer: Consumer, outcome: str, reason: Any, sentence: str
) -> None:
    poll_loop = consumer.poll_loop
    record = Record("t", 0, 0, 0, 0, None, b"", [], 0)
    poll_loop.acknowledgements.add(KEY, 0, 0)
    with pytest.raises(InvalidRequestError, match=sentence):
        poll_loop.delivery.acknowledge(record, outcome, reason)
    assert poll_loop.acknowledgements.outcome_of("t", 0, 0) is None, "it is not acknowledged"


def test_the_last_reason_counts_and_is_bounded(consumer: Consumer) -> None:
    poll_loop = consumer.poll_loop
    record = Record("t", 0, 0, 0, 0, None, b"", [], 0)
    poll_loop.acknowledgements.add(KEY, 0, 0)
    for reason, kept in (
        ("no such customer", "no such customer"),
        ("x" * 5_000, "x" * 1_000),
        (None, REJECTED),
        ("", REJECTED),
    ):
        poll_loop.delivery.acknowledge(record, "reject", reason)
        (one,) = given_up = poll_loop.undeliverable.take(with_rejected=True)
        assert one.letter.reason == kept
        poll_loop.undeliverable.put_back(given_up, [])
