"""Pure decisions of the appliance: cores, restarts, settings, topic settings, memory."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from appliance.config import topic_config, topic_settings
from appliance.config.core_plan import BUSY_POLL_AUTO_US, CorePlan, plan_busy_poll, plan_cores
from appliance.config.relations import checked_plan
from appliance.config.settings import Settings, definitions
from appliance.config.settings_sources import load_settings
from appliance.config.topology import flat
from appliance.supervise.memory.memory_plan import plan_regions
from appliance.supervise.processes.restart_policy import (
    BACKOFF_MAX_MS,
    Action,
    Decision,
    ExitCode,
    decide,
)
from tailrace.core.errors import InvalidSettingError, InvalidTopicNameError


@pytest.mark.parametrize(
    ("setting", "available", "plan"),
    [
        ("auto", {0}, CorePlan((None,), (None,), (None,), None)),
        ("auto", {0, 1}, CorePlan((None,), (None,), (None,), None)),
        ("auto", {0, 1, 2}, CorePlan((2,), ((0, 1),), ((0, 1),), (0, 1))),
        ("auto", set(range(64)), CorePlan(tuple(range(2, 64)), ((0, 1),), ((0, 1),), (0, 1))),
        ([1], {0, 1}, CorePlan((1,), ((0,),), ((0,),), (0,))),
        ([0, 1], {0, 1}, CorePlan((0, 1), (None,), (None,), None)),
    ],
)
def test_core_plan(setting: str | list[int], available: set[int], plan: CorePlan) -> None:
    assert plan_cores(setting, flat(available), 1, 1, 128) == plan


@pytest.mark.parametrize("setting", [[5], [0, 0], [], "all", ["a"], [True]])
def test_cores_that_cannot_be_are_refused(setting: Any) -> None:
    with pytest.raises(InvalidSettingError, match="cores is"):
        plan_cores(setting, flat({0, 1}), 1, 1, 128)


@pytest.mark.parametrize(
    ("setting", "cores", "available", "fronts", "directories", "us"),
    [
        ("auto", "auto", {0}, 1, 1, 0),
        ("auto", "auto", {0, 1}, 1, 1, 0),
        ("auto", [0, 1], {0, 1}, 1, 1, 0),
        ("auto", [1], {0, 1}, 1, 1, 0),
        ("auto", "auto", {0, 1, 2}, 1, 1, BUSY_POLL_AUTO_US),
        ("auto", "auto", set(range(16)), 1, 1, BUSY_POLL_AUTO_US),
        ("auto", "auto", set(range(16)), 2, 1, BUSY_POLL_AUTO_US),
        ("auto", "auto", {0, 1, 2}, 1, 2, 0),  # five processes on three cores
        ("auto", list(range(2, 16)), set(range(16)), 2, 1, 0),  # three on two cores
        ("auto", [2], set(range(6)), 1, 2, 0),  # a second data directory's worker has no core
        ("auto", [2, 3], set(range(6)), 2, 2, BUSY_POLL_AUTO_US),
        (0, "auto", set(range(16)), 1, 1, 0),
        (70, "auto", {0, 1}, 1, 1, 70),
    ],
)
def test_processes_look_for_work_only_where_each_has_a_core_or_it_was_asked_for(
    setting: int | str,
    cores: str | list[int],
    available: set[int],
    fronts: int,
    directories: int,
    us: int,
) -> None:
    plan = plan_cores(cores, flat(available), fronts, directories, 128)
    found = plan_busy_poll(setting, plan)
    assert found.us == us
    assert found.reason


@pytest.mark.parametrize("setting", [-1, 10_001, "soon", "", True, 1.5])
def test_a_busy_poll_that_cannot_be_is_refused(setting: Any) -> None:
    with pytest.raises(
        InvalidSettingError,
        match=r'busy_poll_us is .* it takes "auto" or a whole number of microseconds from 0',
    ):
        checked_plan(load_settings(None, {}, [("busy_poll_us", setting)]), flat({0, 1}))


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("0", 0), ("250", 250)])
def test_a_busy_poll_is_given_as_text_too(text: str, value: int | str) -> None:
    settings = load_settings(None, {"TAILRACE_BUSY_POLL_US": text}, [])
    checked_plan(settings, flat({0, 1}))
    assert settings.busy_poll_us == value


@pytest.mark.parametrize(
    ("status", "stopping", "served", "failures", "decision"),
    [
        (0, True, True, 0, Decision(Action.NOTHING)),
        (-9, True, True, 3, Decision(Action.NOTHING)),
        (0, False, True, 0, Decision(Action.RESTART)),
        (-9, False, True, 0, Decision(Action.RESTART)),
        (1, False, True, 1, Decision(Action.RESTART, 50)),
        (-11, False, True, 3, Decision(Action.RESTART, 200)),
        (1, False, True, 50, Decision(Action.RESTART, BACKOFF_MAX_MS)),
        (1, False, False, 8, Decision(Action.RESTART, BACKOFF_MAX_MS)),
        (1, False, False, 9, Decision(Action.HALT)),
        (-9, False, False, 9, Decision(Action.RESTART, BACKOFF_MAX_MS)),
        (ExitCode.ADDRESS_IN_USE, False, False, 0, Decision(Action.HALT)),
        (ExitCode.ADDRESS_IN_USE, False, True, 1, Decision(Action.RESTART, 50)),
        (ExitCode.DATA_UNUSABLE, False, True, 0, Decision(Action.HALT)),
        (ExitCode.CONFIG, False, True, 0, Decision(Action.HALT)),
    ],
)
def test_restart_policy(
    status: int, stopping: bool, served: bool, failures: int, decision: Decision
) -> None:
    assert decide(status, stopping=stopping, had_served=served, quick_failures=failures) == decision


def test_file_environment_and_flags_are_merged_the_later_wins(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text(
        'ring_bytes = 1048576\ncores = [0]\nlisten = ["tcp://127.0.0.1:1"]\n[flush]\nlinger_ms = '
        "3\nbatch_size = 7\n"
    )
    settings = load_settings(
        str(file), {"TAILRACE_FLUSH_LINGER_MS": "4", "OTHER": "x"}, [("flush.batch_size", "9")]
    )
    assert (
        settings.ring_bytes,
        settings.cores,
        settings.flush_linger_ms,
        settings.flush_batch_size,
    ) == (1 << 20, [0], 4, 9)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([("ring_byte", "1")], "did you mean ring_bytes"),
        ([("flush.linger", "1")], "did you mean flush.linger_ms"),
        ([("ring_bytes", "many")], "whole number"),
        ([("ring_bytes", "5")], "whole number from"),
        ([("listen", "http://x")], "listen has 'http://x'; write"),
        ([("listen", "tcp://x:\u00b2")], "listen has .*; write"),
        ([("listen", "")], "listen is empty: give at least one address"),
        ([("http.listen", "x:" + "7" * 5_000)], "http.listen is .*; write HOST:PORT"),
        ([("credit_bytes", str(1 << 20))], "at least half of lane_bytes"),
        ([("ring_bytes", str((1 << 20) + 1))], "multiple of 4096"),
        ([("data_dirs", "a,./a")], "different directories"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do(
    flags: list[tuple[str, Any]], sentence: str
) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        checked_plan(load_settings(None, {}, flags), flat({0, 1}))


@pytest.mark.parametrize(
    "text",
    [
        "tcp://127.0.0.1:1, tcp://127.0.0.1:2",
        '["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]',
        "[tcp://127.0.0.1:1, tcp://127.0.0.1:2]",
    ],
)
def test_a_list_is_given_with_commas_or_as_the_file_has_it(text: str) -> None:
    assert load_settings(None, {}, [("listen", text)]).listen == [
        "tcp://127.0.0.1:1",
        "tcp://127.0.0.1:2",
    ]


@pytest.mark.parametrize("text", ["", " ", "[]"])
def test_an_empty_text_is_an_empty_list(text: str) -> None:
    assert load_settings(None, {"TAILRACE_HTTP_HOSTS": text}, []).http_hosts == []


@pytest.mark.parametrize("name", ["data_dirs", "http.hosts", "ipc.group", "cores", "quotas"])
@pytest.mark.parametrize(("text", "sentence"), [("a\0b", "a NUL"), ("a\udcff", "not UTF-8")])
def test_text_that_is_no_path_and_fits_no_document_is_refused(
    name: str, text: str, sentence: str
) -> None:
    """Also at a reload, where any other error would end the supervisor."""
    with pytest.raises(InvalidSettingError, match=sentence):
        load_settings(None, {}, [(name, text)])


@pytest.mark.parametrize("group", ["9" * 5_000, "9" * 18])
def test_a_group_of_sockets_that_cannot_be_is_refused(group: str) -> None:
    with pytest.raises(InvalidSettingError, match="there is no such group"):
        checked_plan(Settings(ipc_group=group), flat({0, 1}))


@pytest.mark.parametrize(
    "wrong",
    ["a.example:7400", "https://a.example", "a.example/", "*", "*.example", "[::1]", "ü.example"],
)
def test_names_of_hosts_that_would_never_match_are_refused(wrong: str) -> None:
    with pytest.raises(InvalidSettingError, match=r"http\.hosts has .* write a name"):
        checked_plan(Settings(http_hosts=["a.example", wrong]), flat({0, 1}))
    checked_plan(Settings(http_hosts=["a.example", "A_b-1", "10.1.0.5"]), flat({0, 1}))


def test_a_misspelt_environment_variable_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="did you mean TAILRACE_RING_BYTES"):
        load_settings(None, {"TAILRACE_RING_BYTE": "1"}, [])


def test_every_setting_is_documented() -> None:
    assert all(found.doc.endswith(".") for found in definitions().values())
    assert all(setting.doc.endswith(".") for setting in topic_settings.TOPIC_SETTINGS.values())


@pytest.mark.parametrize(
    "name", ["a/b", "..", ".", "", "x" * 250, "x" * 300, "a b", "ä", "a\0b", None, 5]
)
def test_topic_names_that_could_leave_the_data_directory_are_refused(name: Any) -> None:
    with pytest.raises(InvalidTopicNameError):
        topic_config.check_topic_name(name)


def test_topic_names_that_are_allowed() -> None:
    for name in ("a", "A.b_c-9", "x" * 249, "..."):
        topic_config.check_topic_name(name)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"segment.byte": 1}, "did you mean segment.bytes"),
        ({"segment.bytes": "x"}, "whole number"),
        ({"compression.type": "gzip"}, "allowed are producer, none, lz4, zstd"),
        ({"durability": "replicated"}, "allowed are disk, memory"),
        ({"min.insync.replicas": 2}, "not supported by this version.* or set it to 1"),
        ({"partitions": 3}, r"--partitions`, `NewTopic\(partitions=\)`"),
        ({"schema": "f.json"}, r"--schema FILE`, `NewTopic\(schema=\)`"),
        ({"cleanup.policy": "compress"}, "allowed are delete, compact, compact,delete"),
        ({"min.cleanable.dirty.ratio": "1.5"}, "a number from 0 to 1, such as 0.5"),
        ({"min.cleanable.dirty.ratio": "nan"}, "a number from 0 to 1, such as 0.5"),
        ({"min.cleanable.dirty.ratio": True}, "a number from 0 to 1, such as 0.5"),
        ({"max.compaction.lag.ms": 5}, "from 100 to"),
        ({"key.column": 7}, "the name of a column"),
        ({"max.message.bytes": 8 << 20}, "for ring_bytes = "),
        ({"dead.letter.topic": "a/b"}, "dead.letter.topic: topic name 'a/b' is not allowed"),
        ({"dead.letter.topic": 7}, "dead.letter.topic is 7"),
        ({"group.share.delivery.count.limit": 0}, "from 1 to 10000"),
        ({"group.share.record.lock.duration.ms": "1ms"}, "from 100 to 3600000"),
        ({"group.share.partition.max.record.locks": 20_000}, "from 10 to 10000"),
    ],
)
def test_wrong_topic_settings_are_refused_with_what_to_do(
    given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        topic_config.complete(given, ring_bytes=64 << 20, lane_bytes=4 << 20)


def test_the_one_value_of_min_insync_replicas_that_holds_anyway_is_taken() -> None:
    """A program that creates topics for Kafka names it."""
    for one in (1, "1"):
        assert topic_config.parse_all({"min.insync.replicas": one, "segment.ms": "1h"}) == {
            "segment.ms": 3_600_000
        }
    for other in (2, "2", None, True, "all"):
        with pytest.raises(InvalidSettingError, match="no replicas yet"):
            topic_config.parse_all({"min.insync.replicas": other})


def test_the_memory_plan_has_a_lane_for_every_pair_that_talks() -> None:
    names = {plan.logical_name for plan in plan_regions(Settings(), 2, 2, 1)}
    assert names == {
        "control", "settings", "overrides", "table-0", "ring-0", "ring-1",
        "controller>flusher-0", "controller>worker-0",
        "controller>worker-1", "controller>front-0",
        "controller>front-1", "front-0>controller", "front-1>controller", "front-0>worker-0",
        "front-0>worker-1", "front-1>worker-0", "front-1>worker-1",
        "controller>scheduler-0", "scheduler-0>worker-0", "scheduler-0>worker-1",
        "scheduler-0>front-0", "scheduler-0>front-1", "front-0>scheduler-0",
        "front-1>scheduler-0",
    }  # fmt: skip
