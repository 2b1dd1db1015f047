"""Assignors of an installed package, in a real appliance: one that is wrong costs its group its
ways, and nobody anything else.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sysconfig
import venv
from collections.abc import Iterator

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import UnsupportedAssignorError
from tailrace.launcher import __file__ as launcher
from tests.kit.members.groups import poll_until, read_until
from tests.kit.peers.raw_client import RawClient
from tests.kit.peers.raw_members import process_named
from tests.kit.processes import HANG_LIMIT_S, wait_until

PLUGIN = """
def all_to_the_first(members, topics):
    return {min(members): [(topic, partition) for topic, count in topics.items() for partition in range(count)]}

def unlisted(members, topics):
    return all_to_the_first(members, topics)

def raises(members, topics):
    raise ZeroDivisionError("no member left")

def exits(members, topics):
    raise SystemExit(3)

def recurses(members, topics):
    return recurses(members, topics)

def nonsense(members, topics):
    members.clear()
    topics.clear()
    return {"nobody": [("nothing", -1)]}

def gives_twice(members, topics):
    return {member: [(topic, 0) for topic in topics] for member in members}
"""  # noqa: E501
WRONG = {
    "raises": "ZeroDivisionError: no member left", "exits": "SystemExit: 3",
    "recurses": "RecursionError", "nonsense": "an unknown member",
    "gives_twice": "to two members", "missing": "ModuleNotFoundError",
}  # fmt: skip
PARTITIONS = 4


@pytest.fixture
def python(tmp_path: pathlib.Path) -> str:
    """An interpreter with the packages of this one, and a package with assignors."""
    home = tmp_path / "venv"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(home)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "odd_assignors.py").write_text(PLUGIN)
    described = packages / "odd_assignors-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: odd-assignors\nVersion: 1.0\n"
    )
    names = [
        f"{name} = odd_assignors:{name}"
        for name in ("all_to_the_first", "unlisted", *WRONG)
        if name != "missing"
    ]
    (described / "entry_points.txt").write_text(
        "\n".join(["[tailrace.assignors]", *names, "missing = there_is_no_such_package:it"])
    )
    return str(home / "bin" / "python")


@pytest.fixture
def address(tmp_path: pathlib.Path, python: str) -> Iterator[str]:
    """Address of an appliance that this interpreter runs."""
    address = f"ipc://{tmp_path}/s"
    process = subprocess.Popen(
        [python, "-I", os.path.abspath(launcher), "appliance.supervise.supervisor", "--data-dir",
        str(tmp_path / "data"), "--listen", address,
         "--set", "ring_bytes=16777216", "--set", "http.listen=",
         "--set", f"group.assignors={','.join(['all_to_the_first', *WRONG])}"],
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield address
        process.terminate()
        assert process.wait(HANG_LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()


def process_of_groups(client: RawClient) -> list[int]:
    row = process_named(client)
    assert row is not None
    return [row["pid"], row["restarts"], row["internal_errors"]]


def reader(address: str, group: str, strategy: str = "sticky") -> Consumer:
    return Consumer(
        "orders",
        bootstrap=address,
        group_id=group,
        partition_assignment_strategy=strategy,
        auto_offset_reset="earliest",
    )


def test_an_assignor_that_raises_or_returns_nonsense_costs_only_its_group(address: str) -> None:
    with Admin(address) as admin, Producer(address) as producer:
        admin.create_topics([NewTopic("orders", PARTITIONS)])
        for number in range(40):
            producer.send("orders", b"%d" % number, partition=number % PARTITIONS)
        producer.flush(60)
        with reader(address, "sound") as sound, RawClient(address) as client:
            assert len(read_until([sound], 40)) == 40
            before = process_of_groups(client)
            for name, reason in WRONG.items():
                with reader(address, name, name) as first, reader(address, name, name) as second:
                    poll_until(
                        [first, second],
                        lambda: (
                            len(first.assignment()) == len(second.assignment()) == PARTITIONS // 2
                        ),
                        name,
                    )
                    trouble = admin.describe_groups(name)[name]["trouble"]
                    assert f"the assignor {name} cannot be used" in trouble
                    assert reason in trouble
                    assert "sticky decides instead" in trouble
            with (
                reader(address, "good", "all_to_the_first") as first,
                reader(address, "good", "all_to_the_first") as second,
            ):
                poll_until(
                    [first, second],
                    lambda: (
                        sorted([len(first.assignment()), len(second.assignment())])
                        == [0, PARTITIONS]
                        and admin.list_groups()["good"]["members"] == 2
                    ),
                    "the plugin decides",
                )
                assert admin.describe_groups("good")["good"]["trouble"] == ""
            for name in ("not installed", "unlisted"):  # installed, and not in group.assignors
                with (
                    pytest.raises(UnsupportedAssignorError, match="all_to_the_first"),
                    reader(address, "new", name) as unknown,
                ):
                    wait_until(lambda: unknown.poll(100) is None, "it is refused")
            assert process_of_groups(client) == before, (
                "the process of groups has not been restarted"
            )
            assert len(sound.assignment()) == PARTITIONS
            assert admin.describe_groups("sound")["sound"]["rebalances"] == 1
