"""The commands of docs/install.md, line by line, on a host with a booted systemd."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest

from tests.kit.hosts.booted_systemd import (
    PREFIX,
    BootedSystemd,
    booted_systemd,
    install_program,
    namespaces_work,
)
from tests.kit.hosts.installed import ROOT

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not namespaces_work(), reason="needs root, systemd and namespaces"),
    pytest.mark.slow_because("a systemd is booted"),
    pytest.mark.xdist_group("booted systemd"),
]
PAGE = ROOT / "docs" / "install.md"


def lines_of(heading: str) -> list[str]:
    """Lines of the first shell block behind a heading of the page."""
    _, _, section = PAGE.read_text().partition(f"\n## {heading}\n")
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1].splitlines()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedSystemd]:
    with booted_systemd(tmp_path_factory.mktemp("page")) as booted:
        if shutil.which("sudo") is None:
            booted.run("tee", "/usr/local/bin/sudo", stdin='#!/bin/sh\nexec "$@"\n')
            booted.run("chmod", "755", "/usr/local/bin/sudo")
        booted.run("useradd", "--create-home", "alice")
        yield booted


def run_page(host: BootedSystemd, heading: str) -> str:
    """Run each line of a section; the output of the last."""
    output = ""
    for line in lines_of(heading):
        if " -m venv " in line:
            assert f" {PREFIX}" in line
        elif " install ." in line:  # the registry cannot be reached; it installs the same tree
            install_program(host)
        else:
            output = host.run("sh", "-c", line).stdout
    return output


def test_from_nothing_to_a_first_message_as_a_service(host: BootedSystemd) -> None:
    assert run_page(host, "A virtual environment") == "hello\n"
    assert host.systemctl("is-enabled", "tailrace") == "enabled\n"


def test_another_instance_and_a_user_of_the_group(host: BootedSystemd) -> None:
    run_page(host, "Several appliances on one host")
    run_page(host, "Who may connect")
    address = lines_of("Who may connect")[1].split()[-1]
    listed = host.run(
        "runuser", "-u", "alice", "--", "tailrace", "topic", "list", "--bootstrap", address
    )
    assert "orders" in listed.stdout


def test_every_unit_of_the_table_is_installed(host: BootedSystemd) -> None:
    table = re.findall(r"`(tailrace[\w@-]*\.(?:service|timer|socket))`", PAGE.read_text())
    assert len(set(table)) >= 4
    for unit in set(table):
        path = pathlib.Path("/etc/systemd/system", unit.replace("@NAME", "@"))
        host.run("test", "-e", str(path))
