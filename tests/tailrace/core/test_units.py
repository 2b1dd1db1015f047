"""Units as people write them, and what is no number of them."""

from __future__ import annotations

import pytest

from tailrace.core.errors import InvalidSettingError
from tailrace.core.schedule.delays import parse_levels
from tailrace.core.units import (
    bytes_of,
    digits_in,
    duration_ms,
    examples,
    shown_duration,
    whole_number,
)


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("retention.ms", "1d", 86_400_000), ("retention.ms", "1h30m", 5_400_000),
        ("linger_ms", "500ms", 500), ("segment.ms", "1.5s", 1_500),
        ("retention.ms", "2w 3 d", 17 * 86_400_000), ("retention.ms", "-1", -1),
        ("retention.ms", 7, 7), ("segment.bytes", "64MiB", 64 << 20),
        ("segment.bytes", "1 GB", 10**9), ("batch_size", "256kib", 256 << 10),
        ("buffer_memory", "1.5KiB", 1536), ("segment.bytes", "100B", 100),
        ("fronts", "2", 2), (" x.ms", " 5 ", 5),
    ],
)  # fmt: skip
def test_what_is_a_number(name: str, given: object, meant: int) -> None:
    assert whole_number(name, given) == meant


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("retention.ms", "1y"), ("retention.ms", ""), ("retention.ms", "d"),
        ("retention.ms", "1d-1h"), ("retention.ms", "0.5ms"), ("retention.ms", "64MiB"),
        ("segment.bytes", "64"[:0]), ("segment.bytes", "1d"), ("segment.bytes", "1iB"),
        ("segment.bytes", "0.3KB1"), ("segment.bytes", "9e9MiB"),
        ("fronts", "1d"), ("fronts", True), ("fronts", 1.0), ("fronts", None),
        ("retention.ms", "1" * 61), ("retention.ms", "\u0661d"),
        ("retention.ms", "9" * 20 + "d"),
    ],
)  # fmt: skip
def test_what_is_none(name: str, given: object) -> None:
    assert whole_number(name, given) is None


def test_a_refusal_shows_what_may_be_written() -> None:
    assert "7d" in examples("retention.ms")
    assert "MiB" in examples("ring_bytes")
    assert not examples("fronts")


def test_levels_of_delays_are_written_like_other_durations() -> None:
    assert parse_levels("500ms 5s, 1h30m 1w") == (
        500_000,
        5_000_000,
        5_400_000_000,
        604_800_000_000,
    )
    assert parse_levels("") == ()
    for refused in ("0s", "5", "1y", "1m 1s", "9" * 400 + "d", "21y", "1s 1s"):
        with pytest.raises(InvalidSettingError, match=r"delay\.levels"):
            parse_levels(refused)


def test_a_duration_of_any_length_is_a_number_or_none() -> None:
    assert duration_ms("1.5 s") == 1_500
    assert duration_ms("") is None
    assert duration_ms("1" * 1_000_000 + "d") is None


@pytest.mark.parametrize(
    ("us", "shown"),
    [
        (0, "0s"),
        (50_000, "50ms"),
        (10_000_000, "10s"),
        (5_400_000_000, "1h30m"),
        (86_461_500_000, "1d1m1s500ms"),
        (10_250, "10.250ms"),
    ],
)
def test_durations_are_shown_as_they_are_written(us: int, shown: str) -> None:
    assert shown_duration(us) == shown
    assert shown == "0s" or us % 1000 or duration_ms(shown) == us // 1000


def test_digits_that_int_would_refuse_are_no_number() -> None:
    assert (digits_in("0"), digits_in("0042"), digits_in("9" * 18)) == (0, 42, 10**18 - 1)
    for text in ("", "-1", "+1", " 1", "1.0", "\u00b2", "\u0661", "9" * 19, "9" * 5_000):
        assert digits_in(text) is None
        assert bytes_of(text) is None, text
