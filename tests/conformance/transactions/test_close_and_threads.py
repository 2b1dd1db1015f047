"""The end of a producer with an open transaction; threads and child processes that share one."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest

from tailrace.client.connections.runtime import Runtime, sleep_on
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ClientClosedError,
    InvalidTransactionError,
    TailraceError,
)
from tailrace.producer.producer import Producer
from tailrace.protocol.frame import Api
from tests.conformance.transactions.transaction_front import (
    SILENT,
    TransactionFront,
)
from tests.conformance.transactions.transaction_worlds import (
    CLOSE_S,
    SCRIPTED,
    SETTINGS,
    Made,
    ScriptedWorld,
    ThreadScripted,
)
from tests.kit.hosts.forks import REFUSED, USED, wait_for_child

END = Api.END_TRANSACTION


@SCRIPTED
def test_a_close_aborts_what_is_open(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"x")
        await made.producer.flush()
        await made.producer.close()
        assert made.front.aborted() == [b"x"]
        with pytest.raises(ClientClosedError):
            await made.producer.begin_transaction()

    world.run(body)


@SCRIPTED
def test_a_block_whose_producer_was_closed_raises_as_nothing_of_it_is_committed(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        async def close_in_the_block() -> None:
            async with made.producer.transaction():
                await made.send(b"x")
                await made.producer.close()

        with pytest.raises(ClientClosedError, match="aborted its transaction"):
            await close_in_the_block()
        assert made.front.committed() == []

    world.run(body)


@SCRIPTED
def test_a_close_behind_the_commit_leaves_a_block_as_it_is(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        async with made.producer.transaction():
            await made.send(b"x")
            await made.producer.commit_transaction()
            await made.producer.close()
        assert made.front.committed() == [b"x"]

    world.run(body)


@SCRIPTED
def test_the_exception_of_a_block_that_closes_its_producer_stays(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        async def raise_behind_a_close() -> None:
            async with made.producer.transaction():
                await made.send(b"x")
                await made.producer.close()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await raise_behind_a_close()
        assert made.front.committed() == []

    world.run(body)


@SCRIPTED
def test_a_close_without_an_answer_ends(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        (handle,) = await made.send(b"x")
        made.front.plan[END].append(SILENT)
        await made.producer.close(CLOSE_S)
        assert handle.done()

    world.run(body)


def test_one_thread_at_a_time_ends_a_transaction() -> None:
    async def body(made: Made) -> None:
        plain = made.plain
        plain.begin_transaction()
        plain.send("t", b"x", partition=0)
        steps = plain._transactions.commit(None)
        made.front.plan[Api.PRODUCE].append(ErrorCode.CONCURRENT_TRANSACTIONS)
        next(steps)  # it waits, as another thread's does
        for call in (plain.commit_transaction, plain.abort_transaction, plain.begin_transaction):
            with pytest.raises(InvalidTransactionError, match=r"is in commit_transaction\(\)"):
                call()
        with pytest.raises(InvalidTransactionError, match="being committed"):
            plain.send("t", b"y", partition=0)
        steps.close()
        plain.commit_transaction()
        assert made.front.committed() == [b"x"]

    ThreadScripted().run(body)


def test_threads_share_a_transaction_and_nothing_leaves_it() -> None:
    """Real threads, over a front that answers when somebody sleeps."""
    front = TransactionFront()
    lock = threading.Lock()
    runtime = Runtime(
        time.monotonic_ns,
        lambda _: front.connect(),
        lambda fds, ns: sleep_on((), min(ns, 1_000_000)),
        lambda: 0.5,
    )
    producer = Producer("tcp://127.0.0.1:1", runtime=runtime, **SETTINGS)
    accepted: list[list[bytes]] = []
    refused = 0
    for _ in range(5):
        values: list[bytes] = []
        go = threading.Event()

        def send(name: int, values: list[bytes] = values, go: threading.Event = go) -> None:
            nonlocal refused
            go.wait()
            for number in range(200):
                value = b"%d-%d-%d" % (len(accepted), name, number)
                try:
                    producer.send("t", value, partition=name % 3)
                except InvalidTransactionError:
                    with lock:
                        refused += 1
                    return
                with lock:
                    values.append(value)

        threads = [threading.Thread(target=send, args=(name,)) for name in range(3)]
        producer.begin_transaction()
        for thread in threads:
            thread.start()
        go.set()
        producer.commit_transaction()
        for thread in threads:
            thread.join()
        accepted.append(values)
    producer.close()
    by_epoch: dict[bytes, int] = {}
    for index, one in enumerate(one for one in front.decisions if one.outcome == "commit"):
        for _, value in front._taken.get((one.producer_id, one.epoch), []):
            by_epoch[value] = index
    for values in accepted:
        assert set(values) <= set(by_epoch), "a record that was accepted is not committed"


def test_a_handler_that_interrupted_the_producer_itself_cannot_end_its_transaction() -> None:
    """It would wait for the run of the sender that it has interrupted."""

    async def body(made: Made) -> None:
        plain = made.plain
        plain.begin_transaction()
        plain.send("t", b"x", partition=0)
        plain._sender_thread._is_running_once = True  # what such a handler finds
        for call in (plain.commit_transaction, plain.abort_transaction):
            with pytest.raises(TailraceError, match="inside a signal handler"):
                call()
        plain._sender_thread._is_running_once = False
        plain.commit_transaction()
        assert made.front.committed() == [b"x"]

    ThreadScripted().run(body)


def test_a_child_process_can_neither_send_nor_end_its_parents_transaction() -> None:
    async def body(made: Made) -> None:
        plain = made.plain
        refused: list[str] = []
        pid = -1
        with contextlib.suppress(ClientClosedError), plain.transaction():
            plain.send("t", b"x", partition=0)
            plain.flush()
            pid = os.fork()
            if pid == 0:
                for call in (
                    lambda: plain.send("t", b"child", partition=0),
                    plain.commit_transaction,
                    plain.abort_transaction,
                ):
                    try:
                        call()
                    except ClientClosedError as error:
                        refused.append(error.detail)
        if pid == 0:  # the block's end has raised too
            plain.close()
            is_right = len(refused) == 3 and not made.front.count(END)
            os._exit(REFUSED if is_right else USED)
        assert wait_for_child(pid) == REFUSED
        assert made.front.committed() == [b"x"]

    ThreadScripted().run(body)
