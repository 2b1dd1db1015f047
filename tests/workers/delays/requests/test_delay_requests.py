"""Requests about delayed records, whatever is in them: each is answered once, by an answer that
fits, and none costs another anything.
"""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.error_codes import ErrorCode
from tailrace.core.schedule.delays import delay_id
from tailrace.kernel.reference_arrow import default_rows
from tailrace.protocol.frame import Api
from tests.kit.batches import TOPIC_ID
from tests.kit.stepped.delay_requests import DAY, PLACE, Asking
from tests.kit.stepped.delays import LOG_ID, SCHEMA
from tests.kit.stepped.foreign_rows import encoded, foreign, put
from workers.delays.requests import changes as changes_module
from workers.delays.requests import service
from workers.delays.requests import validation as request_fields
from workers.delays.requests.changes import Requester

APIS = (Api.LIST_DELAYS, Api.CHANGE_DELAYS, Api.DESCRIBE_DELAYS)


def ids(count: int = 4, topic_id: bytes = LOG_ID) -> list[str]:
    return [delay_id(topic_id, 0, offset, 0) for offset in range(count)]


odd = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(max_size=20)
    | st.sampled_from(["t", "t@delay", *ids(), *ids(1, TOPIC_ID), delay_id(LOG_ID, 0, -5, -5),
    delay_id(LOG_ID, -1, 1 << 62, 1 << 62), "00ff"]),
    lambda inner: st.lists(inner,
    max_size=4) | st.dictionaries(st.sampled_from(["delay_id", "due_us", "a"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
fields = ["topic", "partition", "limit", "after", "key", "from_us", "to_us", "changes"]
bodies = st.dictionaries(st.sampled_from(fields), odd, max_size=8).map(
    lambda body: {"topic": "t", **body}
)
changes = st.fixed_dictionaries(
    {"changes": st.lists(st.fixed_dictionaries({"delay_id": odd, "due_us": odd}) | odd, max_size=6)}
)
numbers = st.integers(-(1 << 63), (1 << 63) - 1)
lists = st.fixed_dictionaries(
    {
        "topic": st.just("t"),
        "after": st.lists(numbers, min_size=3, max_size=3),
        "from_us": numbers,
        "to_us": numbers,
    }
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(APIS), bodies | changes | lists), min_size=1, max_size=12)
)
def test_whatever_is_asked_is_answered_once_and_expected(
    asked: list[tuple[int, dict[str, Any]]],
) -> None:
    asking = Asking()
    asking.world.schedule([DAY] * 4)
    for api, request in asked:
        asking.ask(api, request)
    asking.pass_time(14)
    assert len(asking.answers) == len(asked)
    assert not asking.failures, "each field was looked at before it was used"
    assert asking.answered(Api.LIST_DELAYS, {"topic": "t"})[0] is ErrorCode.OK


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"[" * 1_000,
        b'{"topic":' * 900 + b"1" + b"}" * 900,
        b"\xff\xfe",
        b'{"after": {}, "topic": "t"}',
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    asking = Asking()
    for api in (*APIS, 99):
        asking.ask(api, body)
    assert [code for _, code, _ in asking.answers].count(ErrorCode.OK) == 0
    assert len(asking.answers) == 4
    assert not asking.failures


def test_what_nobody_expected_is_answered_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking = Asking()
    asking.world.schedule([DAY])

    def fail(*_: object) -> None:
        raise RecursionError("deep")

    with monkeypatch.context() as patch:
        patch.setattr(asking.requests, "_describe", fail)
        assert asking.answered(Api.DESCRIBE_DELAYS, {})[0] is ErrorCode.INTERNAL_ERROR
    assert len(asking.failures) == 1
    assert asking.answered(Api.DESCRIBE_DELAYS, {})[0] is ErrorCode.OK


def test_a_page_of_a_list_ends_by_bytes_and_the_next_goes_on() -> None:
    asking = Asking(page_bytes=8_000)
    keys = [b"%03d" % n * 200 for n in range(60)]
    rows = default_rows([1] * 60, list(keys), [b"v"] * 60, None)
    for start in range(0, 60, 20):
        assert (
            put(
                asking.world,
                encoded(
                    arrow_batch.with_delays(
                        rows.slice(start, 20), SCHEMA, [asking.world.wall_us + DAY] * 20, None
                    )
                ),
            )
            == 20
        )
    found: list[bytes] = []
    after, pages = None, 0
    while pages == 0 or after is not None:
        code, answer = asking.answered(
            Api.LIST_DELAYS, {"topic": "t", "limit": 1_000, "after": after}
        )
        assert code is ErrorCode.OK
        assert len(orjson.dumps(answer)) < 9_500
        found += [base64.b64decode(row["key"]) for row in answer["delays"]]
        after, pages = answer["after"], pages + 1
    assert found == keys
    assert pages > 5


def test_a_key_that_is_too_long_to_be_shown_is_left_out_and_its_length_said() -> None:
    asking = Asking()
    rows = default_rows([1] * 2, [b"k" * 5_000, b"short"], [b"v"] * 2, None)
    assert (
        put(
            asking.world,
            encoded(arrow_batch.with_delays(rows, SCHEMA, [asking.world.wall_us + DAY] * 2, None)),
        )
        == 2
    )
    _, answer = asking.answered(Api.LIST_DELAYS, {"topic": "t"})
    assert [(row["key"], row.get("key_bytes")) for row in answer["delays"]] == [
        (None, 5_000),
        (base64.b64encode(b"short").decode(), None),
    ]
    _, answer = asking.answered(Api.LIST_DELAYS, {"topic": "t", "key": b"short".hex()})
    assert len(answer["delays"]) == 1


@pytest.mark.parametrize("due_us", [-(1 << 63), (1 << 63) - 1, -1])
def test_a_due_time_that_no_calendar_has_is_listed_as_one_that_it_has(due_us: int) -> None:
    asking = Asking()
    assert (
        put(asking.world, encoded(arrow_batch.with_delays(foreign(1), SCHEMA, [due_us], None))) == 1
    )
    _, answer = asking.answered(Api.LIST_DELAYS, {"topic": "t"})
    for row in answer["delays"]:
        assert 0 <= row["due_us"] < 253_402_300_799_000_000


def test_the_same_record_named_twice_is_changed_once() -> None:
    asking = Asking()
    asking.world.schedule([DAY] * 2)
    first = delay_id(LOG_ID, 0, 0, asking.world.rows["r0"].due_us)
    soon = asking.world.wall_us + 2 * DAY
    items = [
        {"delay_id": first, "due_us": soon},
        {"delay_id": first, "due_us": None},
        {"delay_id": first, "due_us": soon},
    ]
    code, answer = asking.answered(Api.CHANGE_DELAYS, {"changes": items})
    assert code is ErrorCode.OK
    assert [result["code"] for result in answer["results"]] == [
        0,
        ErrorCode.UNKNOWN_DELAY,
        ErrorCode.UNKNOWN_DELAY,
    ]
    assert asking.world.partition.pending_count() == 2


def test_what_is_rescheduled_at_once_is_cut_into_batches_that_the_log_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking = Asking()
    for number in range(6):
        row = arrow_batch.with_delays(
            foreign(1, b"%d" % number * 30_000), SCHEMA, [asking.world.wall_us + DAY], None
        )
        assert put(asking.world, encoded(row)) == 1
    items = [{"delay_id": each, "due_us": asking.world.wall_us + 2 * DAY} for each in ids(6)]
    code, answer = asking.answered(Api.CHANGE_DELAYS, {"changes": items})
    assert code is ErrorCode.OK
    assert [result["code"] for result in answer["results"]] == [0] * 6, (
        "no batch was larger than the lane"
    )
    monkeypatch.setattr(changes_module, "CHANGE_BYTES", 100_000)
    items = [
        {"delay_id": result["delay_id"], "due_us": asking.world.wall_us + 3 * DAY}
        for result in answer["results"]
    ]
    code, answer = asking.answered(Api.CHANGE_DELAYS, {"changes": items})
    assert [result["code"] for result in answer["results"]] == [0] * 3 + [
        ErrorCode.REQUEST_TOO_LARGE
    ] * 3


def test_requests_that_wait_are_bounded_for_a_session_and_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "DEFERRED_MAX", 40)
    asking = Asking()
    request = {"changes": [{"delay_id": delay_id(LOG_ID, 0, 1 << 40, 0), "due_us": None}]}
    for session in range(4):
        for _ in range(changes_module.SESSION_MAX + 4):
            asking.ask(Api.CHANGE_DELAYS, request, session)
    refused = [code for _, code, _ in asking.answers]
    assert set(refused) == {ErrorCode.TOO_MANY_REQUESTS}
    assert len(refused) == 4 * (changes_module.SESSION_MAX + 4) - 40
    asking.pass_time(7)
    assert len(asking.answers) == 4 * (changes_module.SESSION_MAX + 4)
    assert {code for _, code, _ in asking.answers[len(refused) :]} == {ErrorCode.OK}, (
        "they were told that there is no such record"
    )


def test_changes_whose_outcome_is_not_known_are_bounded_for_a_session() -> None:
    asking = Asking()
    asking.world.schedule([DAY] * 40)
    for offset in range(40):
        asking.ask(
            Api.CHANGE_DELAYS,
            {"changes": [{"delay_id": delay_id(LOG_ID, 0, offset, 0), "due_us": None}]},
        )
    assert [code for _, code, _ in asking.answers] == [ErrorCode.TOO_MANY_REQUESTS] * (
        40 - changes_module.SESSION_MAX
    )
    asking.pass_time(1)
    assert [code for _, code, _ in asking.answers[40 - changes_module.SESSION_MAX :]] == [
        ErrorCode.OK
    ] * changes_module.SESSION_MAX


def test_tokens_that_a_client_guesses_decide_nothing() -> None:
    asking = Asking()
    asking.world.schedule([DAY] * 2)
    first = delay_id(LOG_ID, 0, 0, asking.world.rows["r0"].due_us)
    forged = arrow_batch.with_delays(foreign(3), SCHEMA, [asking.world.wall_us + DAY] * 3, None)
    for token in (1, 2, 1 << 32, 1 << 32 | 1, 1 << 33):
        put(
            asking.world, encoded(forged, due_us=token)
        )  # the worker refuses it; an older one did not
    code, answer = asking.answered(
        Api.CHANGE_DELAYS,
        {"changes": [{"delay_id": first, "due_us": asking.world.wall_us + 2 * DAY}]},
    )
    assert code is ErrorCode.OK
    assert answer["results"][0]["code"] == 0
    tokens = set()
    for number in range(20):
        asking.requests._changes._add_parts(
            changes_module.PendingChange(Requester(0, number, 0), [{}], [], 0),
            PLACE,
            0,
            [(0, [asking.world.partition.cancellation(1)])],
        )
        tokens |= set(asking.world.partition.changes)
    assert len(tokens) == 20
    assert max(tokens) - min(tokens) > 1 << 50


def test_partitions_are_described_page_by_page() -> None:
    asking = Asking(page_bytes=100)
    worlds = {(f"{n:032x}", n): asking.world.partition for n in range(3)}
    asking.requests._open = worlds
    code, answer = asking.answered(Api.DESCRIBE_DELAYS, {"limit": 1})
    assert code is ErrorCode.OK
    assert (len(answer["partitions"]), answer["after"]) == (1, ["t", 0])
    assert asking.answered(Api.DESCRIBE_DELAYS, {"after": ["t", 0]})[1] == {
        "partitions": [],
        "after": None,
    }
    assert request_fields.DESCRIBE_LIMIT == 1_000
    assert isinstance(answer["partitions"][0]["lost_rows"], int)


def test_a_list_copies_keys_and_no_values() -> None:
    asking = Asking()
    for _ in range(20):
        row = arrow_batch.with_delays(
            foreign(1, b"x" * 50_000), SCHEMA, [asking.world.wall_us + DAY], None
        )
        put(asking.world, encoded(row))
    asking.answered(Api.LIST_DELAYS, {"topic": "t"})
    before = pa.total_allocated_bytes()
    page, _ = asking.world.partition._store.page(
        (0, 0), 1 << 50, 100, ["@due_us", "key"], lambda rows: rows
    )
    assert len(page) == 20
    assert pa.total_allocated_bytes() - before < 50_000
