"""The log has a host's first failed logins of a minute, and the number of the others."""

from __future__ import annotations

from netfront.kafka.login.failure_limit import HOSTS_MAX, LINES_MAX, WINDOW_NS, FailureLimit


def test_a_host_has_its_lines_of_a_window_and_the_next_line_counts_the_others() -> None:
    limit = FailureLimit()
    found = [limit.note("10.0.0.9", 5) for _ in range(LINES_MAX + 7)]
    assert found == [0] * LINES_MAX + [None] * 7
    assert limit.note("10.0.0.8", 5) == 0, "another host"
    assert limit.note("10.0.0.9", 4 + WINDOW_NS) is None
    assert limit.note("10.0.0.9", 5 + WINDOW_NS) == 8
    assert limit.note("10.0.0.9", 5 + WINDOW_NS) == 0


def test_many_hosts_take_no_more_room_than_the_bound() -> None:
    limit = FailureLimit()
    for number in range(3 * HOSTS_MAX):
        limit.note(f"host {number}", number)
    assert limit.note("host 0", 3 * HOSTS_MAX) == 0
    assert len(limit._hosts) == HOSTS_MAX
