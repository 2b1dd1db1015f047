"""Changed settings reach an agent between two steps, with the log's level and the polling."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from shm.memory.layout import ControlLayout, ProcessWord, RegionKind, Role, SettingsLayout
from shm.runtime.agent_runner import ProcessContext, ProcessSpec, run
from shm.tables.settings_block import SettingsBlock
from tests.kit.memory import region
from tests.kit.stepped.fronts import SilentBell

TEXT_BYTES = 4096


class Idle:
    """An agent without work that stops after some steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.is_stopping = False

    def step(self, now_ns: int) -> int:
        self.steps += 1
        return 1

    def has_more(self) -> bool:
        return False

    def next_deadline_ns(self) -> int | None:
        return None

    def begin_stop(self) -> None:
        self.is_stopping = True

    def is_finished(self) -> bool:
        return True


class Context(ProcessContext):
    """A worker over memory of the test."""

    def bell(self, role: Role, index: int) -> SilentBell:
        return SilentBell()


@pytest.fixture
def context() -> Iterator[Context]:
    size = SettingsLayout(TEXT_BYTES).size
    with (
        region(RegionKind.CONTROL, ControlLayout().size, 1) as control,
        region(RegionKind.SETTINGS, size, TEXT_BYTES) as block,
    ):
        spec = ProcessSpec(
            role=Role.WORKER, index=2, generation=1, instance=bytes(16).hex(), parent_pid=0,
            data_dirs=[], regions={"control": control.name, "settings": block.name},
            doorbells={}, settings={"busy_poll_us": 0, "log_level": "info"},
        )  # fmt: skip
        level = logging.getLogger().level
        yield Context(spec)
        logging.getLogger().setLevel(level)


def test_a_change_is_applied_before_the_next_step_and_shown(context: Context) -> None:
    block = SettingsBlock(context.attach("settings", RegionKind.SETTINGS))
    agent, got = Idle(), list[tuple[int, dict[str, Any]]]()
    waits: list[int] = []

    def wait(_timeout_ms: float | None, busy_ns: int) -> None:
        waits.append(busy_ns)
        if len(waits) == 1:
            block.publish({"settings": {"busy_poll_us": 70, "log_level": "error", "n": 1}})
        elif len(waits) == 3:
            context.slot.store(ProcessWord.STOP, 1)

    class Ending(Exception):
        pass

    def step(now_ns: int) -> int:
        agent.steps += 1
        if agent.is_stopping:
            raise Ending
        return 1

    agent.step = step  # type: ignore[method-assign]
    with pytest.raises(Ending):
        run(agent, context, wait, lambda settings: got.append((agent.steps, settings)))
    assert [(steps, settings["n"]) for steps, settings in got] == [(1, 1)]
    assert waits == [0, 70_000, 70_000], "it polls from the change on"
    assert logging.getLogger().level == logging.ERROR
    assert block.applied(Role.WORKER, 2).load() == 1
