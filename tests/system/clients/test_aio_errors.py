"""The clients for asyncio refuse what the plain ones refuse, in the same words, and tell in time
what cannot be had.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
from collections.abc import Awaitable, Callable

import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.aio import AsyncAdmin, AsyncConsumer, AsyncProducer
from tailrace.core.errors import (
    BufferExhaustedError,
    DelayNotEnabledError,
    InvalidSettingError,
    NotReachableError,
    RecordTooLargeError,
    RequestTimeoutError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import children, stopped
from tests.kit.runs.aio import NOWHERE, failure, plain_failure, run, sentence


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of three partitions."""
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 3))
    return topic


def test_errors_have_the_sentences_of_the_plain_clients(
    appliance: EmbeddedAppliance, made: str
) -> None:
    missing = "no-" + made

    async def main() -> None:
        async with (
            AsyncAdmin(appliance.address) as admin,
            AsyncProducer(appliance.address, max_request_size=8_192) as producer,
        ):
            with (
                Admin(appliance.address) as plain_admin,
                Producer(appliance.address, max_request_size=8_192) as plain_producer,
            ):
                pairs: list[tuple[Awaitable[object], Callable[[], object]]] = [
                    (producer.send(missing, b"x"), lambda: plain_producer.send(missing, b"x")),
                    (producer.send_arrow(missing, pa.table({"value": [b"x"]})),
                    lambda: plain_producer.send_arrow(missing, pa.table({"value": [b"x"]}))),
                    (producer.send(made, b"x", partition=9),
                    lambda: plain_producer.send(made, b"x", partition=9)),
                    (producer.send(made, bytes(20_000)),
                    lambda: plain_producer.send(made, bytes(20_000))),
                    (producer.send(made, 3), lambda: plain_producer.send(made, 3)),
                    (
                        producer.send(made, b"x", deliver_after=dt.timedelta(1)),
                        lambda: plain_producer.send(made, b"x", deliver_after=dt.timedelta(1)),
                    ),
                    (producer.partitions_for(missing),
                    lambda: plain_producer.partitions_for(missing)),
                    (AsyncConsumer(missing, bootstrap=appliance.address).start(),
                    lambda: Consumer(missing, bootstrap=appliance.address)),
                    (admin.create_topics(NewTopic(made)),
                    lambda: plain_admin.create_topics(NewTopic(made))),
                    (admin.delete_topics([missing]), lambda: plain_admin.delete_topics([missing])),
                    (admin.describe_topics(missing), lambda: plain_admin.describe_topics(missing)),
                    (admin.delete_topics(3), lambda: plain_admin.delete_topics(3)),  # type: ignore[arg-type]
                    (admin.list_delays(made), lambda: list(plain_admin.list_delays(made))),
                    (admin.alter_topics({made: {"retention": 1}}),
                    lambda: plain_admin.alter_topics({made: {"retention": 1}})),
                ]  # fmt: skip
                for awaited, call in pairs:
                    assert sentence(await failure(awaited)) == sentence(plain_failure(call))
            assert isinstance(await failure(producer.send(missing, b"x")), UnknownTopicError)
            assert isinstance(
                await failure(producer.send(made, bytes(20_000))), RecordTooLargeError
            )
            assert isinstance(await failure(admin.list_delays(made)), DelayNotEnabledError)
            assert (await producer.send_and_wait(made, b"x")).topic == made, (
                "it goes on after all these"
            )

    run(main())


def test_settings_are_those_of_the_plain_clients_and_checked_as_they_are() -> None:
    # A type checker refuses these as it does for the plain clients: an ignored error that is none
    # is an error.
    with pytest.raises(InvalidSettingError, match="did you mean linger_ms"):
        AsyncProducer(NOWHERE, lingr_ms=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSettingError, match="did you mean auto_offset_reset"):
        AsyncConsumer(bootstrap=NOWHERE, auto_ofset_reset="latest")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="request_timeout"):
        AsyncAdmin(NOWHERE, request_timeout=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSettingError, match="did you mean linger_ms"):
        Producer(NOWHERE, lingr_ms=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSettingError, match="did you mean auto_offset_reset"):
        Consumer(bootstrap=NOWHERE, auto_ofset_reset="latest")  # type: ignore[call-arg]
    with pytest.raises(InvalidSettingError, match="bootstrap"):
        AsyncProducer("nowhere")


@pytest.mark.parametrize(
    ("kind", "plain"), [(AsyncProducer, Producer), (AsyncConsumer, Consumer), (AsyncAdmin, Admin)]
)
def test_each_method_of_a_plain_client_is_there_with_the_same_arguments(
    kind: type, plain: type
) -> None:
    for name, method in inspect.getmembers(plain, inspect.isfunction):
        if name.startswith("_") or name == "after_fork":
            continue
        found = getattr(kind, name)
        if inspect.signature(method).return_annotation == "NoReturn":
            continue  # of a later version, or called otherwise: it says so when it is called
        assert inspect.iscoroutinefunction(found) or name in ("list_delays", "transaction"), name
        requested = inspect.signature(method).parameters
        assert [
            (p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()
        ] == [(p.name, p.kind, p.default) for p in requested.values()], name
        assert found.__doc__, name


def test_an_appliance_that_is_not_there_is_told_in_time(topic: str) -> None:
    async def main() -> None:
        with pytest.raises(NotReachableError, match="no appliance answers"):
            async with AsyncProducer(NOWHERE, max_block_ms=100) as producer:
                await asyncio.gather(*(producer.send(topic, b"x") for _ in range(100)))
        with pytest.raises(NotReachableError, match="no appliance answers"):
            async with AsyncConsumer(topic, bootstrap=NOWHERE, request_timeout_ms=100):
                pass
        async with AsyncAdmin(NOWHERE, connect_timeout_ms=100) as admin:
            errors = await asyncio.gather(*(failure(admin.list_topics()) for _ in range(10)))
            assert {type(error) for error in errors} == {NotReachableError}

    run(main())


def test_a_buffer_that_stays_full_and_a_flush_that_takes_too_long_are_told(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        worker = children(appliance)["tr-worker-0"]
        async with AsyncProducer(
            appliance.address, buffer_memory=65_536, max_block_ms=100
        ) as producer:
            await producer.send_and_wait(made, b"first")
            with stopped(worker):
                sends = await asyncio.gather(
                    *(failure(producer.send(made, bytes(4_000))) for _ in range(100))
                )
                assert {type(error) for error in sends if error is not None} == {
                    BufferExhaustedError
                }
                assert "stayed full for 100 ms" in str(sends[-1])
                with pytest.raises(
                    RequestTimeoutError, match=r"not everything was acknowledged within 0\.05 s"
                ):
                    await producer.flush(timeout=0.05)
            await producer.flush()
            assert (await producer.metrics())["buffered_bytes"] == 0

    run(main())
