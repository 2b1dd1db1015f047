"""Commits: in order whatever is sent again, together where they wait, each ended once. The
appliance is a list of requests here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from tailrace import OffsetAndMetadata, TopicPartition
from tailrace.client.topics.offsets import offsets_of
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    CommitFailedError,
    ConcurrentTransactionsError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    StorageError,
    TailraceError,
    UnknownTopicIdError,
    error_for,
)
from tailrace.group.offsets.offset_commit import COMMITS_AT_ONCE, CommitQueue, commit_error
from tailrace.protocol.frame import JSON_MAX_BYTES
from tailrace.protocol.session import Response

MS = 1_000_000
KEYS = [TopicPartition("t", number) for number in range(4)]


class Appliance:
    """A connection: requests wait for the test to answer them."""

    address = "tcp://127.0.0.1:1"
    is_ready = True

    def __init__(self) -> None:
        self.time_ns = 1_000 * MS
        self.requests: list[tuple[dict[str, Any], Any]] = []
        self.stored: dict[tuple[str, int], int] = {}

    def now_ns(self) -> int:
        return self.time_ns

    def met(self) -> str:
        return ""

    def request(self, _api: int, body: Sequence[bytes], on_response: Any) -> bool:
        if not self.is_ready:
            return False
        self.requests.append((orjson.loads(body[0]), on_response))
        return True

    def take(self) -> Any:
        """Do what the oldest request asks for, and answer it."""
        request, on_response = self.requests.pop(0)
        for topic, partition, offset, *_ in request["offsets"]:
            assert offset >= self.stored.get((topic, partition), 0), (
                "an older offset after a newer one"
            )
            self.stored[topic, partition] = offset
        return on_response(answer(refused=[]))

    def fail(self, code: ErrorCode = ErrorCode.OK, **body: Any) -> None:
        self.requests.pop(0)[1](answer(code, **body))

    def lose(self) -> None:
        self.requests.pop(0)[1](None)


def answer(code: ErrorCode = ErrorCode.OK, **body: Any) -> Response:
    return Response(1, 19, code, [orjson.dumps(body)])


class Queue:
    """A queue with its appliance."""

    def __init__(self) -> None:
        self.appliance = Appliance()
        self.is_member = True
        self.refused_count = 0
        self.called: list[tuple[int, type[TailraceError] | None]] = []
        self.queue = CommitQueue(self.appliance, self._member_fields, self._refused)  # type: ignore[arg-type]

    def _member_fields(self) -> dict[str, Any]:
        if not self.is_member:
            raise CommitFailedError("no member")
        return {"group": "g"}

    def _refused(self) -> None:
        self.refused_count += 1

    def commit(self, number: int, *keys: TopicPartition) -> None:
        def note(_: object, error: TailraceError | None) -> None:
            self.called.append((number, None if error is None else type(error)))

        self.queue.add({key: OffsetAndMetadata(number) for key in keys or KEYS[:1]}, note, 1_000)
        self.poll()

    def poll(self, later_ms: int = 0) -> None:
        self.appliance.time_ns += later_ms * MS
        self.queue.poll(self.appliance.time_ns)
        self.queue.run_callbacks()


def test_what_waits_goes_out_together_and_each_is_called_back_in_order() -> None:
    one = Queue()
    for number in range(1, 500):
        one.commit(number)
    assert len(one.appliance.requests) == 1
    one.appliance.take()
    one.poll()
    assert [request["offsets"] for request, _ in one.appliance.requests] == [
        [["t", 0, 499, -1, ""]]
    ]
    assert one.called == [(1, None)]
    one.appliance.take()
    one.poll()
    assert one.called == [(number, None) for number in range(1, 500)]
    assert not one.queue
    assert one.queue.due_ns() is None


@pytest.mark.parametrize("code", [None, ErrorCode.NOT_READY, ErrorCode.TOO_MANY_REQUESTS])
def test_what_was_lost_or_could_not_be_done_is_sent_again_before_what_followed(
    code: ErrorCode | None,
) -> None:
    one = Queue()
    one.commit(1)
    one.commit(2)
    for _ in range(3):
        if code is None:
            one.appliance.lose()
        else:
            one.appliance.fail(code)
        one.poll(100)
        assert one.appliance.requests[0][0]["offsets"][0][2] == 1
    one.appliance.take()
    one.poll()
    one.appliance.take()
    one.poll()
    assert one.appliance.stored == {("t", 0): 2}
    assert one.called == [(1, None), (2, None)]


def test_refusals_end_the_commits_that_they_are_about_and_no_others() -> None:
    one = Queue()
    one.commit(1, KEYS[3])
    one.commit(2, KEYS[0], KEYS[1])
    one.commit(3, KEYS[2])
    one.appliance.take()
    one.poll()
    one.appliance.fail(refused=[["t", 1, int(ErrorCode.OFFSET_OUT_OF_RANGE), "too far"]])
    one.poll()
    assert one.called == [(1, None), (2, OffsetOutOfRangeError), (3, None)]
    told = str(commit_error(ErrorCode.OFFSET_OUT_OF_RANGE, "too far"))
    assert (
        told
        == "too far. Give the offset of the next record to read: from 0 to the end of the log. "
        "[OFFSET_OUT_OF_RANGE]"
    )
    assert one.refused_count == 0
    one.commit(4, KEYS[0])
    one.appliance.fail(refused=[["t", 0, int(ErrorCode.PARTITION_NOT_OWNED), "gone"]])
    one.commit(5)
    one.appliance.fail(ErrorCode.UNKNOWN_MEMBER, message="gone")
    one.commit(6)
    one.appliance.fail(ErrorCode.STORAGE_ERROR, message="broken")
    one.poll()
    assert one.called[3:] == [(4, CommitFailedError), (5, CommitFailedError), (6, StorageError)]
    assert one.refused_count == 2, "the member asks what it has"
    one.commit(7)
    one.appliance.fail(refused=[["t", 0, int(ErrorCode.NOT_READY), "later"]])
    one.poll(100)
    one.appliance.take()
    one.is_member = False
    one.commit(8)
    assert one.called[6:] == [(7, None), (8, CommitFailedError)]


def test_a_commit_that_is_put_off_until_its_end_says_why_and_not_that_it_may_be_durable() -> None:
    one = Queue()
    sentence = "prepared"
    refused = [["t", 0, int(ErrorCode.CONCURRENT_TRANSACTIONS), sentence]]
    one.commit(1)
    one.poll(980)
    one.appliance.fail(refused=refused)
    one.poll(20)  # in the pause before it is sent again
    one.poll(50)
    one.commit(2)
    one.poll(980)
    one.appliance.fail(ErrorCode.CONCURRENT_TRANSACTIONS, message=sentence)
    one.poll(20)
    assert one.called == [(1, ConcurrentTransactionsError), (2, ConcurrentTransactionsError)]
    one.poll(50)
    one.commit(3)
    one.appliance.lose()  # it may have been carried out
    one.poll(980)
    one.appliance.fail(refused=refused)
    one.poll(20)
    one.poll(50)
    one.commit(4)
    one.appliance.fail(refused=refused)
    one.poll(980)  # sent again, without a response
    one.poll(20)
    assert one.called[2:] == [(3, RequestTimeoutError), (4, RequestTimeoutError)]


def test_a_commit_without_an_answer_ends_in_time_and_its_late_answer_is_ignored() -> None:
    one = Queue()
    one.commit(1)
    one.poll(999)
    one.commit(2)
    assert one.called == []
    one.poll(1)
    assert one.called == [(1, RequestTimeoutError)]
    one.poll()
    assert len(one.appliance.requests) == 2
    one.appliance.take()
    one.poll()
    assert one.called == [(1, RequestTimeoutError)], "that was the first one's"
    one.appliance.take()
    one.poll()
    assert one.called == [(1, RequestTimeoutError), (2, None)]


def test_more_partitions_than_one_request_takes_are_committed_in_several() -> None:
    one = Queue()
    one.commit(1, *(TopicPartition("t", number) for number in range(COMMITS_AT_ONCE + 5)))
    assert len(one.appliance.requests[0][0]["offsets"]) == COMMITS_AT_ONCE
    one.appliance.take()
    one.poll()
    assert one.called == []
    assert len(one.appliance.requests[0][0]["offsets"]) == 5
    one.appliance.take()
    one.poll()
    assert one.called == [(1, None)]


def test_no_request_has_more_metadata_than_the_appliance_takes() -> None:
    one = Queue()
    offsets = {
        TopicPartition("t", number): OffsetAndMetadata(1, "m" * 4_096) for number in range(1_000)
    }
    commit = one.queue.add(offsets, None, 1_000)
    one.poll()
    partitions = []
    while one.appliance.requests:
        request = one.appliance.requests[0][0]
        assert len(orjson.dumps(request)) <= JSON_MAX_BYTES
        partitions += [partition for _, partition, *_ in request["offsets"]]
        one.appliance.take()
        one.poll()
    assert commit.is_done
    assert commit.error is None
    assert partitions == list(range(1_000))


def test_metadata_that_no_request_can_carry_fails_its_commit_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Queue()
    request = one.appliance.request

    def refusing(api: int, body: Sequence[bytes], on_response: Any) -> bool:
        if len(body[0]) > JSON_MAX_BYTES:
            raise error_for(ErrorCode.REQUEST_TOO_LARGE, "too large")
        return request(api, body, on_response)

    monkeypatch.setattr(one.appliance, "request", refusing)
    failed = one.queue.add({KEYS[0]: OffsetAndMetadata(1, "m" * JSON_MAX_BYTES)}, None, 1_000)
    one.poll()
    assert failed.error is not None
    assert failed.error.code is ErrorCode.REQUEST_TOO_LARGE
    one.commit(2)
    one.appliance.take()
    one.poll()
    assert one.called == [(2, None)]


def test_a_callback_may_commit_and_what_it_raises_is_its_own() -> None:
    one = Queue()

    def again(_: object, __: object) -> None:
        one.commit(2)
        raise RuntimeError("on purpose")

    one.queue.add({KEYS[0]: OffsetAndMetadata(1)}, again, 1_000)
    one.poll()
    one.appliance.take()
    one.poll()
    one.appliance.take()
    one.poll()
    assert one.called == [(2, None)]


def test_offsets_are_taken_as_users_give_them() -> None:
    class KafkaPythons:
        offset, metadata, leader_epoch = 5, "note", 3

    given = {KEYS[0]: 1, KEYS[1]: OffsetAndMetadata(2, None, None), ("t", 2): KafkaPythons()}
    assert offsets_of(given) == {
        KEYS[0]: OffsetAndMetadata(1), KEYS[1]: OffsetAndMetadata(2, "", -1),
        KEYS[2]: OffsetAndMetadata(5, "note", 3)
    }  # fmt: skip
    for wrong in (
        None,
        5,
        {KEYS[0]: None},
        {KEYS[0]: True},
        {KEYS[0]: -1},
        {"t": 1},
        {KEYS[0]: OffsetAndMetadata(1, 5)},  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError):
            offsets_of(wrong)


def test_an_offset_with_metadata_is_an_int() -> None:
    import copy
    import pickle

    one = OffsetAndMetadata(7, "x", 2)
    assert (one, one.offset, one.metadata, one.leader_epoch, one + 1) == (7, 7, "x", 2, 8)
    assert one != OffsetAndMetadata(7)
    assert one == OffsetAndMetadata(7, "x", 2)
    assert hash(one) == hash(7)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert repr(one) == "OffsetAndMetadata(offset=7, metadata='x', leader_epoch=2)"


@pytest.mark.parametrize("version", [1, 2])
def test_a_commit_says_which_topic_was_read_when_it_was_made_where_the_appliance_understands_that(
    version: int,
) -> None:
    one, ids = Queue(), {KEYS[0]: "a" * 32}
    one.appliance.version = lambda _api: version  # type: ignore[attr-defined]
    one.queue = CommitQueue(
        one.appliance,  # type: ignore[arg-type]
        one._member_fields,
        one._refused,
        lambda key: ids.get(key, ""),
    )
    one.commit(5, *KEYS[:2])
    known = ["a" * 32] if version == 2 else []
    assert one.appliance.requests[0][0]["offsets"] == [
        ["t", 0, 5, -1, "", *known],
        ["t", 1, 5, -1, ""],
    ]
    one.commit(6)
    ids[KEYS[0]] = "b" * 32  # the topic was made again before the commit is sent
    one.appliance.take()
    one.poll()
    assert one.appliance.requests[0][0]["offsets"] == [["t", 0, 6, -1, "", *known]]


def test_a_commit_for_a_topic_that_was_made_again_ends_with_an_error_of_its_own() -> None:
    one = Queue()
    one.commit(5)
    one.appliance.fail(refused=[["t", 0, int(ErrorCode.UNKNOWN_TOPIC_ID), "made again"]])
    one.poll()
    assert one.called == [(5, UnknownTopicIdError)]
    assert one.refused_count == 0, "the membership is as it was"
