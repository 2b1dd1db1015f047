"""Time that an export waits for one look at its topic."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from tailrace.core.errors import NotReachableError, RequestTimeoutError, TailraceError
from tailrace.export import source
from tailrace.export.source import TopicSource


class Away:
    """An appliance that does not answer as it should; what it is asked with."""

    def __init__(self) -> None:
        self.error: type[TailraceError] = NotReachableError
        self.timeouts: list[tuple[int, int | None]] = []

    def admin(
        self,
        _bootstrap: str,
        *,
        client_id: str,
        request_timeout_ms: int,
        connect_timeout_ms: int | None,
    ) -> Any:
        self.timeouts.append((request_timeout_ms, connect_timeout_ms))
        return self

    def topic_info(self, _topics: list[str]) -> NoReturn:
        raise self.error("no")

    def close(self) -> None:
        pass


def looks(
    where: TopicSource, away: Away, errors: list[type[TailraceError]]
) -> list[tuple[int, int | None]]:
    away.timeouts = []
    for away.error in errors:
        with pytest.raises(away.error):
            where.survey(with_sealed=True)
    return away.timeouts


def test_looks_of_a_continuous_export_are_short_while_the_appliance_is_away_and_longer_while_it_is_slow(  # noqa: E501
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C and SIGTERM wait for the look that is under way: it was one of 30 seconds, at whose
    end systemd, or Docker, had killed it.
    """
    away = Away()
    monkeypatch.setattr(source, "Admin", away.admin)
    where = TopicSource("t", "tcp://127.0.0.1:9", 30_000, 3_000)
    assert looks(where, away, [NotReachableError] * 2) == [(30_000, 3_000)] * 2
    where.use_short_timeouts()
    assert looks(where, away, [NotReachableError] * 2) == [(5_000, 2_000)] * 2
    assert looks(where, away, [RequestTimeoutError] * 5) == [
        (ms, 2_000) for ms in (5_000, 10_000, 20_000, 30_000, 30_000)
    ]
    assert looks(where, away, [NotReachableError] * 2) == [(30_000, 2_000), (5_000, 2_000)]
