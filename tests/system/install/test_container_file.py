"""`deploy/Containerfile`, without an engine: what it says is parsed, and its command and health
check are run as an engine would, as PID 1 of a user without rights under a read-only root.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from tests.kit.hosts.booted_systemd import (
    BootedSystemd,
    booted_systemd,
    install_program,
    namespaces_work,
)
from tests.kit.hosts.installed import ROOT
from tests.kit.processes import wait_until

FILE = ROOT / "deploy" / "Containerfile"
CONTAINER = """\
mount -t tmpfs -o size={shm} tmpfs /dev/shm
mkdir -p {volume}
mount -t tmpfs -o mode=0700 tmpfs {volume}
chown {user} {volume}
mount -o remount,bind,ro /
cd {volume}
exec setpriv --reuid {uid} --regid {gid} --clear-groups env -i {environment} {command}
"""


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the file."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def last(name: str) -> str:
    return [arguments for word, arguments in instructions() if word == name][-1]


def test_the_image_needs_no_root_and_says_what_it_serves() -> None:
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL",
             "HEALTHCHECK", "ENTRYPOINT", "CMD"}  # fmt: skip
    assert {word for word, _ in instructions()} <= known
    user = last("USER")
    assert user.split(":")[0] not in ("0", "root")
    assert f"--uid {user.split(':')[0]}" in FILE.read_text()
    assert last("STOPSIGNAL") == "SIGTERM"
    for name in ("ENTRYPOINT", "CMD", "VOLUME"):
        assert json.loads(last(name))
    for _, paths in (item for item in instructions() if item[0] == "COPY"):
        *sources, _target = [path for path in paths.split() if not path.startswith("--")]
        assert "--from=" in paths or all((ROOT / source).exists() for source in sources)
    readme = (ROOT / "docs" / "install.md").read_text()
    for line in re.findall(r"^podman .*$", readme, re.MULTILINE):
        assert line in FILE.read_text()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedSystemd]:
    with booted_systemd(tmp_path_factory.mktemp("container")) as booted:
        install_program(booted)
        yield booted


def start(host: BootedSystemd, name: str, shm: str) -> None:
    """Run the image's command in namespaces."""
    uid, gid = last("USER").split(":")
    environment = [value for word, value in instructions() if word == "ENV"]
    command = shlex.join([*json.loads(last("ENTRYPOINT")), *json.loads(last("CMD"))])
    script = CONTAINER.format(
        shm=shm, volume=json.loads(last("VOLUME"))[0], user=f"{uid}:{gid}", uid=uid, gid=gid,
        environment=" ".join(environment), command=command,
    )  # fmt: skip
    host.run("tee", f"/root/{name}.sh", stdin=script)
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc"]
    host.run(
        "systemd-run", f"--unit={name}", "--property=Type=exec", "--property=RemainAfterExit=yes",
        *unshare, "sh", "-e", f"/root/{name}.sh",
    )  # fmt: skip


@pytest.mark.root
@pytest.mark.skipif(not namespaces_work(), reason="needs root, systemd and namespaces")
@pytest.mark.slow_because("a systemd is booted")
@pytest.mark.xdist_group("container")
def test_it_serves_is_healthy_and_stops_cleanly_as_pid_1_under_a_read_only_root(
    host: BootedSystemd,
) -> None:
    start(host, "container", "1g")
    check = json.loads(last("HEALTHCHECK").partition(" CMD ")[2])

    def supervisor() -> str:
        return host.run("pgrep", "-x", "tr-supervisor-0", status=None).stdout.strip()

    wait_until(lambda: bool(supervisor()), "it starts")
    enter = ["nsenter", "-t", supervisor(), "-a"]
    assert host.run(*enter, "cat", "/proc/1/comm").stdout == "tr-supervisor-0\n"
    host.run(*enter, "touch", "/etc/written", status=1)
    wait_until(lambda: host.run(*enter, *check, status=None).returncode == 0, "it is healthy")
    program = json.loads(last("ENTRYPOINT"))[0]
    context = next(value for _, value in instructions() if value.startswith("TAILRACE_CONTEXT="))
    administrator = [*enter, "env", context, program]
    host.run(*enter, program, "topic", "create", "orders", status=1)
    host.run(*administrator, "topic", "create", "orders")
    host.run(*administrator, "produce", "orders", stdin="one\n")
    assert host.run(*administrator, "consume", "orders", "--from-beginning").stdout == "one\n"
    host.run("kill", "-TERM", supervisor())
    host.wait_for("container", "SubState", "exited")
    assert host.property("container", "ExecMainStatus") == "0"


@pytest.mark.root
@pytest.mark.skipif(not namespaces_work(), reason="needs root, systemd and namespaces")
@pytest.mark.slow_because("a systemd is booted")
@pytest.mark.xdist_group("container")
def test_too_small_a_dev_shm_ends_the_start_with_what_to_do(host: BootedSystemd) -> None:
    start(host, "small", "64m")
    host.wait_for("small", "ActiveState", "failed")
    assert host.property("small", "ExecMainStatus") == "75"
    assert "/dev/shm has no room" in host.run("journalctl", "-u", "small").stdout
