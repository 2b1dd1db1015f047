"""Topics with delayed records that move to another data directory, with what is pending."""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import signal
import threading
from functools import partial

import pytest

from shm.crash_points import CRASH_POINTS
from tailrace import Admin, Consumer, NewTopic, Producer, Record, Recurrence, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.killed_directories import start
from tests.kit.appliances.moves import Addressed, armed, directories, kill_in_move, move, where
from tests.kit.appliances.moving_delays import (
    Canceller,
    await_delivered,
    await_only,
    check_one_place,
    create,
    delivered,
    pending,
    send_due,
    send_far,
)
from tests.kit.cli import run
from tests.kit.matrices import short
from tests.kit.processes import HANG_LIMIT_S, children, stopped, wait_until


@pytest.mark.slow_because("the former files are kept for 5 s, twice")
def test_a_topic_moves_while_its_records_come_due_and_are_cancelled(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    create(appliance)
    far = send_far(appliance)
    canceller = Canceller(appliance, far[:200])
    ended = threading.Event()
    sent: list[int] = []

    def send() -> None:
        with Producer(appliance.address, linger_ms=0) as producer:
            while not ended.wait(0.01):  # a rate: each check reads all of these records anew
                number = len(sent)
                delay = dt.timedelta(milliseconds=number * 37 % 400)
                producer.send("orders", b"%d" % number, deliver_after=delay).result(HANG_LIMIT_S)
                sent.append(number)

    def taken_on(count: int, ticks: int) -> bool:
        return len(sent) > count + 50 and delivered(appliance)["tick"] > ticks + 3

    sender = threading.Thread(target=send)
    with Producer(appliance.address) as producer:
        every = Recurrence.every(dt.timedelta(milliseconds=50))
        producer.send("orders", b"tick", deliver_after=dt.timedelta(0), repeat=every)
    sender.start()
    canceller.start()
    try:
        for place, other in (("second", "data"), ("data", "second")):
            count, ticks = len(sent), delivered(appliance)["tick"]
            assert "orders:0 is in" in move(appliance, tmp_path / place)
            assert where(appliance) == place
            wait_until(partial(taken_on, count, ticks), "records are taken there, and come again")
            await_only(tmp_path, place)
            assert not (tmp_path / other / "orders@delay-0").exists()
    finally:
        ended.set()
        sender.join()
        canceller.end()
    assert not canceller.failures
    expected = {str(number) for number in sent}
    wait_until(lambda: set(delivered(appliance)) >= expected, "all is delivered")
    [recurring] = pending(appliance) - set(far)
    with Admin(appliance.address) as admin:
        assert admin.cancel_delays([recurring]) == {recurring: None}
    found = delivered(appliance)
    assert found.pop("tick") > 6
    assert dict(found) == dict.fromkeys(expected, 1)
    assert pending(appliance) == set(far) - canceller.cancelled
    times = [r.timestamp for r in read_all(appliance) if r.value == b"tick"]
    assert times == sorted(set(times)), "each occurrence comes once, in its order"


def read_all(appliance: EmbeddedAppliance) -> list[Record]:
    with Consumer("orders", bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found: list[Record] = []
        while some := consumer.poll(timeout_ms=1_000):
            found += some
    return found


POINTS = [
    "move.delays_copied",
    "move.copied:2",
    "move.complete",
    *(
        name
        for name in CRASH_POINTS
        if name.startswith("move.before") or name == "move.after_decision"
    ),
]


def filled(appliance: Addressed) -> set[str]:
    """Make the topic, with records that come due soon, and far ones, whose ids are returned."""
    create(appliance)
    far = set(send_far(appliance))
    send_due(appliance, range(200), after_ms=100)
    return far


@pytest.mark.slow_because("the former files are kept for 5 s")
@pytest.mark.parametrize("point", short(p for p in POINTS if p != "move.before_going_back"))
def test_a_process_killed_in_a_move_leaves_topic_and_delay_log_in_one_place(
    tmp_path: pathlib.Path, point: str
) -> None:
    with armed(tmp_path, point) as appliance:
        far = filled(appliance)
        move(appliance, tmp_path / "second", status=None)
        check_one_place(appliance, tmp_path, 200, far)
        with Admin(appliance.address) as admin:
            killed = [p["name"] for p in admin.describe_cluster()["processes"] if p["restarts"]]
        assert killed == ["controller" if "_" in point and "copied" not in point else "flusher-0"]


@pytest.mark.slow_because("the former files are kept for 5 s")
@pytest.mark.parametrize("point", short(p for p in POINTS if p != "move.before_going_back"))
def test_an_appliance_killed_in_a_move_starts_with_both_in_one_place(
    tmp_path: pathlib.Path, point: str
) -> None:
    with armed(tmp_path, point) as appliance:
        far = filled(appliance)
        kill_in_move(appliance, tmp_path / "second", flusher="copied" in point or "compl" in point)
    again = start(tmp_path / "data", data_dirs=directories(tmp_path))
    try:
        check_one_place(again, tmp_path, 200, far)
    finally:
        assert again.stop() == 0


@pytest.mark.slow_because("the former files are kept for 5 s")
def test_what_comes_due_while_the_new_disk_stands_still_is_delivered_where_it_was(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    """Its flusher stands, and cannot open the delay log then; the scheduler is killed meanwhile."""
    create(appliance)
    far = set(send_far(appliance, 20))
    pids = children(appliance)
    with stopped(pids["tr-flusher-1"]), Admin(appliance.address) as admin:
        send_due(appliance, range(100), after_ms=1_500)
        admin.move_partition("orders", 0, str(tmp_path / "second"))
        wait_until(
            lambda: [m["state"] for m in admin.describe_cluster()["moves"]] == ["arriving"],
            "it arrives",
        )
        with pytest.raises(TailraceError, match="moving"):
            admin.alter_topics({"orders": {"delay.enabled": True}})
        os.kill(pids["tr-scheduler-0"], signal.SIGKILL)
        (tmp_path / "second" / "orders@delay-0").write_bytes(b"")  # it cannot come here
        os.kill(pids["tr-flusher-1"], signal.SIGCONT)
        wait_until(
            lambda: "failed" in [m["state"] for m in admin.describe_cluster()["moves"]],
            "it goes back",
        )
    assert where(appliance) == "data"
    await_delivered(appliance, {str(number) for number in range(100)})
    assert pending(appliance) == far
    with Admin(appliance.address) as admin:
        wait_until(
            lambda: all(m["state"] == "failed" for m in admin.describe_cluster()["moves"]),
            "nothing is left of it",
        )
    (tmp_path / "second" / "orders@delay-0").unlink(missing_ok=True)
    check_one_place(appliance, tmp_path, 100, far)


def test_changes_by_an_open_transaction_move_with_their_rows(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    create(appliance)
    far = send_far(appliance, 4)
    with (
        Producer(appliance.address, transactional_id="t") as producer,
        Admin(appliance.address) as admin,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        producer.cancel_delays(far[:2])
        producer.send("orders", b"0", deliver_after=dt.timedelta(0))
        producer.flush()
        move(appliance, tmp_path / "second")
        assert delivered(appliance) == {}
        producer.cancel_delays(far[2:3])
        producer.commit_transaction()
        await_delivered(appliance, {"0"})
        assert [each.delay_id for each in admin.list_delays("orders")] == far[3:]
        await_only(tmp_path, "second")
        producer.begin_transaction()
        producer.cancel_delays(far[3:])
        move(appliance, tmp_path / "data")
        producer.abort_transaction()
        assert pending(appliance) == set(far[3:])
        assert admin.cancel_delays(far[3:]) == {far[3]: None}


@pytest.mark.slow_because("the former files are kept for 5 s")
def test_a_drain_takes_topics_with_delays_along_and_the_appliance_starts_without_the_disk(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path / "data", data_dirs=directories(tmp_path), dedicated_workers=4)
    try:
        create(running, worker_dedicated=True)
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("later", 2, {"delay.enabled": True})])
        far = set(send_far(running, 20))
        send_due(running, range(50))
        await_delivered(running, {str(number) for number in range(50)})
        taken_along = len(list((tmp_path / "second").glob("later@delay-*")))
        done = run(
            None, "disk", "drain", str(tmp_path / "second"), "--data-dir", running.data_dir,
            "--bootstrap", running.address,
        )  # fmt: skip
        assert f"{taken_along} partition".encode() in done.stderr
        assert taken_along
        move(running, tmp_path / "second")
        send_due(running, range(50, 100), after_ms=50)
        await_delivered(running, {str(number) for number in range(100)})
        await_only(tmp_path, "second")
        move(running, tmp_path / "data")
        await_only(tmp_path, "data")
    finally:
        assert running.stop() == 0
    again = start(tmp_path / "data", dedicated_workers=4)
    try:
        await_delivered(again, {str(number) for number in range(100)})
        assert pending(again) == far
    finally:
        assert again.stop() == 0
