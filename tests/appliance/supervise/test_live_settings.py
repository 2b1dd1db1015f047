"""Settings in force: what a reload and the catalog change, and what they must not."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from appliance.config.document_size import OVERRIDES_BYTES, SETTINGS_BYTES
from appliance.config.settings import Settings, definitions
from appliance.config.settings_sources import SettingsError, Sources, checked_settings
from appliance.config.topology import flat
from appliance.supervise.live_settings import LiveSettings
from shm.memory.layout import RegionKind, SettingsLayout
from shm.tables.settings_block import SettingsBlock
from tests.kit.memory import region
from tests.kit.processes import HANG_LIMIT_S

CORES = flat({0, 1})


class World:
    def __init__(self, path: pathlib.Path, block: SettingsBlock, overrides: SettingsBlock) -> None:
        self.path = path
        self.block = block
        self.overrides = overrides
        self.environment: dict[str, str] = {}
        self.reloads = 0
        self.for_children: Callable[[Settings], dict[str, Any]] = self._for_children
        self.live: LiveSettings

    def start(self, text: str) -> None:
        self.path.write_text(text)
        sources = Sources(str(self.path), self.environment, [("fronts", "1")])
        self.live = LiveSettings(sources, *checked_settings(*sources, CORES), CORES)
        self.live.open(self.block, self.overrides, lambda s: self.for_children(s))

    @staticmethod
    def _for_children(settings: Settings) -> dict[str, Any]:
        return {"log_level": settings.log_level, "groups.max": settings.groups_max}

    def reload(self, text: str) -> dict[str, Any]:
        self.path.write_text(text)
        self.live.reload()
        return dict(self.document["reload"])

    def override(self, **values: Any) -> None:
        """As the controller does it."""
        named = {name.replace("__", "."): value for name, value in values.items()}
        self.overrides.publish({"values": named, "reload": self.reloads})
        self.live.take_overrides()

    @property
    def document(self) -> dict[str, Any]:
        return self.block.read()[1]

    def row(self, name: str) -> dict[str, Any]:
        return next(dict(row) for row in self.document["configs"] if row["name"] == name)


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[World]:
    with (
        region(
            RegionKind.SETTINGS, SettingsLayout(SETTINGS_BYTES).size, SETTINGS_BYTES
        ) as settings,
        region(
            RegionKind.SETTINGS, SettingsLayout(OVERRIDES_BYTES).size, OVERRIDES_BYTES
        ) as overrides,
    ):
        yield World(tmp_path / "t.toml", SettingsBlock(settings), SettingsBlock(overrides))


def test_a_reload_applies_what_may_change_and_names_what_needs_a_restart(world: World) -> None:
    world.start("groups.max = 10\nslots = 100\n")
    report = world.reload("groups.max = 20\nslots = 200\nlog_level = 'debug'\n")
    assert (report["errors"], report["restart"]) == ([], ["slots"])
    assert sorted(report["changed"]) == ["groups.max", "log_level"]
    assert world.document["settings"] == {"log_level": "debug", "groups.max": 20}
    assert world.live.settings.slots == 100
    row = world.row("slots")
    assert (row["value"], row["after_restart"], row["line"]) == (100, 200, 2)
    assert "after_restart" not in world.row("groups.max")
    report = world.reload("slots = 100\n")
    assert report["restart"] == []
    assert sorted(report["changed"]) == ["groups.max", "log_level"]
    assert world.live.settings.groups_max == definitions()["groups.max"].default


@pytest.mark.parametrize(
    "wrong",
    [
        "groups.max = 20\nring_byte = 1\n",
        "groups.max = 'many'\n",
        "groups.max = 20\ngroup.session.timeout.min.ms = '1h'\n",
        "groups.max = \n",
        "slots = 1\n",
        f"groups.max = {'1' * 5_000}\n",
        'data_dirs = ["/a\\u0000b"]\n',
    ],
)
def test_a_wrong_file_changes_nothing_and_its_errors_are_said(world: World, wrong: str) -> None:
    world.start("groups.max = 10\n")
    before = world.document
    report = world.reload(wrong)
    assert report["errors"]
    assert report["errors"][0].startswith(f"{world.path}:")
    after = world.document
    assert (after["settings"], after["configs"]) == (before["settings"], before["configs"])
    assert world.live.settings.groups_max == 10
    assert world.reload("groups.max = 30\n")["errors"] == []
    assert world.live.settings.groups_max == 30


def test_a_file_that_is_gone_or_is_a_directory_at_the_reload_changes_nothing(world: World) -> None:
    world.start("groups.max = 10\n")
    world.path.unlink()
    assert "cannot be read" in world.live.reload()[0]
    world.path.mkdir()
    assert "is a directory" in world.live.reload()[0]
    assert world.live.settings.groups_max == 10


def test_what_would_conflict_with_a_setting_that_waits_for_a_restart_is_refused(
    world: World,
) -> None:
    """credit_bytes fits the smaller lanes of the file, not the lanes that run."""
    world.start("lane_bytes = '4MiB'\ncredit_bytes = '8MiB'\n")
    report = world.reload("lane_bytes = '1MiB'\ncredit_bytes = '1MiB'\n")
    assert "at least half of lane_bytes (4194304)" in report["errors"][0]
    assert world.live.settings.credit_bytes == 8 << 20


def test_settings_of_the_catalog_win_until_they_are_removed(world: World) -> None:
    world.environment["TAILRACE_LOG_LEVEL"] = "error"
    world.start("groups.max = 10\n")
    world.override(groups__max=50, log_level="debug")
    assert world.document["settings"] == {"log_level": "debug", "groups.max": 50}
    row = world.row("groups.max")
    assert (row["value"], row["source"], row["without"]) == (50, "config set", 10)
    report = world.reload("groups.max = 20\n")
    assert (report["errors"], report["changed"]) == ([], [])
    assert world.live.settings.groups_max == 50
    world.override(log_level="debug")
    assert world.live.settings.groups_max == 20
    assert world.row("groups.max")["source"] == str(world.path)
    world.override()
    assert world.row("log_level")["source"] == "TAILRACE_LOG_LEVEL"
    assert world.live.settings.log_level == "error"


def test_defaults_of_topics_are_merged_one_by_one(world: World) -> None:
    world.start("topic.retention.ms = '1d'\n")
    world.override(topic__segment__bytes=1 << 20)
    assert world.live.settings.topic_defaults == {
        "retention.ms": 86_400_000, "segment.bytes": 1 << 20,
    }  # fmt: skip
    world.reload("topic.retention.bytes = 5\n")
    assert world.live.settings.topic_defaults == {
        "retention.bytes": 5, "segment.bytes": 1 << 20,
    }  # fmt: skip


def test_settings_of_the_catalog_that_do_not_fit_are_left_out_and_said(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """An older catalog, or a file that was changed between two starts."""
    world.start("group.session.timeout.max.ms = '10s'\n")
    with caplog.at_level(logging.WARNING):
        world.override(
            **{"group.session.timeout.min.ms": 20_000, "of.another.version": 1, "slots": 99}
        )
    assert world.live.settings.group_session_timeout_min_ms == 1_000
    assert "override_not_applied" in caplog.text
    assert "override_ignored setting=of.another.version" in caplog.text
    assert "override_ignored setting=slots" in caplog.text
    assert {row["name"]: row["reason"] for row in world.document["left_out"]} == {
        "group.session.timeout.min.ms": "it does not go with the other settings",
        "of.another.version": "this version has no such setting",
        "slots": "this version does not change it while it runs",
    }
    assert world.row("group.session.timeout.min.ms")["source"] == "default"
    world.override(log_level="debug")
    assert world.document["left_out"] == []


def test_a_reload_that_the_controller_asks_for_is_counted(world: World) -> None:
    world.start("groups.max = 10\n")
    world.reloads = 1
    world.overrides.publish({"values": {}, "reload": 1})
    assert world.live.take_overrides()
    world.live.reload()
    assert world.document["reload"]["requested"] == 1
    assert world.document["overrides_version"] == 1
    assert not world.live.take_overrides()


def test_a_configuration_without_room_in_the_block_is_refused(world: World) -> None:
    addresses = ", ".join(f"'tcp://127.0.0.1:{port}'" for port in range(1, 9_000))
    world.start("groups.max = 10\n")
    report = world.reload(f"groups.max = 20\nlisten = [{addresses}]\n")
    assert "shorten listen, the longest" in report["errors"][0]
    assert world.live.settings.groups_max == 10


# ---- the room of the document --------------------------------------------------------------------


def long_quotas(count: int, name: str = "u") -> list[str]:
    """Rules of 100 bytes each, about."""
    return [f"user={name * 70}{i} producer_byte_rate=1000000" for i in range(count)]


def long_groups(count: int) -> list[str]:
    return [f"group={'g' * 60}{i} share.auto.offset.reset=latest" for i in range(count)]


def test_overrides_without_room_beside_the_file_are_left_out_and_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that grew between two starts. The processes and the next start go on."""
    world.start(f"quotas = {json.dumps(long_quotas(380))}\n")
    world.for_children = lambda s: {"quotas": s.quotas, "groups": s.kafka_group_settings}
    with caplog.at_level(logging.ERROR):
        world.override(kafka__group__settings=long_groups(290), groups__max=77)
    assert "override_not_applied setting=kafka.group.settings error='no room" in caplog.text
    assert "tailrace config unset kafka.group.settings" in caplog.text
    assert world.live.settings.kafka_group_settings == []
    assert world.row("kafka.group.settings")["source"] == "default"
    [row] = world.document["left_out"]
    assert row == {
        "name": "kafka.group.settings", "reason": "it has no room beside the configuration",
    }  # fmt: skip
    assert (world.live.settings.groups_max, world.document["overrides_version"]) == (77, 1)
    world.live.republish()
    world.override(kafka__group__settings=long_groups(3), groups__max=77)
    assert len(world.live.settings.kafka_group_settings) == 3


def test_a_reload_that_leaves_no_room_for_an_override_is_refused(world: World) -> None:
    world.start("groups.max = 10\n")
    world.for_children = lambda s: {"quotas": s.quotas, "groups": s.kafka_group_settings}
    world.override(kafka__group__settings=long_groups(290))
    report = world.reload(f"groups.max = 20\nquotas = {json.dumps(long_quotas(380))}\n")
    assert "too large beside what `tailrace config set`" in report["errors"][0]
    assert world.live.settings.groups_max == 10
    assert len(world.live.settings.kafka_group_settings) == 290
    assert world.reload("groups.max = 20\n")["errors"] == []


def test_a_report_of_errors_that_has_no_room_is_shortened(world: World) -> None:
    world.path = world.path.parent.joinpath(*["d" * 200] * 3, "t.toml")  # each error names it
    world.path.parent.mkdir(parents=True)
    world.start(f"quotas = {json.dumps(long_quotas(420))}\n")
    world.for_children = lambda s: {"quotas": s.quotas}
    wrong = "".join(f"x{i} = 1\n" for i in range(50))
    errors = world.reload(wrong)["errors"]
    assert 0 < len(errors) < 50
    assert len(world.live.settings.quotas) == 420


def test_a_configuration_that_would_not_fit_is_refused_before_the_start(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "t.toml"
    path.write_text(f"groups.max = 5\nquotas = {json.dumps(long_quotas(700))}\n")
    with pytest.raises(SettingsError, match="shorten quotas, the longest") as refused:
        checked_settings(str(path), {}, [], CORES)
    assert str(refused.value).startswith(f"{path}:2: ")


def test_a_change_of_the_file_that_an_override_hides_is_said(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start("groups.max = 10\nlog_level = 'info'\n")
    world.override(groups__max=50, log_level="debug")
    report = world.reload("groups.max = 20\nlog_level = 'info'\n")
    assert (report["changed"], report["overridden"]) == ([], ["groups.max"])
    with caplog.at_level(logging.WARNING):
        world.live.log_reload()
    assert "tailrace config unset groups.max" in caplog.text
    assert world.reload("groups.max = 20\nlog_level = 'info'\n")["overridden"] == []


HANG_UPS = """
import os, signal, sys
from appliance.config.topology import flat
from appliance.supervise.live_settings import HangUps
# Whichever of the two these tests were started with.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
hang_ups = HangUps()
wake_read, wake_write = os.pipe()
os.set_blocking(wake_write, False)
signal.set_wakeup_fd(wake_write)
hang_ups.watch()
os.write(int(sys.argv[2]), b"ready")
os.read(wake_read, 1)
assert hang_ups.take()
os.write(int(sys.argv[2]), b"gone" if hang_ups.is_terminal_gone() else b"reload")
"""


@pytest.mark.parametrize(
    ("way", "closed", "outcome"),
    [("plain", True, b"gone"), ("plain", False, b"reload"), ("nohup", True, b"reload")],
)
def test_a_hang_up_is_a_reload_unless_the_terminal_is_gone(
    way: str, closed: bool, outcome: bytes
) -> None:
    read, write = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover
        os.execv(sys.executable, [sys.executable, "-c", HANG_UPS, way, str(_inherited(write))])
    os.close(write)
    try:
        assert os.read(read, 5) == b"ready"
        if closed:
            os.close(terminal)  # the kernel sends SIGHUP to the session's leader
        else:
            os.kill(pid, signal.SIGHUP)
        assert os.read(read, 10) == outcome
    finally:
        os.waitpid(pid, 0)
        os.close(read)
        if not closed:
            os.close(terminal)


def _inherited(fd: int) -> int:
    os.set_inheritable(fd, True)
    return fd


def test_without_a_terminal_a_hang_up_is_a_reload() -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", HANG_UPS, "plain", str(write)],
        pass_fds=[write],
        start_new_session=True,
    )
    os.close(write)
    assert os.read(read, 5) == b"ready"
    process.send_signal(signal.SIGHUP)
    assert os.read(read, 10) == b"reload"
    os.close(read)
    assert process.wait(HANG_LIMIT_S) == 0
