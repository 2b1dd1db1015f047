"""Access to `ipc://` sockets: mode and group, clients of another user, and their errors."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator

import pytest

import tailrace
from tailrace.core.errors import NotReachableError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S, kill_and_wait_for_successor

NOBODY, GROUP = 65534, 1
as_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

CLIENT = """
    import os, sys, time
    import tailrace
    over_tcp, over_ipc, groups = sys.argv[1], sys.argv[2], [int(g) for g in sys.argv[3:]]
    # what is imported late lies where only the first user may read
    with tailrace.Admin(over_tcp) as admin, tailrace.Producer(over_tcp) as producer:
        producer.send("orders", b"zero").result(60)
    from tailrace.client.connections import handshake_probe, ipc_socket
    import grp, pwd
    os.setgroups(groups)
    os.setgid(65534)
    os.setuid(65534)
    began = time.monotonic()
    try:
        with tailrace.Producer(over_ipc) as producer:
            producer.send("orders", b"one").result(60)
        print("sent")
    except tailrace.NotReachableError as error:
        print(error)
    print("waited", "long" if time.monotonic() - began > 15 else "briefly")
"""


@pytest.fixture
def directory() -> Iterator[pathlib.Path]:
    """A short path that other users may enter."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="tr-ipc-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def start(path: pathlib.Path, **settings: str) -> tailrace.embedded_appliance.Embedding:
    return tailrace.embedded(
        listen=["tcp://127.0.0.1:0", f"ipc://{path}"],
        settings={name.replace("_", "."): value for name, value in settings.items()},
    )


def send_as_nobody(
    appliance: EmbeddedAppliance, path: pathlib.Path, *groups: int
) -> tuple[str, str]:
    """(outcome, how long it took) of a record from user nobody in these groups."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(CLIENT), appliance.address, f"ipc://{path}",
         *map(str, groups)],
        capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome, waited = done.stdout.splitlines()
    return outcome, waited


@as_another_user
@pytest.mark.root
def test_a_user_of_the_group_gets_in_and_another_one_is_told_permission_denied(
    directory: pathlib.Path,
) -> None:
    path = directory / "s"
    with start(path, ipc_group=str(GROUP)) as appliance:
        found = path.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, GROUP)
        assert send_as_nobody(appliance, path, GROUP) == ("sent", "waited briefly")
        refused, waited = send_as_nobody(appliance, path)
        assert waited == "waited briefly"
        assert refused.startswith("permission denied: user nobody may not write to")
        assert "group daemon and has mode 0660" in refused
        assert "usermod -aG" in refused
        assert "no appliance answers" not in refused


@as_another_user
@pytest.mark.root
def test_a_directory_that_may_not_be_entered_is_separated(directory: pathlib.Path) -> None:
    path = directory / "s"
    with start(path, ipc_mode="0666") as appliance:
        assert send_as_nobody(appliance, path) == ("sent", "waited briefly")
        directory.chmod(0o700)
        refused, _ = send_as_nobody(appliance, path)
        assert refused.startswith("permission denied: user nobody may not enter the directory of")


def test_a_front_that_is_restarted_gives_its_socket_the_same_access(
    directory: pathlib.Path,
) -> None:
    path = directory / "s"
    with start(path, ipc_mode="0600") as appliance:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        kill_and_wait_for_successor(appliance, "tr-front-0")
        with tailrace.Producer(f"ipc://{path}") as producer:
            producer.send("orders", b"one").result(60)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_appliance_does_not_take_the_socket_of_a_running_one(
    directory: pathlib.Path,
) -> None:
    path = directory / "s"
    with (
        start(path),
        pytest.raises(
            NotReachableError, match=r"cannot listen on ipc://.*: Address already in use"
        ),
    ):
        start(path).start()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ipc_mode": "0060"}, "the owner may read and write"),
        ({"ipc_mode": "rw"}, "it takes an octal mode"),
        ({"ipc_mode": "4660"}, "it takes an octal mode"),
        ({"ipc_group": "no-such-group"}, "groupadd --system no-such-group"),
    ],
)
def test_a_mode_or_group_that_cannot_be_is_refused_at_the_start(
    directory: pathlib.Path, settings: dict[str, str], sentence: str
) -> None:
    with pytest.raises(NotReachableError, match=sentence):
        start(directory / "s", **settings).start()


def test_a_missing_directory_of_the_socket_is_named_with_advice(directory: pathlib.Path) -> None:
    with pytest.raises(NotReachableError, match="Make the directory of the socket"):
        start(directory / "missing" / "s").start()


def test_a_client_says_that_there_is_no_socket_or_that_none_listens(
    directory: pathlib.Path,
) -> None:
    path = directory / "s"
    with (
        pytest.raises(NotReachableError, match="there is no socket"),
        tailrace.Admin(f"ipc://{path}", connect_timeout_ms=100) as admin,
    ):
        admin.list_topics()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with (
        pytest.raises(NotReachableError, match="left from an earlier run"),
        tailrace.Admin(f"ipc://{path}", connect_timeout_ms=100) as admin,
    ):
        admin.list_topics()
