"""The fate of an unexpected exception, and of text that a client put into a log line."""

from __future__ import annotations

import logging

import pytest

from shm.memory.layout import ControlLayout, ProcessWord, RegionKind, Role
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.logs.format import BURST_LINES, OneLineFormatter, RateLimit
from shm.tables.control import Control
from tests.kit.memory import simulated


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("tailrace", level, "file.py", 1, message, None, None)


def test_a_failure_is_counted_said_with_its_place_and_has_an_id_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slot = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0)).process(Role.WORKER, 1)
    slot.store(ProcessWord.GENERATION, 3)
    error_handler = CountedErrorHandler(slot)
    sentences = []
    for _ in range(2):
        try:
            raise KeyError(7)
        except KeyError as error:
            sentences.append(error_handler.on_error("api=6", error))
    assert slot.load(ProcessWord.INTERNAL_ERRORS) == 2
    assert "id=worker-1.3.1" in sentences[0]
    assert "id=worker-1.3.2" in sentences[1]
    assert "id=worker-1.3.1 api=6 reason='KeyError: 7' at=test_error_handler.py:" in caplog.text


def test_text_of_a_client_cannot_begin_a_log_line() -> None:
    text = OneLineFormatter("%(message)s").format(record("client=a\nERROR forged\r\x1b[31m\u2028x"))
    assert text == "client=a\\nERROR forged\\r\\x1b[31m\\u2028x"


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_flood_of_refusals_is_limited_said_and_hides_nothing_else(level: int) -> None:
    now_s = 0.0
    limit = RateLimit(lambda: now_s)
    fifth = BURST_LINES // 5
    assert sum(limit.filter(record("refused a=%d", level)) for _ in range(10_000)) == fifth
    other = record("disk", level)
    assert limit.filter(other)
    assert other.getMessage() == f"disk lines_dropped_before_this={10_000 - fifth}"
    now_s = 1.0
    assert sum(limit.filter(record("refused b=%d", level)) for _ in range(10_000)) == fifth // 10


def test_a_flood_of_many_warnings_is_limited_and_hides_no_error() -> None:
    limit = RateLimit(lambda: 0.0)
    warnings = [record(f"refused-{number % 50}", logging.WARNING) for number in range(10_000)]
    assert sum(map(limit.filter, warnings)) == BURST_LINES
    assert limit.filter(record("disk", logging.ERROR))
