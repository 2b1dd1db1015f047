"""Quotas at a front: rates wait and lose nothing, sums are refused with a sentence, and what one
entity waits for costs no other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from netfront.agent.front_agent import Front
from netfront.quotas import parked_messages
from netfront.quotas.prefix_usage import PENDING_CHECK_NS
from netfront.quotas.quota_service import QuotaService
from netfront.socket.flow_control import CreditLedger
from shm.memory.layout import ProcessWord
from shm.messages.lane_messages import Assignment
from shm.tables.rate_uses import UNUSED, RateUse, RateUses, number_of
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import credit_messages, fetch_messages
from tailrace.protocol.frame import PUSH_CORRELATION_ID, Api, decode_response_header
from tests.kit.stepped.fronts import FakeClient, FakeFront, message_of
from tests.kit.stepped.produce import batch, codes

SETTINGS = {"auto_create_topics": False, "credit_bytes": 1 << 20}


def use(world: FakeFront, *rules: str) -> None:
    world.front.apply_settings({**SETTINGS, "quotas": list(rules)})
    world.settle()


def service_of(front: Front) -> QuotaService:
    assert front._quotas is not None
    return front._quotas


def pushes(world: FakeFront, client: FakeClient) -> list[dict[str, Any]]:
    """Take the pushes that told the client of its waits. Its other messages stay."""
    found, rest = [], []
    for frames in world.transport.answers.pop(client.identity, ()):
        header = decode_response_header(frames[0])
        if header.correlation_id == PUSH_CORRELATION_ID and len(frames) > 1:
            found.append(orjson.loads(frames[1]))
        else:
            rest.append(frames)
    world.transport.answers.setdefault(client.identity, type(world.transport.inbox)()).extend(rest)
    return found


def limit_of(world: FakeFront, client: FakeClient) -> int:
    session = world.front._sessions.by_identity(client.identity)
    assert session is not None
    return session.credit.limit


def test_a_front_without_rules_has_no_service_and_its_sessions_no_quota(
    world: FakeFront, client: FakeClient
) -> None:
    assert world.front._quotas is None
    use(world)
    assert world.front._quotas is None
    use(world, "client=another request_rate=1")
    session = world.front._sessions.by_identity(client.identity)
    assert session is not None
    assert session.quota is None
    assert session.credit.gate is None
    assert client.ask(Api.DESCRIBE_QUOTAS, {}) == (
        ErrorCode.OK, {"rules": ["client=another request_rate=1"], "usage": []}
    )  # fmt: skip


# ---- produced bytes ------------------------------------------------------------------------------


def test_a_producer_beyond_its_rate_gets_its_credit_later_and_is_told() -> None:
    world = FakeFront(1, 1 << 16, CreditLedger(1 << 20, 1 << 20, 1 << 16))
    use(world, "client=slow producer_byte_rate=100")
    slow, free = world.connect(b"slow"), world.connect(b"free")
    assert limit_of(world, slow) == 100
    slow.send(Api.CREDIT, credit_messages.encode_credit(400))
    free.send(Api.CREDIT, credit_messages.encode_credit(400))
    world.settle()
    assert limit_of(world, slow) == 100
    assert limit_of(world, free) >= 400
    world.step(after_ms=15)
    assert limit_of(world, slow) == 100
    world.step(after_ms=10)
    assert limit_of(world, slow) >= 400, "the balance is positive: a whole batch passes"
    assert pushes(world, slow) == [{"throttled": "producer_byte_rate", "ms": 25}]
    assert pushes(world, free) == []
    slow.send(Api.CREDIT, credit_messages.encode_credit(400))
    world.settle()
    before = limit_of(world, slow)
    topic = world.add_topic("t", 1)[0]
    slow.produce([(topic, bytes(400))])
    world.settle()
    slow.send(Api.CREDIT, credit_messages.encode_credit(400))
    world.step(after_ms=2_000)
    assert limit_of(world, slow) == before, "the debt is four seconds' worth"
    world.step(after_ms=3_000)
    assert limit_of(world, slow) > before
    assert world.slot.throttles.values()[0] == 2


def test_a_producer_is_told_of_a_wait_that_ends_with_its_question() -> None:
    world = FakeFront(1, 1 << 16, CreditLedger(1 << 20, 1 << 20, 1 << 16))
    use(world, "client=slow producer_byte_rate=1000")
    topic = world.add_topic("t", 1)[0]
    slow = world.connect(b"slow")
    slow.produce([(topic, bytes(600))])
    world.settle()
    slow.produce([(topic, bytes(400))])
    world.settle()
    assert pushes(world, slow) == []
    world.step(after_ms=40)
    slow.send(Api.CREDIT, credit_messages.encode_credit(400))
    world.settle()
    [told] = pushes(world, slow)
    assert told == {"throttled": "producer_byte_rate", "ms": 40}
    assert world.slot.throttles.values()[0] == 1
    assert limit_of(world, slow) >= 1_400


def test_reconnecting_and_other_client_ids_share_the_rate_of_the_user() -> None:
    world = FakeFront(1, 1 << 16, CreditLedger(1 << 20, 1 << 20, 1 << 16))
    use(world, "user=ANONYMOUS producer_byte_rate=1000")
    topic = world.add_topic("t", 1)[0]
    sent = 0
    for number in range(20):
        client = world.connect(f"client-{number}".encode())
        limit = limit_of(world, client)
        if limit > 100:
            client.produce([(topic, bytes(limit))], acks=0)
            sent += limit
        world.settle()
        session = world.front._sessions.by_identity(client.identity)
        assert session is not None
        world.front._session_lifecycle.drop(session)
    assert sent <= 1_000
    [row] = service_of(world.front).describe()["usage"]
    assert (row["user"], row["used"], row["connections"]) == ("ANONYMOUS", sent, 0)


def test_a_wall_clock_that_jumps_gives_and_takes_nothing() -> None:
    world = FakeFront(1, 1 << 16, CreditLedger(1 << 20, 1 << 20, 1 << 16))
    use(world, "client=* producer_byte_rate=1000")
    client = world.connect(b"c")
    topic = world.add_topic("t", 1)[0]
    client.produce([(topic, bytes(1_000))], acks=0)
    client.send(Api.CREDIT, credit_messages.encode_credit(100))
    world.settle()
    for ahead_us in (86_400_000_000, -86_400_000_000):
        world.wall_ahead_us = ahead_us
        world.step(after_ms=1)
        assert limit_of(world, client) == 1_000
    world.step(after_ms=100)
    assert limit_of(world, client) > 1_000, "it waits by elapsed time"


@pytest.mark.parametrize("fronts", [1, 2, 4])
def test_all_fronts_together_give_an_entity_no_more_than_its_rate(fronts: int) -> None:
    given = 0
    for _ in range(fronts):
        world = FakeFront(1, 1 << 16, CreditLedger(1 << 20, 1 << 20, 1 << 16))
        world.front._front_count = fronts
        use(world, "client=* producer_byte_rate=1000")
        client = world.connect(b"c")
        given += limit_of(world, client)
        topic = world.add_topic("t", 1)[0]
        client.produce([(topic, bytes(limit_of(world, client)))], acks=0)
        client.send(Api.CREDIT, credit_messages.encode_credit(100))
        world.settle()
        assert limit_of(world, client) == 1000 // fronts, "nothing is left of this second"
    assert given == 1_000


def test_a_tenant_who_uses_one_front_of_two_gets_what_the_other_leaves() -> None:
    world = FakeFront(1, 1 << 16, CreditLedger(1 << 20, 1 << 20, 1 << 16))
    world.front._front_count = 2
    use(world, "client=* producer_byte_rate=1000")
    client = world.connect(b"c")
    topic = world.add_topic("t", 1)[0]
    [row] = service_of(world.front).describe()["usage"]
    assert row["limit"] == 500

    def used_up() -> int:
        """Uses all of its share for two intervals. Returns the share after it."""
        for _ in range(3):
            room = limit_of(world, client) - sent[0]
            if room:
                client.produce([(topic, bytes(room))], acks=0)
                sent[0] += room
            client.send(Api.CREDIT, credit_messages.encode_credit(100))
            world.settle()
            world.step(after_ms=250)
            world.settle()
        [row] = service_of(world.front).describe()["usage"]
        return int(row["limit"])

    sent = [0]
    assert used_up() == 969
    number = number_of("producer_byte_rate client=c")
    other = RateUses(world.slot._words, world.slot._layout, 1)
    assert other.of_others(number, 2)[0].is_limited
    other.put(number, RateUse(31, True))
    assert used_up() == 500, "both would use more"
    other.put(number, RateUse(0, False))
    assert used_up() == 969
    for _ in range(20):
        world.step(after_ms=500)
    assert other.of_others(number, 2) == [UNUSED], "it uses nothing now"
    session = world.front._sessions.by_identity(client.identity)
    assert session is not None
    service_of(world.front).attach(session)
    [row] = service_of(world.front).describe()["usage"]
    assert row["limit"] == 500


def test_a_changed_rate_is_used_by_who_waits_already() -> None:
    world = FakeFront(1, 1 << 16, CreditLedger(1 << 20, 1 << 20, 1 << 16))
    use(world, "client=* producer_byte_rate=1")
    client = world.connect(b"c")
    for _ in range(2):
        client.send(Api.CREDIT, credit_messages.encode_credit(1 << 15))
        world.settle()
        world.step(after_ms=1_100)
    topic = world.add_topic("t", 1)[0]
    client.produce([(topic, bytes(limit_of(world, client)))])
    client.send(Api.CREDIT, credit_messages.encode_credit(1 << 15))
    world.settle()
    before = limit_of(world, client)
    use(world, "client=* producer_byte_rate=1000000")
    world.step(after_ms=100)
    assert limit_of(world, client) >= before + (1 << 15)
    use(world)
    client.send(Api.CREDIT, credit_messages.encode_credit(1 << 15))
    world.settle()
    session = world.front._sessions.by_identity(client.identity)
    assert session is not None
    assert (session.quota, session.credit.gate) == (None, None)


# ---- fetched bytes -------------------------------------------------------------------------------


def test_a_consumer_beyond_its_rate_gets_the_rest_later_and_nothing_is_lost(
    world: FakeFront,
) -> None:
    use(world, "client=slow consumer_byte_rate=100")
    slow, free = world.connect(b"slow"), world.connect(b"free")
    topic = world.add_topic("t", 1)[0]
    for _ in range(3):
        world.append(topic, b"x" * 200)
    assert sizes(world, slow, slow.fetch([topic])) == [200], "one batch passes, however large"
    asked, other = slow.fetch([topic], 1, max_wait_ms=5_000), free.fetch([topic], 1)
    world.settle()
    assert asked not in slow.heard()
    assert other in free.heard()
    world.step(after_ms=900)
    assert asked not in slow.heard()
    world.step(after_ms=200)
    answers = slow.heard()
    assert len(bytes(answers[asked][1][1])) == 200
    assert world.slot.throttles.values()[1]["consumer_byte_rate"] > 900_000


def test_a_consumer_beyond_its_rate_is_answered_without_batches_at_its_max_wait(
    world: FakeFront,
) -> None:
    use(world, "client=slow consumer_byte_rate=1")
    slow = world.connect(b"slow")
    topic = world.add_topic("t", 1)[0]
    world.append(topic, b"x" * 500)
    assert sizes(world, slow, slow.fetch([topic])) == [500]
    for max_wait_ms in (1_000, 0):
        asked = slow.fetch([topic], 0, max_wait_ms=max_wait_ms)
        world.settle()
        world.step(after_ms=300)
        assert asked not in slow.heard(), "an eager client would come again at once"
        world.step(after_ms=900)
        code, body = slow.heard()[asked]
        assert code is ErrorCode.OK
        assert [len(data) for _, data in fetch_messages.decode_fetched(body)] == [0]
    assert not any(gate.waiting for gate in service_of(world.front)._gates.values())


def sizes(world: FakeFront, client: FakeClient, asked: int) -> list[int]:
    world.settle()
    return [len(data) for _, data in fetch_messages.decode_fetched(client.heard()[asked][1])]


def test_fetches_that_wait_for_a_quota_go_on_when_it_is_removed_and_end_with_their_session(
    world: FakeFront,
) -> None:
    use(world, "client=* consumer_byte_rate=1")
    first, second = world.connect(b"a"), world.connect(b"b")
    topic = world.add_topic("t", 1)[0]
    world.append(topic, b"x" * 500)
    for client in (first, second):
        assert sizes(world, client, client.fetch([topic])) == [500]
    asked = first.fetch([topic], 0, max_wait_ms=60_000)
    second.fetch([topic], 0, max_wait_ms=60_000)
    world.settle()
    session = world.front._sessions.by_identity(b"b")
    assert session is not None
    world.front._session_lifecycle.drop(session)
    world.step()
    use(world)
    assert sizes(world, first, asked) == [500]


# ---- requests ------------------------------------------------------------------------------------


def test_requests_beyond_the_rate_are_handled_later_in_order_and_none_is_lost(
    world: FakeFront,
) -> None:
    use(world, "client=busy request_rate=10")
    busy, free = world.connect(b"busy"), world.connect(b"free")
    world.add_topic("t", 1)
    asked = [busy.send_json(Api.METADATA, {"topics": ["t"]}) for _ in range(30)]
    others = [free.send_json(Api.METADATA, {"topics": ["t"]}) for _ in range(30)]
    world.settle()
    answered = list(busy.heard())
    assert answered == asked[:10]
    assert list(free.heard()) == others
    ping = busy.send(Api.PING)
    world.settle()
    assert list(busy.heard()) == [ping], "what keeps a client alive does not wait"
    for _ in range(40):
        world.step(after_ms=100)
        answered += busy.heard()
    assert answered == asked
    assert service_of(world.front)._parked.is_empty


def test_batches_of_a_connection_keep_their_order_when_they_wait_for_the_rate_of_requests() -> None:
    world = FakeFront(1, 1 << 16)
    use(world, "client=busy request_rate=5")
    busy = world.connect(b"busy")
    topic = world.add_topic("t", 1)[0]
    for number in range(20):
        busy.produce([(topic, batch(number))])
    taken = []
    for _ in range(60):
        world.step(after_ms=100)
        taken += [data for _, data in world.workers[0].acquire_all()]
    assert taken == [batch(number) for number in range(20)]


def test_what_waits_for_the_rate_of_requests_is_bounded(
    world: FakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked_messages, "PARKED_MAX", 5)
    use(world, "client=busy request_rate=1")
    busy = world.connect(b"busy")
    asked = [busy.send_json(Api.METADATA, {"topics": []}) for _ in range(8)]
    world.settle()
    answers = busy.heard()
    assert list(answers) == [asked[0], asked[6], asked[7]]
    assert answers[asked[7]][0] is ErrorCode.TOO_MANY_REQUESTS
    assert "wait for the quota of requests" in message_of(answers[asked[7]])
    session = world.front._sessions.by_identity(b"busy")
    assert session is not None
    world.front._session_lifecycle.drop(session)
    assert service_of(world.front)._parked.is_empty
    world.step(after_ms=20_000)


@pytest.mark.parametrize("parked_max", [1_024, 1])
def test_a_message_without_a_header_is_refused_as_ever(
    world: FakeFront, monkeypatch: pytest.MonkeyPatch, parked_max: int
) -> None:
    monkeypatch.setattr(parked_messages, "PARKED_MAX", parked_max)
    use(world, "client=busy request_rate=1")
    busy = world.connect(b"busy")
    for _ in range(3):
        busy.send_json(Api.METADATA, {"topics": []})
    for frames in ([], [b""], [b"GET / HTTP/1.1"], [bytes(24)]):
        world.transport.inbox.append([b"busy", *frames])
    for _ in range(10):
        world.step(after_ms=1_000)
    assert world.slot.load(ProcessWord.INTERNAL_ERRORS) == 0


def test_partitions_are_made_at_their_rate(world: FakeFront) -> None:
    use(world, "client=maker controller_mutation_rate=10")
    maker = world.connect(b"maker")
    for number in range(3):
        maker.send_json(Api.CREATE_TOPICS, {"topics": [{"name": f"t{number}", "partitions": 25}]})
    world.settle()
    assert count_of(world) == 1
    world.step(after_ms=1_400)
    assert count_of(world) == 0
    world.step(after_ms=300)
    assert count_of(world) == 1
    world.step(after_ms=2_700)
    assert count_of(world) == 1


@pytest.mark.parametrize("api", [Api.UNDELETE_TOPICS, Api.PURGE_TOPICS])
def test_topics_of_the_bin_are_changed_at_the_rate_of_changes(world: FakeFront, api: Api) -> None:
    use(world, "client=maker controller_mutation_rate=1")
    maker = world.connect(b"maker")
    for number in range(3):
        maker.send_json(api, {"topics": [{"name": f"t{number}"}]})
    world.settle()
    assert count_of(world) == 1
    world.step(after_ms=1_100)
    assert count_of(world) == 1


def count_of(world: FakeFront) -> int:
    """Requests that the controller has got since."""
    count = 0
    while world.controller.take() is not None:
        count += 1
    return count


# ---- sums ----------------------------------------------------------------------------------------


def test_one_connection_too_many_is_refused_with_a_sentence_until_another_ends(
    world: FakeFront,
) -> None:
    use(world, "user=* connections_max=2")
    world.connect(b"a"), world.connect(b"b")
    with pytest.raises(AssertionError):
        world.connect(b"c")
    session = world.front._sessions.by_identity(b"a")
    assert session is not None
    world.front._session_lifecycle.drop(session)
    world.connect(b"c")
    [row] = service_of(world.front).describe()["usage"]
    assert (row["used"], row["limit"]) == (2, 2)


def test_a_handshake_on_the_same_connection_counts_once(world: FakeFront) -> None:
    use(world, "client=a connections_max=1")
    for _ in range(3):
        world.connect(b"a")


def test_transactional_ids_are_counted_until_their_transaction_has_ended(world: FakeFront) -> None:
    use(world, "user=* transactions_max=2")
    client = world.connect(b"a")

    def begin(who: FakeClient, name: str) -> bool:
        asked = who.send_json(
            Api.INIT_TRANSACTIONS,
            {"transactional_id": name, "timeout_ms": 5_000},
        )
        world.settle()
        answer = who.heard().get(asked)
        assert answer is None or answer[0] is ErrorCode.QUOTA_EXCEEDED
        return answer is None

    assert begin(client, "one")
    assert begin(client, "two")
    assert not begin(client, "three")
    assert begin(client, "two"), "the same id again"
    session = world.front._sessions.by_identity(b"a")
    assert session is not None
    world.front._session_lifecycle.drop(session)
    other = world.connect(b"b")
    assert not begin(other, "three"), "reconnecting leaves the transactions open"
    world.step(after_ms=5_100)
    assert begin(other, "three")


def test_batches_for_a_full_prefix_are_refused_and_others_pass() -> None:
    world = FakeFront(1, 1 << 16)
    full, other = world.add_topic("a.t", 1)[0], world.add_topic("b.t", 1)[0]
    stored = {full.slot: 1_000, other.slot: 1_000}
    plain = world.log.state
    world.log.state = lambda route: plain(route)._replace(size_bytes=stored[route.slot])
    use(world, "prefix=a. stored_bytes_max=1000")
    client = world.connect(b"c")
    asked = client.produce([(full, batch(1)), (other, batch(2))])
    world.settle()
    [message] = world.workers[0].acquire_all()
    world.workers[0].answer(message[0])
    world.settle()
    assert codes(client.heard()[asked]) == [ErrorCode.QUOTA_EXCEEDED, ErrorCode.OK]
    stored[full.slot] = 999
    world.step(after_ms=1_100)
    client.produce([(full, batch(3))])
    world.settle()
    assert len(world.workers[0].acquire_all()) == 1
    [row] = service_of(world.front).describe()["usage"]
    assert (row["prefix"], row["used"], row["limit"]) == ("a.", 999, 1000)


def test_delayed_records_beyond_the_quota_are_refused_by_what_the_scheduler_counts() -> None:
    world = FakeFront(1, 1 << 16)
    made = world.add_topic("a.t", 1)[0]
    log = world.add_topic("log", 1)[0]
    world.routing.apply(with_log(made, log))
    use(world, "prefix=a. delayed_records_max=10")
    asked = world.scheduler.take()
    assert asked is not None

    def scheduler_says(pending: int) -> None:
        world.step(after_ms=PENDING_CHECK_NS // 1_000_000 + 1)
        message = world.scheduler.take()
        assert message is not None
        world.scheduler.answer(
            message,
            {"partitions": [{"topic": "a.t", "partition": 0, "pending": pending}], "after": None},
        )
        world.step()
        world.step(after_ms=1_100)

    world.scheduler.answer(asked, {"partitions": [], "after": None})
    client = world.connect(b"c")
    for pending, is_taken in ((9, True), (10, False), (3, True)):
        scheduler_says(pending)
        client.produce([(log, batch(1))])
        world.settle()
        assert bool(world.workers[0].acquire_all()) is is_taken


def with_log(topic: Assignment, log: Assignment) -> Assignment:
    return replace(topic, delay_log=log.topic_id.hex(), version=topic.version + 100)


def test_a_rule_that_this_version_does_not_know_is_said_and_changes_nothing(
    world: FakeFront, caplog: pytest.LogCaptureFixture
) -> None:
    use(world, "client=a request_rate=7")
    use(world, "client=a no_such=7")
    assert "quotas_not_applied" in caplog.text
    world.connect(b"a")
    assert service_of(world.front).describe()["rules"] == ["client=a request_rate=7"]
