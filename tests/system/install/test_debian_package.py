"""The Debian package in a clean Debian root with a booted systemd: installed, upgraded, removed,
purged; and what lintian says.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.kit.hosts.booted_systemd import BootedSystemd, booted_systemd, namespaces_work
from tests.kit.hosts.installed import ROOT
from tests.kit.processes import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not namespaces_work() or shutil.which("mmdebstrap") is None,
        reason="needs root, systemd, namespaces and mmdebstrap",
    ),
    pytest.mark.xdist_group("debian package"),
]
PACKAGES = "systemd,systemd-sysv,python3,procps,iproute2"
OLD, NEW = "0.0.9-1", "0.1.0-1"
BUILD_LIMIT_S = 3000
"""A build downloads and packs 280 MB."""


def call(*command: str | pathlib.Path) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("package")
    call("sh", "tools/build_package.sh", "deb", directory)
    (found,) = directory.glob("*.deb")
    return found


@pytest.fixture(scope="module")
def older(package: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The same package, as an earlier version whose default configuration differed."""
    tree = tmp_path_factory.mktemp("older") / "tree"
    call("dpkg-deb", "-R", package, tree)
    control = tree / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"Version: {NEW}", f"Version: {OLD}"))
    settings = tree / "etc/tailrace/tailrace.toml"
    settings.write_text(settings.read_text() + "# of the older version\n")
    call("dpkg-deb", "-Zgzip", "-z1", "-b", tree, tree.parent / "older.deb")
    shutil.rmtree(tree)
    return tree.parent / "older.deb"


@pytest.fixture(scope="module")
def host(
    package: pathlib.Path, older: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BootedSystemd]:
    """A clean Debian with the packages in /srv."""
    directory = tmp_path_factory.mktemp("debian")
    root = directory / "debian"
    call("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root)
    srv = directory / "root/srv"
    srv.mkdir(parents=True)
    shutil.copy(package, srv / "new.deb")
    shutil.copy(older, srv / "old.deb")
    with booted_systemd(directory, lower=str(root)) as booted:
        yield booted
    shutil.rmtree(directory)


def test_lintian_finds_nothing(package: pathlib.Path) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("lintian is not installed")
    call("lintian", "--fail-on=error,warning", package)


def test_a_clean_debian_installs_upgrades_removes_and_purges_it(host: BootedSystemd) -> None:
    host.run("dpkg", "--install", "/srv/old.deb")
    assert host.property("tailrace", "ActiveState") == "active"
    assert host.systemctl("is-enabled", "tailrace") == "enabled\n"
    host.run("tailrace", "topic", "create", "orders")
    host.run("tailrace", "produce", "orders", stdin="one\n")
    assert "compiled" in host.run("tailrace", "doctor", status=None).stdout
    host.run("tailrace", "install", "--instance", "staging", "--dry-run")

    host.run("dpkg", "--install", "/srv/new.deb")  # an unchanged configuration is replaced
    assert NEW in host.run("dpkg-query", "-W", "tailrace").stdout
    host.run("grep", "-q", "of the older version", "/etc/tailrace/tailrace.toml", status=1)
    host.wait_for("tailrace", "ActiveState", "active")
    assert host.run("tailrace", "consume", "orders", "--from-beginning").stdout == "one\n"
    assert host.run("stat", "-c", "%U:%G %a", "/etc/tailrace/tailrace.toml").stdout.split() == [
        "root:tailrace",
        "640",
    ]

    host.run("dpkg", "--remove", "tailrace")
    assert host.property("tailrace", "ActiveState") == "inactive"
    assert host.run("ls", "/dev/shm").stdout == ""
    for path, status in (("/opt/tailrace", 1), ("/var/lib/tailrace", 0), ("/etc/tailrace", 0)):
        host.run("test", "-e", path, status=status)

    host.run("tee", "-a", "/etc/tailrace/tailrace.toml", stdin="slots = 2048\n")
    host.run("dpkg", "--install", "--force-confold", "/srv/new.deb")
    wait_until(lambda: host.property("tailrace", "ActiveState") == "active", "it starts again")
    assert host.run("tailrace", "consume", "orders", "--from-beginning").stdout == "one\n"
    host.run("grep", "-q", "slots = 2048", "/etc/tailrace/tailrace.toml")

    host.run("dpkg", "--purge", "tailrace")
    host.run("id", "tailrace", status=1)
    left = host.run("find", "/", "-xdev", "-name", "*tailrace*", "-not", "-path", "/proc/*")
    ours = ("/opt/tailrace-checkout", "/opt/tailrace-python")  # of the kit
    assert [path for path in left.stdout.split() if not path.startswith(ours)] == []
