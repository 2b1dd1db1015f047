"""A front without a scheduler: requests about delayed records before a topic has delays."""

from __future__ import annotations

import pytest

from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tests.kit.stepped.fronts import FakeClient, FakeFront


@pytest.fixture
def world() -> FakeFront:
    world = FakeFront()
    world.has_scheduler = False
    return world


@pytest.fixture
def client(world: FakeFront) -> FakeClient:
    return world.connect(b"client")


def test_to_describe_delays_starts_no_process(world: FakeFront, client: FakeClient) -> None:
    assert client.ask(Api.DESCRIBE_DELAYS, {"after": None}) == (
        ErrorCode.OK,
        {"partitions": [], "after": None},
    )
    assert not world.wants_scheduler


@pytest.mark.parametrize(
    ("api", "request_"),
    [
        (Api.DESCRIBE_DELAYS, {"after": ["t", 0]}),
        (Api.DESCRIBE_DELAYS, {"limit": -1}),
        (Api.LIST_DELAYS, {"topic": "t"}),
        (Api.CHANGE_DELAYS, {}),
    ],
)
def test_every_other_request_waits_for_the_process_and_starts_it(
    world: FakeFront, client: FakeClient, api: Api, request_: dict[str, object]
) -> None:
    asked = client.send_json(api, request_)
    world.settle()
    assert world.wants_scheduler
    world.step(after_ms=1_000)
    assert asked not in client.heard()
    world.has_scheduler = True
    world.step(after_ms=20)
    message = world.scheduler.take()
    assert message is not None
    world.scheduler.answer(message, {"x": 1})
    world.settle()
    assert client.heard()[asked][0] is ErrorCode.OK


def test_delays_are_not_said_to_be_none_while_the_scheduler_of_a_new_topic_starts(
    world: FakeFront, client: FakeClient
) -> None:
    world.expects_scheduler = True
    asked = client.send_json(Api.DESCRIBE_DELAYS, {})
    world.settle()
    assert asked not in client.heard()
