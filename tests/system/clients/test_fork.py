"""fork() at any moment: a child is refused at once, hangs nowhere and takes nothing from its
parent.
"""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import ClientClosedError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.hosts.forks import CHILD_TIMEOUT_S, REFUSED, USED, in_child
from tests.kit.hosts.programs import read_values, run_program
from tests.kit.processes import HANG_LIMIT_S, children, stopped


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    return topic


def test_a_child_forked_while_another_thread_holds_the_producer_is_refused_at_once(
    appliance: EmbeddedAppliance, made: str
) -> None:
    with Producer(appliance.address) as producer:
        producer.send(made, b"known").result(60)
        holds, over = threading.Event(), threading.Event()

        def hold() -> None:
            with producer._sender_thread.lock:
                holds.set()
                over.wait(HANG_LIMIT_S)

        thread = threading.Thread(target=hold)
        thread.start()
        assert holds.wait(HANG_LIMIT_S)
        try:
            acts: list[Callable[[], object]] = [
                lambda: producer.send(made, b"x"),
                lambda: producer.send(made, b"x", headers=[("a", b"b")]),
                lambda: producer.send("another-topic", b"x"),
                lambda: producer.flush(1),
                lambda: producer.partitions_for(made),
            ]
            assert [in_child(act) for act in acts] == [REFUSED] * len(acts)
            assert in_child(producer.close) == USED, "close() in a child does nothing"
        finally:
            over.set()
            thread.join()
        assert producer.send(made, b"parent").result(60).offset == 1


def test_children_forked_under_load_never_hang_and_the_parent_loses_nothing(
    appliance: EmbeddedAppliance, made: str
) -> None:
    with Producer(appliance.address, linger_ms=0) as producer:
        producer.send(made, b"0").result(60)
        over = threading.Event()
        sent = [1]

        def send() -> None:
            while not over.is_set() or sent[0] < 1000:
                producer.send(made, b"%d" % sent[0], headers=[("a", b"b")] if sent[0] % 3 else None)
                sent[0] += 1

        thread = threading.Thread(target=send)
        thread.start()
        try:
            for _ in range(15):
                assert in_child(lambda: producer.send(made, b"child")) == REFUSED
        finally:
            over.set()
            thread.join()
        producer.flush(HANG_LIMIT_S)
        assert producer.metrics()["errors"] == 0
    assert read_values(appliance, made, sent[0]) == [b"%d" % number for number in range(sent[0])]


def test_a_record_under_way_at_the_fork_cannot_be_waited_for_in_the_child(
    appliance: EmbeddedAppliance, made: str
) -> None:
    flusher = children(appliance)["tr-flusher-0"]
    with Producer(appliance.address) as producer:
        producer.send(made, b"first").result(60)
        with stopped(flusher):
            handle = producer.send(made, b"second")
            assert in_child(handle.result) == REFUSED
        assert handle.result(60).offset == 1


def test_consumer_and_admin_in_a_child_say_so_at_once(
    appliance: EmbeddedAppliance, made: str
) -> None:
    key = TopicPartition(made, 0)
    with Producer(appliance.address) as producer:
        for number in range(1000):
            producer.send(made, b"%d" % number)
        producer.flush(60)
    with (
        Consumer(made, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
        Admin(appliance.address) as admin,
    ):
        first = consumer.poll(60_000, 1)  # more of its batch is decoded, and not handed out yet
        admin.list_topics()
        acts: list[Callable[[], object]] = [
            lambda: consumer.poll(100),
            consumer.poll_arrow,
            lambda: next(iter(consumer)),
            lambda: consumer.seek(key, 0),
            lambda: consumer.position(key),
            lambda: consumer.end_offsets([key]),
            lambda: consumer.partitions_for(made),
            admin.list_topics,
            lambda: admin.create_topics([NewTopic("x")]),
            admin.describe_cluster,
        ]
        assert [in_child(act) for act in acts] == [REFUSED] * len(acts)
        assert in_child(consumer.close) == in_child(admin.close) == USED
        found = len(first)
        while found < 1000:
            found += len(consumer.poll(60_000))
        assert made in admin.list_topics()
    for act in (lambda: consumer.poll(0), admin.list_topics):
        with pytest.raises(ClientClosedError, match="is closed"):
            act()


def test_a_child_makes_clients_of_its_own(appliance: EmbeddedAppliance, made: str) -> None:
    def work() -> None:
        with Producer(appliance.address) as own:
            assert own.send(made, b"child").result(60).offset == 1
        with Consumer(
            made, bootstrap=appliance.address, auto_offset_reset="earliest"
        ) as own_consumer:
            assert own_consumer.poll(60_000)
        gc.collect()

    with Producer(appliance.address) as producer:
        producer.send(made, b"parent").result(60)
        assert in_child(work) == USED
        assert producer.send(made, b"parent").result(60).offset == 2


def _in_pool(address: str, topic: str) -> int:
    gc.collect()
    with Producer(address) as producer:
        return producer.send(topic, b"x").result(60).partition


def test_multiprocessing_by_fork_works_beside_live_clients(
    appliance: EmbeddedAppliance, made: str
) -> None:
    with (
        Producer(appliance.address) as producer,
        Consumer(made, bootstrap=appliance.address),
        Admin(appliance.address),
    ):
        producer.send(made, b"x").result(60)
        pool = multiprocessing.get_context("fork").Pool(2)
        try:
            answers = [pool.apply_async(_in_pool, (appliance.address, made)) for _ in range(4)]
            assert [answer.get(CHILD_TIMEOUT_S) for answer in answers] == [0] * 4
            pool.close()
        finally:
            pool.terminate()
            pool.join()
        producer.send(made, b"x").result(60)


CHILD_THAT_ENDS_NORMALLY = """
import gc, os, sys, threading
from tailrace import Admin, Consumer, Producer, embedded
from tailrace.core.errors import ClientClosedError
from tailrace.embedded_appliance import start_embedded
inherited = None
with embedded() as appliance:
    producer = Producer(appliance.address)
    producer.send("t", b"first").result(60)
    consumer = Consumer("t", bootstrap=appliance.address, auto_offset_reset="earliest")
    consumer.poll(1000)
    admin = Admin(appliance.address)
    admin.list_topics()
    over = threading.Event()
    def load():
        while not over.is_set():
            producer.send("t", b"more" * 25_000, headers=[("a", b"b")])   # large ones go to ZeroMQ without a copy
    thread = threading.Thread(target=load)
    thread.start()
    pid = os.fork()
    if pid == 0:
        try:
            appliance.stop()
        except ClientClosedError as error:
            inherited = "fork()" in str(error)
        del producer, consumer, admin
        gc.collect()
        sys.exit(5 if inherited else 6)   # as any program ends: blocks, atexit, destructors
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    over.set()
    thread.join()
    producer.flush(60)
    assert os.path.isdir(appliance.data_dir), "the child removed the data directory"
    assert producer.send("t", b"last").result(60).offset > 0
    assert consumer.poll(60_000)
    assert "t" in admin.list_topics()
    producer.close(); consumer.close(); admin.close()
assert not os.path.exists(appliance.data_dir)
"""  # noqa: E501


def test_a_child_that_ends_as_any_program_hangs_nowhere_and_takes_nothing_away() -> None:
    done = run_program(CHILD_THAT_ENDS_NORMALLY)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
