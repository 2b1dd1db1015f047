"""A session ends when its connection is gone, and not when it only seemed so."""

from __future__ import annotations

from netfront.session.disconnect_detector import (
    AT_ONCE,
    PROBE_INTERVAL_NS,
    PROBES_MAX,
    DisconnectDetector,
)
from shm.runtime.timing_wheel import NEVER_NS


def test_who_cannot_be_reached_has_ended_and_who_can_is_asked_for_again() -> None:
    disconnects, alive = DisconnectDetector(), {b"lives", b"not forgotten yet"}
    disconnects.suspect([b"gone", b"lives", b"not forgotten yet"], 7)
    assert disconnects.probe_at_ns == 7
    assert disconnects.take(lambda identity: identity in alive, 7) == [b"gone"]
    assert disconnects.probe_at_ns == 7 + PROBE_INTERVAL_NS
    alive.remove(b"not forgotten yet")
    assert disconnects.take(lambda identity: identity in alive, 7 + PROBE_INTERVAL_NS) == [
        b"not forgotten yet"
    ]


def test_who_is_reached_for_long_lives_and_is_not_asked_for_any_more() -> None:
    disconnects = DisconnectDetector()
    disconnects.suspect([b"lives"], 0)
    asked: list[bytes] = []

    def is_reachable(identity: bytes) -> bool:
        asked.append(identity)
        return True

    now_ns = 0
    while disconnects.probe_at_ns < NEVER_NS:
        assert disconnects.take(is_reachable, now_ns) == []
        now_ns += PROBE_INTERVAL_NS
    assert len(asked) == PROBES_MAX + 1


def test_very_many_that_end_at_once_are_taken_a_piece_at_a_time_and_none_is_passed_over() -> None:
    disconnects = DisconnectDetector()
    everybody = [b"%d" % number for number in range(3 * AT_ONCE)]
    disconnects.suspect(everybody, 0)
    lives = set(everybody[:AT_ONCE])
    ended: list[bytes] = []
    for _ in range(3):
        assert disconnects.probe_at_ns == 0
        asked = disconnects.take(lambda identity: identity in lives, 0)
        assert len(asked) <= AT_ONCE
        ended += asked
    assert ended == everybody[AT_ONCE:]
