"""The RPM: its contents, and that it installs, upgrades and is removed. rpm's own tools are in
Debian's archive; they are put into a clean Debian root with a booted systemd.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.kit.hosts.booted_systemd import BootedSystemd, booted_systemd, namespaces_work
from tests.kit.hosts.installed import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not namespaces_work() or shutil.which("mmdebstrap") is None or shutil.which("rpm") is None,
        reason="needs root, systemd, namespaces, mmdebstrap and rpm",
    ),
    pytest.mark.xdist_group("rpm package"),
]
PACKAGES = "systemd,systemd-sysv,python3,procps,iproute2,rpm"
BUILD_LIMIT_S = 3000
"""A build downloads and packs 280 MB."""
CONFIGURATION = {"/etc/tailrace/tailrace.toml", "/etc/security/limits.d/tailrace.conf"}


def call(*command: str | pathlib.Path) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("package")
    call("sh", "tools/build_package.sh", "rpm", directory)
    (found,) = directory.glob("*.rpm")
    return found


@pytest.fixture(scope="module")
def host(
    package: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BootedSystemd]:
    """A clean Debian with rpm's tools, and the package in /srv."""
    directory = tmp_path_factory.mktemp("debian")
    root = directory / "debian"
    call("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root)
    srv = directory / "root/srv"
    srv.mkdir(parents=True)
    shutil.copy(package, srv / "new.rpm")
    with booted_systemd(directory, lower=str(root)) as booted:
        yield booted
    shutil.rmtree(directory)


def test_its_contents_modes_and_relations(package: pathlib.Path) -> None:
    query = ("rpm", "-qp", "--nosignature")
    listed = call(
        *query, "--queryformat", "[%{FILEMODES:perms} %{FILEUSERNAME} %{FILENAMES}\n]", package
    )
    files = {
        path: (mode, user)
        for mode, user, path in (line.split(maxsplit=2) for line in listed.splitlines())
    }
    assert files["/etc/tailrace/tailrace.toml"] == ("-rw-r-----", "root")
    assert files["/usr/lib/systemd/system/tailrace.service"] == ("-rw-r--r--", "root")
    assert "/opt/tailrace/bin/tailrace" in files
    assert any(path.endswith(".so") and "/tailrace/kernel/" in path for path in files)
    assert any(path.startswith("/usr/share/man/man1/tailrace") for path in files)
    assert {user for _, user in files.values()} == {"root"}
    writable = {path for path, (mode, _) in files.items() if mode[0] != "l" and mode[8] == "w"}
    assert writable == set()
    assert not any("__pycache__" in path or path.startswith("/var/") for path in files)
    assert set(call(*query, "--configfiles", package).split()) == CONFIGURATION
    required = call(*query, "--requires", package).split()
    assert {"/usr/bin/python3.11", "systemd", "shadow-utils"} <= set(required)
    assert call(*query, "--queryformat", "%{NAME} %{VERSION}-%{RELEASE} %{LICENSE}", package) == (
        "tailrace 0.1.0-1 Apache-2.0"
    )
    call("rpm", "--checksig", "--nosignature", package)


def test_it_installs_starts_is_installed_again_and_removed(host: BootedSystemd) -> None:
    # Debian has no database of packages that rpm could ask about the relations.
    host.run("rpm", "--install", "--nodeps", "/srv/new.rpm")
    host.systemctl("enable", "--now", "tailrace")
    assert host.property("tailrace", "ActiveState") == "active"
    host.run("tailrace", "topic", "create", "orders")
    host.run("tailrace", "produce", "orders", stdin="one\n")
    assert "compiled" in host.run("tailrace", "doctor", status=None).stdout
    assert host.run("stat", "-c", "%U:%G %a", "/etc/tailrace/tailrace.toml").stdout.split() == [
        "root:tailrace",
        "640",
    ]
    changed = host.run(
        "rpm", "--verify", "--nodeps", "--nouser", "--nogroup", "tailrace", status=None
    )
    # systemd-tmpfiles closes this one to others.
    assert [line.split() for line in changed.stdout.splitlines()] == [
        [".M.......", "/etc/tailrace"]
    ]

    host.run("tee", "-a", "/etc/tailrace/tailrace.toml", stdin="slots = 2048\n")
    host.run("rpm", "--upgrade", "--nodeps", "--replacepkgs", "/srv/new.rpm")
    host.run("grep", "-q", "slots = 2048", "/etc/tailrace/tailrace.toml")
    host.wait_for("tailrace", "ActiveState", "active")
    assert host.run("tailrace", "consume", "orders", "--from-beginning").stdout == "one\n"

    host.run("rpm", "--erase", "tailrace")
    assert host.property("tailrace", "ActiveState") == "inactive"
    assert host.run("ls", "/dev/shm").stdout == ""
    for path, status in (("/opt/tailrace", 1), ("/var/lib/tailrace", 0)):
        host.run("test", "-e", path, status=status)
