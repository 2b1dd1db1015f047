"""Topics with delayed records whose move meets a disk that is full, or fails: topic and delay log
stay in one place with all that is pending, deliver on, and move when the disk is well again.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
from collections.abc import Callable

import pytest

from tailrace import Admin
from tailrace.core.errors import RequestTimeoutError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.moves import (
    Addressed,
    armed,
    close_for,
    last_reason,
    move,
    on_their_way,
    two_directories,
    where,
)
from tests.kit.appliances.moving_delays import (
    await_delivered,
    check_one_place,
    create,
    pending,
    send_due,
    send_far,
)
from tests.kit.cli import run
from tests.kit.hosts.file_systems import (
    failing_disk,
    fill_to_the_byte,
    read_only,
    small_file_system,
)
from tests.kit.processes import children, stopped, wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root"),
]
ALL = ("tr-controller-0", "tr-worker-0", "tr-flusher-0", "tr-scheduler-0")


def check_stays(appliance: Addressed, count: int, far: set[str]) -> int:
    """Topic and delay log are where they were and deliver. Returns the number of records that came
    due with those of now.
    """
    assert where(appliance) == "data"
    send_due(appliance, range(count, count + 10), after_ms=20)
    await_delivered(appliance, {str(number) for number in range(count + 10)})
    assert pending(appliance) == far
    return count + 10


def copies(target: pathlib.Path) -> list[pathlib.Path]:
    """Remains of copies in a directory."""
    return [*target.glob("moving/*"), *target.glob("bin/*")]


def await_writes(appliance: EmbeddedAppliance) -> None:
    with Admin(appliance.address) as admin:
        wait_until(
            lambda: admin.describe_cluster()["data_dirs"][1]["state"] == "OK",
            "the directory takes writes",
        )


def check_told(appliance: EmbeddedAppliance, target: pathlib.Path) -> None:
    """An operator's commands say that the partition did not move, and what to do."""
    again = f"tailrace partition move orders:0 --to {target}"
    for command in ("status",), ("doctor", "--data-dir", appliance.data_dir):
        done = run(None, *command, "--bootstrap", appliance.address, status=None)
        told = " ".join(done.stdout.decode().split())
        assert f"orders:0 was not moved to {target}: {last_reason(appliance)}" in told
        assert again in told


@pytest.mark.slow_because("the former files are kept for 5 s")
def test_a_full_target_keeps_no_part_of_topic_or_delay_log_and_gets_both_when_it_has_room(
    tmp_path: pathlib.Path,
) -> None:
    with (
        small_file_system(tmp_path, 64) as disk,
        two_directories(tmp_path / "data", disk / "second") as running,
    ):
        target, filler = disk / "second", disk / "filler"
        create(running)
        far = set(send_far(running))
        count = check_stays(running, 0, far)
        fill_to_the_byte(filler)
        assert "could not be completed" in close_for(running, target)
        assert not copies(target)
        check_told(running, target)
        count = check_stays(running, count, far)
        os.truncate(filler, filler.stat().st_size - (8 << 20))  # the topic's log has room there
        await_writes(running)
        assert "could not be completed" in close_for(running, target)
        wait_until(lambda: not copies(target), "the topic's copy, which was complete, is removed")
        count = check_stays(running, count, far)
        filler.unlink()
        (tmp_path / "second").symlink_to(target)  # the place that is looked at
        check_one_place(running, tmp_path, count, far)


def test_a_failing_target_costs_no_delayed_record(tmp_path: pathlib.Path) -> None:
    with (
        failing_disk(tmp_path, 24) as disk,
        two_directories(tmp_path / "data", disk / "second") as running,
    ):
        create(running)
        far = set(send_far(running))
        assert "stays where it was" in move(running, disk / "second", status=1)
        assert "could not be completed" in close_for(running, disk / "second")
        check_told(running, disk / "second")
        check_stays(running, 0, far)


@pytest.mark.slow_because("the former files are kept for 5 s")
@pytest.mark.parametrize("name", ["tr-controller-0", "tr-worker-0", "tr-flusher-0",
                                  "tr-flusher-1", "tr-scheduler-0", "tr-front-0"])  # fmt: skip
def test_a_process_killed_while_the_target_is_full_costs_no_delayed_record(
    tmp_path: pathlib.Path, name: str
) -> None:
    """It is killed between the decision to close the partition and the copy, which fails."""
    with (
        small_file_system(tmp_path, 64) as disk,
        two_directories(tmp_path / "data", disk / "second") as running,
    ):
        target, filler = disk / "second", disk / "filler"
        create(running)
        far = set(send_far(running))
        fill_to_the_byte(filler)
        pids = children(running)
        with stopped(pids["tr-flusher-0"]):
            with (
                Admin(running.address, request_timeout_ms=1_000) as admin,
                pytest.raises(RequestTimeoutError),
            ):
                admin.move_partition("orders", 0, str(target))  # answered when it is closed
            assert on_their_way(running) == ["closing"]
            os.kill(pids[name], signal.SIGKILL)
        wait_until(_retried(lambda: bool(last_reason(running))), "the move has failed")
        wait_until(_retried(lambda: not on_their_way(running)), "it is open again")
        assert not list(target.glob("orders*"))
        count = check_stays(running, 0, far)
        filler.unlink()
        await_writes(running)
        (tmp_path / "second").symlink_to(target)
        check_one_place(running, tmp_path, count, far)


def _retried(condition: Callable[[], bool]) -> Callable[[], bool]:
    """The condition, False while no front answers."""

    def holds() -> bool:
        try:
            return condition()
        except TailraceError:
            return False

    return holds


@pytest.mark.slow_because("the former files are kept for 5 s")
@pytest.mark.parametrize("killed", [(), ALL])
def test_both_go_back_when_the_disk_fails_behind_the_decision(
    tmp_path: pathlib.Path, killed: tuple[str, ...]
) -> None:
    with two_directories(tmp_path / "data", tmp_path / "second") as running:
        create(running)
        far = set(send_far(running))
        pids = children(running)
        with stopped(pids["tr-flusher-1"]):
            with Admin(running.address) as admin:
                admin.move_partition("orders", 0, str(tmp_path / "second"))
            wait_until(lambda: on_their_way(running) == ["arriving"], "both arrive")
            for name in killed:
                os.kill(pids[name], signal.SIGKILL)
            with read_only(tmp_path / "second"):
                os.kill(pids["tr-flusher-1"], signal.SIGCONT)
                wait_until(lambda: "could not be opened" in last_reason(running), "both go back")
                count = check_stays(running, 0, far)
        check_comes_again(running, tmp_path, count, far)


def check_comes_again(
    appliance: Addressed, tmp_path: pathlib.Path, count: int, far: set[str]
) -> None:
    """Move away what is left there, as the refusal says; then both move."""
    wait_until(lambda: not on_their_way(appliance), "nothing is left of it")
    for name in "orders-0", "orders@delay-0":
        shutil.rmtree(tmp_path / "second" / name, ignore_errors=True)
    check_one_place(appliance, tmp_path, count, far)


@pytest.mark.slow_because("the former files are kept for 5 s")
def test_a_controller_killed_before_both_go_back_is_followed_by_one_that_has_them_go_back(
    tmp_path: pathlib.Path,
) -> None:
    with armed(tmp_path, "move.before_going_back") as running:
        create(running)
        far = set(send_far(running))
        [flusher] = [each for each in running.supervisor.children() if is_flusher_1(each.pid)]
        flusher.suspend()
        with Admin(running.address) as admin:
            admin.move_partition("orders", 0, str(tmp_path / "second"))
        wait_until(lambda: on_their_way(running) == ["arriving"], "both arrive")
        with read_only(tmp_path / "second"):
            flusher.resume()
            wait_until(lambda: "could not be opened" in last_reason(running), "both go back")
            count = check_stays(running, 0, far)
        with Admin(running.address) as admin:
            killed = [p["name"] for p in admin.describe_cluster()["processes"] if p["restarts"]]
        assert killed == ["controller"]
        check_comes_again(running, tmp_path, count, far)


def is_flusher_1(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}/comm").read_text().startswith("tr-flusher-1")
