"""`close` keeps what the calls before it were given, also while a client connects, or connects
again: both kinds of each client, over a real appliance, behind a relay that ends connections.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.aio import AsyncConsumer, AsyncProducer, AsyncShareConsumer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.conformance.worlds import WORLDS, World
from tests.kit.hosts.relay import Relay
from tests.kit.members.queues import LONG_MS, take
from tests.kit.processes import HANG_LIMIT_S

COUNT = 6
HALF = COUNT // 2
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "thread": (Producer, Consumer, ShareConsumer),
    "loop": (AsyncProducer, AsyncConsumer, AsyncShareConsumer),
}


async def done(result: Any) -> Any:
    """The result of a method of either kind of client."""
    return await result if inspect.iscoroutine(result) else result


class Clients:
    """Makes the clients of one test, of one kind."""

    def __init__(self, world: World, relay: Relay, topic: str) -> None:
        self.producer_kind, self.consumer_kind, self.share_kind = KINDS[world.name]
        self.is_async = world.name == "loop"
        self.relay = relay
        self.topic = topic

    def producer(self, **settings: Any) -> Any:
        return self.producer_kind(self.relay.address, **settings)

    def consumer(self, **settings: Any) -> Any:
        return self._of_group(self.consumer_kind, settings)

    def share(self, **settings: Any) -> Any:
        return self._of_group(self.share_kind, settings)

    def _of_group(self, kind: Any, settings: dict[str, Any]) -> Any:
        settings = {"auto_offset_reset": "earliest", **settings}
        return kind(
            self.topic, bootstrap=self.relay.address, group_id=f"g-{self.topic}", **settings
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the outside world, while the clients work."""
        deadline = time.monotonic() + HANG_LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            if self.is_async:
                await asyncio.sleep(0.005)
            else:
                time.sleep(0.005)


def watched(client: Any) -> Any:
    """The connection of a client that its own thread, or its event loop, watches."""
    plain = getattr(client, "_producer", getattr(client, "_consumer", client))
    if hasattr(plain, "_sender_thread"):
        return plain._sender_thread.connection
    if isinstance(plain, ShareConsumer):
        return plain._poll_loop.member.thread.beats.connection
    return plain._group.beats.connection


Act = Callable[["Clients"], AsyncIterator[Any]]
"""Gives a client. What follows is done while it has no connection."""


async def close_while_it_connects_again(clients: Clients, act: Act) -> None:
    """Close a client whose connection has ended, and can be made again from then on."""
    steps = act(clients)
    client = await anext(steps)
    clients.relay.cut()
    await clients.until(lambda: not watched(client).is_ready)
    await anext(steps, None)
    clients.relay.restore()
    await done(client.close())


@pytest.fixture
def relay(appliance: EmbeddedAppliance) -> Iterator[Relay]:
    with Relay(appliance.address) as made:
        yield made


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of one partition with COUNT records."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic))
        for number in range(COUNT):
            producer.send(topic, b"%d" % number)
    return topic


def values(appliance: EmbeddedAppliance, topic: str, count: int, **settings: Any) -> list[bytes]:
    with Consumer(
        topic, bootstrap=appliance.address, auto_offset_reset="earliest", **settings
    ) as consumer:
        return [record.value for record in consumer.consume(count, timeout=HANG_LIMIT_S)]


# ---- the first connection ------------------------------------------------------------------------


@WORLDS
def test_a_queue_begins_where_its_first_consumer_was_made_though_that_is_closed_at_once(
    world: World, appliance: EmbeddedAppliance, relay: Relay, filled: str
) -> None:
    clients = Clients(world, relay, filled)

    async def body() -> list[bytes]:
        first = clients.share(auto_offset_reset="latest")
        if clients.is_async:
            await first.start()
        await done(first.close())
        with Producer(appliance.address) as producer:
            producer.send(filled, b"new")
        second = clients.share(auto_offset_reset="latest")
        try:
            return [record.value for record in await done(second.poll(LONG_MS))]
        finally:
            await done(second.close())

    assert world.run(body()) == [b"new"]


@WORLDS
@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_a_producer_that_is_closed_at_once_has_sent_everything(
    world: World, appliance: EmbeddedAppliance, relay: Relay, filled: str, acks: Any
) -> None:
    clients = Clients(world, relay, filled)
    sent = [b"n%d" % number for number in range(COUNT)]

    async def body() -> None:
        producer = clients.producer(acks=acks, linger_ms=1_000)
        for value in sent:
            await done(producer.send(filled, value))
        await done(producer.close())

    world.run(body())
    assert values(appliance, filled, 2 * COUNT)[COUNT:] == sent


# ---- a connection that has ended ----------------------------------------------------------------


@WORLDS
@pytest.mark.parametrize("kind", ["consumer", "share"])
def test_a_member_leaves_its_group(
    world: World, appliance: EmbeddedAppliance, relay: Relay, filled: str, kind: str
) -> None:
    async def member(clients: Clients) -> AsyncIterator[Any]:
        settings = {} if kind == "share" else {"enable_auto_commit": False}
        joined = getattr(clients, kind)(**settings)
        assert await done(joined.poll(LONG_MS))
        yield joined

    clients = Clients(world, relay, filled)
    world.run(close_while_it_connects_again(clients, member))
    with Admin(appliance.address) as admin:
        assert admin.describe_groups(f"g-{filled}")[f"g-{filled}"]["member_count"] == 0


async def _send(clients: Clients) -> AsyncIterator[Any]:
    producer = clients.producer(linger_ms=60_000)
    for number in range(COUNT, COUNT + HALF):
        await done(producer.send(clients.topic, b"%d" % number))
    yield producer
    for number in range(COUNT + HALF, 2 * COUNT):
        await done(producer.send(clients.topic, b"%d" % number))


def _are_in_the_log(appliance: EmbeddedAppliance, topic: str) -> None:
    expected = [b"%d" % number for number in range(2 * COUNT)]
    assert values(appliance, topic, 2 * COUNT) == expected


async def _poll(clients: Clients) -> AsyncIterator[Any]:
    consumer = clients.consumer(auto_commit_interval_ms=3_600_000)
    assert len(await done(consumer.poll(LONG_MS, HALF))) == HALF
    yield consumer


async def _commit_async(clients: Clients) -> AsyncIterator[Any]:
    consumer = clients.consumer(enable_auto_commit=False)
    assert len(await done(consumer.poll(LONG_MS, HALF))) == HALF
    yield consumer
    await done(consumer.commit_async())


def _is_committed(appliance: EmbeddedAppliance, topic: str) -> None:
    key = TopicPartition(topic, 0)
    with Admin(appliance.address) as admin:
        assert int(admin.list_group_offsets(f"g-{topic}", [key])[key] or 0) == HALF


async def _take(clients: Clients, outcome: str) -> AsyncIterator[Any]:
    share = clients.share(share_acknowledgement_mode="explicit")
    taken: list[Any] = []
    while len(taken) < HALF:
        taken += await done(share.poll(LONG_MS, HALF - len(taken)))
    yield share
    for record in taken:
        await done(share.acknowledge(record, outcome))


def _accept(clients: Clients) -> AsyncIterator[Any]:
    return _take(clients, "accept")


def _reject(clients: Clients) -> AsyncIterator[Any]:
    return _take(clients, "reject")


def _release(clients: Clients) -> AsyncIterator[Any]:
    return _take(clients, "release")


def _rest(appliance: EmbeddedAppliance, topic: str, count: int) -> dict[int, int]:
    """The rest of the queue: offset -> delivery count."""
    with ShareConsumer(
        topic,
        bootstrap=appliance.address,
        group_id=f"g-{topic}",
        share_acknowledgement_mode="explicit",
    ) as consumer:
        return {record.offset: record.delivery_count for record in take(consumer, count)}


def _are_accepted(appliance: EmbeddedAppliance, topic: str) -> None:
    assert _rest(appliance, topic, HALF) == dict.fromkeys(range(HALF, COUNT), 1)


def _are_dead_letters(appliance: EmbeddedAppliance, topic: str) -> None:
    assert values(appliance, f"{topic}.dlq", HALF) == [b"%d" % number for number in range(HALF)]
    _are_accepted(appliance, topic)


def _come_again(appliance: EmbeddedAppliance, topic: str) -> None:
    counts = {**dict.fromkeys(range(HALF), 2), **dict.fromkeys(range(HALF, COUNT), 1)}
    assert _rest(appliance, topic, COUNT) == counts


async def _begin_a_transaction(clients: Clients) -> AsyncIterator[Any]:
    producer = clients.producer(transactional_id=f"x-{clients.topic}", linger_ms=60_000)
    await done(producer.begin_transaction())
    await done(producer.send(clients.topic, b"never"))
    await done(producer.flush())
    yield producer
    await done(producer.send(clients.topic, b"nor this"))


def _is_aborted(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        described = admin.describe_transactions(f"x-{topic}")[f"x-{topic}"]
    assert described["open_ms"] is None
    assert (described["last"]["outcome"], described["last"]["by"]) == ("abort", "producer")


Check = Callable[[EmbeddedAppliance, str], None]


@WORLDS
@pytest.mark.parametrize(
    ("act", "check"),
    [
        (_send, _are_in_the_log),
        (_poll, _is_committed),
        (_commit_async, _is_committed),
        (_accept, _are_accepted),
        (_reject, _are_dead_letters),
        (_release, _come_again),
        (_begin_a_transaction, _is_aborted),
    ],
    ids=lambda each: each.__name__[1:],
)
def test_what_was_accepted_before_is_not_lost(
    world: World, appliance: EmbeddedAppliance, relay: Relay, filled: str, act: Act, check: Check
) -> None:
    world.run(close_while_it_connects_again(Clients(world, relay, filled), act))
    check(appliance, filled)
