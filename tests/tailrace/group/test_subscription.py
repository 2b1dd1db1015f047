"""Arguments of subscribe(), and the callbacks made of them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from tailrace import Consumer, RebalanceListener, TopicPartition
from tailrace.client.connections.steps import lifted, run_at_once
from tailrace.core.errors import InvalidRequestError
from tailrace.group.rebalance_listener import callbacks_of
from tailrace.group.subscription import TOPICS_AT_ONCE, named_topics, subscription_of

KEYS = [TopicPartition("t", 0)]


@pytest.mark.parametrize(
    ("topics", "pattern", "names", "patterns"),
    [
        ("a", None, ["a"], []),
        (["a", "b", "a"], None, ["a", "b"], []),
        (("a",), None, ["a"], []),
        ({"a"}, None, ["a"], []),
        (None, "a.*", [], ["a.*"]),
        (None, re.compile("a"), [], ["a"]),
        (re.compile("a"), None, [], ["a"]),
        ("^a", None, [], ["^a"]),
        (["^a", "b", re.compile("c")], None, ["b"], ["^a", "c"]),
    ],
)
def test_names_and_patterns(
    topics: Any, pattern: Any, names: list[str], patterns: list[str]
) -> None:
    found = subscription_of(topics, pattern)
    assert found.names == names
    assert sorted(one.pattern for one in found.patterns) == sorted(patterns)


@pytest.mark.parametrize(
    ("topics", "pattern"),
    [
        (None, None),
        (["a"], "b"),
        (5, None),
        ([5], None),
        (None, 5),
        (None, "("),
        ("^(", None),
        (None, ""),
        (None, re.compile(b"a")),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(topics: Any, pattern: Any) -> None:
    with pytest.raises(InvalidRequestError):
        subscription_of(topics, pattern)


def test_patterns_match_from_the_beginning_of_a_name() -> None:
    found = subscription_of(["z"], None)
    found.patterns = [re.compile("log")]
    assert found.match(["log", "logs", "my-log"])
    assert found.topics == ["log", "logs", "z"]
    assert not found.match(["logs", "log"])
    assert found.match([])


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("orders.*", ["orders", "orders.eu", "orders.retry", "orders.x"]),
        (r"orders\..*", ["orders.eu", "orders.retry", "orders.x"]),
        (r"orders.*\.retry", ["orders.billing.retry", "orders.eu.a.b.retry", "orders.retry"]),
        (r".*\.dlq$", ["lone.dlq", "orders.billing.retry.dlq", "orders.dlq"]),
        ("(?!.*dlq).*", ["lone.a.retry", "orders", "orders.eu", "orders.retry", "orders.x"]),
        ("lone.*", ["lone.a.retry", "lone.dlq"]),  # made for no topic that there is
    ],
)
def test_a_pattern_leaves_out_what_groups_have_made_for_themselves_unless_it_spells_it(
    pattern: str, matched: list[str]
) -> None:
    found = subscription_of(None, pattern)
    made = ["orders.billing.retry", "orders.eu.a.b.retry", "orders.dlq", "orders.billing.retry.dlq"]
    found.match(
        ["orders", "orders.x", "orders.eu", "orders.retry", "lone.dlq", "lone.a.retry", *made]
    )
    assert found.matched == matched
    assert subscription_of(made, None).topics == sorted(made), (
        "by their names they are read as any others"
    )


def test_listeners_of_every_client() -> None:
    class Ours(RebalanceListener):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
            self.told.append(revoked)

    class KafkaPythons:
        def on_partitions_assigned(self, assigned: Any) -> None: ...

    ours = Ours()
    callbacks = callbacks_of(ours, None, None, None, None)
    for hook in (callbacks.revoked, callbacks.lost, callbacks.assigned):
        assert hook is not None
        hook(KEYS)
    assert ours.told == [KEYS, KEYS], "lost is revoked where nobody says otherwise"
    callbacks = callbacks_of(KafkaPythons(), None, None, None, None)
    assert (callbacks.revoked, callbacks.lost, callbacks.assigned is None) == (None, None, False)
    called: list[Any] = []
    callbacks = callbacks_of(None, "consumer", None, lambda *given: called.append(given), None)
    for hook in (callbacks.revoked, callbacks.lost):
        assert hook is not None
        hook(KEYS)
    assert called == [("consumer", KEYS)] * 2
    assert callbacks.assigned is None
    for given in ((Ours, None), (5, None), (ours, print), (None, 5)):
        with pytest.raises(InvalidRequestError):
            callbacks_of(given[0], None, given[1], None, None)


def test_names_of_topics_that_an_answer_had_no_room_for_are_looked_up_until_all_are_known() -> None:
    asked: list[list[str]] = []

    def call(_api: int, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request["topics"])
        return {
            "topics": [
                {"name": name, "code": 1}
                if name == "t3"
                else {"name": name, "topic_id": f"id-{name}"}
                for name in request["topics"]
            ]
        }

    names = [f"t{number}" for number in range(3 * TOPICS_AT_ONCE)]
    assert run_at_once(named_topics(lifted(call), names, {"id-t5", f"id-t{TOPICS_AT_ONCE}"})) == {
        "id-t5": "t5",
        f"id-t{TOPICS_AT_ONCE}": f"t{TOPICS_AT_ONCE}",
    }
    assert len(asked) == 2, "no further than needed"
    assert run_at_once(named_topics(lifted(call), names, {"id-gone", "id-t3"})) == {}


class Waiting:
    """A listener for an event loop."""

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        raise AssertionError(revoked)


async def waiting(*given: object) -> None:
    raise AssertionError(given)


class Awaited:
    """An object whose call is a coroutine."""

    async def __call__(self, *given: object) -> None:
        raise AssertionError(given)


class WaitingCalls:
    """A listener with such an object in the place of a method."""

    on_partitions_revoked = Awaited()


@pytest.mark.parametrize(
    "given",
    [
        (Waiting(), None), (None, waiting), (WaitingCalls(), None), (None, Awaited()),
        (None, partial(waiting, 1)), (None, partial(Awaited(), 1)), (None, Awaited().__call__),
    ],
)  # fmt: skip
def test_coroutine_functions_are_refused_where_nothing_awaits_them(given: tuple[Any, Any]) -> None:
    """A consumer of threads called them and did not await what they returned: nothing happened."""
    with pytest.raises(InvalidRequestError, match="is the coroutine function"):
        callbacks_of(given[0], None, given[1], None, None)
    assert callbacks_of(given[0], None, given[1], None, None, is_awaited=True)


@pytest.mark.parametrize("topics", ["t", ["t"], "^t.*", re.compile("t")])
def test_a_listener_may_follow_the_topics(topics: Any) -> None:
    """As Java's `subscribe(topics, listener)`."""
    listener = RebalanceListener()
    for given in ((topics, listener), (topics, None, listener)):
        with Consumer(bootstrap="tcp://127.0.0.1:9", group_id="g") as consumer:
            consumer.subscribe(*given)
            assert consumer._group is not None
            assert consumer._group._reconciler.callbacks.assigned == listener.on_partitions_assigned
    with Consumer(bootstrap="tcp://127.0.0.1:9", group_id="g") as consumer:
        with pytest.raises(InvalidRequestError, match="names or a pattern, not both"):
            consumer.subscribe(["t"], "u")
        with pytest.raises(InvalidRequestError, match=r"names or a pattern|regular expression"):
            consumer.subscribe(["t"], RebalanceListener)  # its class
