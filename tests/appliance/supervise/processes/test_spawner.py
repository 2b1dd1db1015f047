"""Starting processes: as forks of the zygote, and without it; what a fork finds, and what becomes
of requests that a zygote does not answer.
"""

from __future__ import annotations

import pathlib

import pytest

from appliance.supervise.processes.zygote import RequestError, decode_request
from tests.kit.hosts.spawning import run_as_supervisor


def test_a_fork_finds_what_an_interpreter_of_its_own_finds(tmp_path: pathlib.Path) -> None:
    """Descriptors, environment, arguments, signals, names, collector, logging; a crash point that
    is armed in the supervisor is not its own.
    """
    found, _ = run_as_supervisor(
        """
bells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(3)]
os.environ["SOMETHING"] = "given"
forking, plain = Spawner(), Spawner()
root = logging.getLogger()
handler = root.handlers.pop()
forking.fork_zygote()
root.addHandler(handler)
from shm import crash_points
os.environ["TAILRACE_CRASH_POINT"] = "worker.after_copy"
crash_points.arm_from_environment()
del os.environ["TAILRACE_CRASH_POINT"]
secret = os.open("/dev/zero", os.O_RDONLY)
signal.signal(signal.SIGTERM, lambda *_: None)
assert [ended(start(one, name, bells)) for one, name in ((forking, "forked"), (plain, "plain"))] == [0, 0]
forking.close()
print(json.dumps([told("forked"), told("plain")]))
""",  # noqa: E501
        tmp_path,
    )
    forked, plain = (one["same"] for one in found)
    for state in (forked, plain):
        state["spec"] = pathlib.Path(state["spec"]).parent.name
        state["environment"].pop(
            "LC_CTYPE", None
        )  # the interpreter's own, which it may set as it starts
    assert forked["descriptors"].keys() == plain["descriptors"].keys()
    assert len(forked["descriptors"]) == 3 + 3 + 1, forked["descriptors"]
    assert not [
        name for name in forked["descriptors"].values() if "socket" in name or name == "/dev/zero"
    ]
    assert {
        name: (forked[name], plain[name]) for name in forked if forked[name] != plain[name]
    } == {}
    assert (forked["armed"], forked["collects"]) == (False, True)


def test_no_two_forks_have_the_same_random_numbers(tmp_path: pathlib.Path) -> None:
    found, _ = run_as_supervisor(
        """
import random, uuid
one = Spawner()
one.fork_zygote()
names = [f"n{number}" for number in range(3)]
assert [ended(start(one, name)) for name in names] == [0, 0, 0]
one.close()
print(json.dumps([told(name)["differs"] for name in names]))
""",
        tmp_path,
    )
    for values in zip(*found, strict=True):
        assert len(set(values)) == 3, values


def test_a_zygote_that_was_killed_is_followed_by_another_and_meanwhile_processes_are_started_all_the_same(  # noqa: E501
    tmp_path: pathlib.Path,
) -> None:
    (first, second, made), log = run_as_supervisor(
        """
one = Spawner()
one.fork_zygote()
first = one._pid
os.kill(first, signal.SIGKILL)
started = start(one, "while_there_is_none")  # an interpreter of its own, to which this program is none of the appliance's
ended(started)
print(json.dumps([first, one._pid, started.pid]))
one.close()
""",  # noqa: E501
        tmp_path,
    )
    assert len({first, second, made}) == 3
    assert sum("ended process=zygote" in line and "action=RESTART" in line for line in log) == 1


def test_modules_that_cannot_be_imported_cost_one_line_and_every_process_starts_all_the_same(
    tmp_path: pathlib.Path,
) -> None:
    statuses, log = run_as_supervisor(
        """
zygote.SHARED = ("no_such_module",)
one = Spawner()
one.fork_zygote()
statuses = [ended(start(one, name)) for name in ("a", "b")]
assert one.pidfd == -1
print(json.dumps(statuses))
""",
        tmp_path,
    )
    assert statuses == [0, 0]
    [line] = log
    assert line.startswith("no_zygote reason=")
    assert "No module named 'no_such_module'" in line


def test_a_zygote_that_cannot_start_costs_one_line_and_every_process_starts_all_the_same(
    tmp_path: pathlib.Path,
) -> None:
    statuses, log = run_as_supervisor(
        """
def fail(*_):
    raise ImportError("it cannot start")
zygote._serve = fail
one = Spawner()
one.fork_zygote()
statuses = [ended(start(one, name)) for name in ("a", "b")]
assert one.pidfd == -1
print(json.dumps(statuses))
""",
        tmp_path,
    )
    assert statuses == [0, 0]
    assert [line for line in log if line.startswith("tailrace:")] == [
        "tailrace: the zygote ends: it cannot start"
    ]
    [line] = [line for line in log if "zygote" in line and not line.startswith("tailrace:")]
    assert line.startswith("no_zygote reason=")
    assert "status 1" in line


def test_a_zygote_that_stands_still_is_killed_and_the_process_started_without_it(
    tmp_path: pathlib.Path,
) -> None:
    found, log = run_as_supervisor(
        """
spawner.ANSWER_MS = 300
one = Spawner()
one.fork_zygote()
stopped = one._pid
os.kill(stopped, signal.SIGSTOP)
status = ended(start(one, "without"))
one.close()
print(json.dumps([status, pathlib.Path(f"/proc/{stopped}").exists()]))
""",
        tmp_path,
    )
    assert found == [0, False]
    assert any("no answer within 300 ms" in line for line in log)


def test_a_process_whose_supervisor_does_not_know_it_never_runs(tmp_path: pathlib.Path) -> None:
    """The gate closes without "go", as when the zygote is killed in between, or gave its answer too
    late.
    """
    found, _ = run_as_supervisor(
        """
one = Spawner()
one.fork_zygote()
gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
spec = os.memfd_create("specification")
os.write(spec, str(directory / "never").encode())
socket.send_fds(one._channel, [zygote.Request("tests.kit.hosts.process_state", spec, [spec]).encode()], [theirs.fileno(), spec])
theirs.close()
pid = int(gate.recv(32))
parent = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
pidfd = os.pidfd_open(pid)
gate.close()
poll = select.poll()
poll.register(pidfd, select.POLLIN)
assert poll.poll(60_000)
reap_strangers(one.is_zygote)
print(json.dumps([parent == os.getpid(), pathlib.Path(f"/proc/{pid}").exists(), (directory / "never").exists(), one.is_zygote(one._pid)]))
one.close()
""",  # noqa: E501
        tmp_path,
    )
    assert found == [True, False, False, True]


def test_what_is_no_request_costs_a_line_and_the_next_request_is_served(
    tmp_path: pathlib.Path,
) -> None:
    statuses, log = run_as_supervisor(
        """
from tests.kit.processes import wait_until
one = Spawner()
one.fork_zygote()
for garbage in (b"{", b"\\xff" * 40_000, b"[]", b'{"module": "os", "spec_fd": 7, "numbers": [7]}'):
    socket.send_fds(one._channel, [garbage], [sys.stdin.fileno(), sys.stdin.fileno()])
one._channel.setblocking(True)
one._channel.send(b'{"module": "tests.kit.hosts.process_state", "spec_fd": 7, "numbers": [7, 8]}')
status = ended(start(one, "after"))
# The process that was started may end before the zygote has closed what came with its request.
is_closed = lambda: len(os.listdir(f"/proc/{one._pid}/fd")) == 4
wait_until(is_closed, "the descriptors that came with requests are closed")
one.close()
print(json.dumps([status]))
""",
        tmp_path,
    )
    assert statuses == [0]
    assert sum("received an invalid request" in line for line in log) == 5


def test_an_error_that_ends_a_fork_has_its_trace_and_its_status(tmp_path: pathlib.Path) -> None:
    """As an interpreter's own: 1, and the trace on standard error."""
    statuses, log = run_as_supervisor(
        """
one, plain = Spawner(), Spawner()
one.fork_zygote()
(directory / "taken").write_text("")
print(json.dumps([ended(start(which, "taken")) for which in (one, plain)]))
one.close()
""",
        tmp_path,
    )
    assert statuses == [1, 1]
    assert sum(line.startswith("FileExistsError") for line in log) == 2


@pytest.mark.parametrize(
    ("data", "descriptors"),
    [
        (b"", 2),
        (b"null", 2),
        (b'{"module": "workers.append.worker"}', 2),
        (b'{"module": "workers.append.worker", "spec_fd": 5, "numbers": [5], "more": 1}', 2),
        (b'{"module": "subprocess", "spec_fd": 5, "numbers": [5]}', 2),
        (b'{"module": ["workers.append.worker"], "spec_fd": 5, "numbers": [5]}', 2),
        (b'{"module": "workers.append.worker", "spec_fd": 5, "numbers": [5, 5]}', 3),
        (b'{"module": "workers.append.worker", "spec_fd": 5, "numbers": [2]}', 2),
        (b'{"module": "workers.append.worker", "spec_fd": 6, "numbers": [5]}', 2),
        (b'{"module": "workers.append.worker", "spec_fd": 5, "numbers": [5]}', 1),
        (b'{"module": "workers.append.worker", "spec_fd": 5, "numbers": [5]}', 3),
        (b'{"module": "workers.append.worker", "spec_fd": 5, "numbers": [true]}', 2),
        (b'{"module": "workers.append.worker", "spec_fd": 5, "numbers": {"5": 5}}', 2),
    ],
)
def test_a_request_names_one_of_the_programs_and_a_number_for_each_descriptor(
    data: bytes, descriptors: int
) -> None:
    with pytest.raises(RequestError):
        decode_request(data, descriptors)
