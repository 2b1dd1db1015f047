"""Costs of connections: what closes one, and what does not."""

from __future__ import annotations

from netfront.socket.peers.connection_costs import (
    SESSION_SLACK_BYTES,
    STALLED_NS,
    SWEEP_PEERS,
    UNSHAKEN_NS,
)
from netfront.socket.peers.connections import ROOM_NS, SWEEP_INTERVAL_NS
from netfront.socket.peers.unsent_responses import MARK_BYTES
from tests.kit.stepped.front_peers import (
    KIB,
    LIMITS,
    MIB,
    FakeMark,
    FakeSockets,
    FrontPeers,
    connect,
)


def not_everything() -> bool:
    return False


def test_what_came_out_as_whole_messages_costs_nothing(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    peer = connect(peers, 1)
    for turn in range(100):
        sockets.received[1] = peer.taken = turn * 10 * MIB
        peers.sweep(turn * SWEEP_INTERVAL_NS)
    assert not sockets.closed


def test_an_unfinished_message_is_bounded_by_the_handshake_and_the_credit(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    stranger, client, producer = (
        connect(peers, 1, shaken=False),
        connect(peers, 2),
        connect(peers, 3),
    )
    assert producer.credit is not None
    assert stranger.credit is None
    producer.credit.granted = 2 * MIB
    sockets.received = {1: MIB, 2: SESSION_SLACK_BYTES, 3: SESSION_SLACK_BYTES + 2 * MIB}
    peers.sweep(0)
    assert not sockets.closed
    sockets.received = {fd: count + 1 for fd, count in sockets.received.items()}
    peers.sweep(0)
    assert sockets.closed == [1, 2, 3]
    assert peers.closed_count == 3
    peers.sweep(SWEEP_INTERVAL_NS)
    assert peers.closed_count == 3, "once"
    assert client.is_closing


def test_what_the_front_has_not_come_to_is_not_its_senders_fault(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    connect(peers, 1)
    sockets.received[1] = 7 * MIB
    peers.sweep(0, not_everything)
    assert not sockets.closed


def test_what_libzmq_has_not_read_yet_costs_the_front_nothing(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    """Its thread may be starved of a core while a client sends whole requests."""
    connect(peers, 1)
    sockets.received[1] = 7 * MIB
    sockets.waiting[1] = 6 * MIB
    peers.sweep(0)
    assert not sockets.closed
    sockets.waiting[1] = 0
    peers.sweep(SWEEP_INTERVAL_NS)
    assert sockets.closed == [1]


def test_whether_everything_was_read_is_asked_after_the_count(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    """The counted bytes are read between the two: were it asked before, a client that sent whole
    requests would be closed.
    """
    peer = connect(peers, 1)
    sockets.received[1] = 7 * MIB

    def counted() -> bool:
        return peer.untaken == 0

    peers.sweep(0, counted)
    assert not sockets.closed


def test_all_together_are_bounded_and_the_largest_goes_first(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    for fd in range(1, 6):
        peer = connect(peers, fd)
        assert peer.credit is not None
        peer.credit.granted = 5 * MIB
        sockets.received[fd] = MIB + fd * 400 * KIB
    peers.sweep(0, not_everything)
    assert sockets.closed == [5]
    for fd in range(1, 6):
        peers.disconnected(fd, 0, 0)
    assert peers.untaken_total == 0


def test_without_a_handshake_all_together_have_little(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    for fd in range(1, 6):
        connect(peers, fd, shaken=False)
        sockets.received[fd] = 500 * KIB + fd
    peers.sweep(0)
    assert sockets.closed == [5]


def test_an_unfinished_message_without_a_handshake_has_some_seconds(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    connect(peers, 1, shaken=False)
    connect(peers, 2, shaken=False)
    sockets.received = {1: 8 * KIB, 2: 300}
    peers.sweep(UNSHAKEN_NS - 1)
    assert not sockets.closed
    peers.sweep(UNSHAKEN_NS)
    assert sockets.closed == [1], "who has sent nothing costs nothing"


def test_who_takes_none_of_its_answers_is_closed_and_who_takes_them_slowly_is_not(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    marks = [FakeMark() for _ in range(3)]
    dead, slow = connect(peers, 1), connect(peers, 2)
    for peer, mark in ((dead, marks[0]), (slow, marks[1]), (slow, marks[2])):
        assert peers.unsent.needs_mark(peer, MARK_BYTES)
        peers.unsent.mark(peer, mark, None, 0)
    assert peers.unsent.total == 3 * MARK_BYTES
    marks[1].done = True
    peers.unsent.settle(slow, STALLED_NS - 1)
    peers.sweep(STALLED_NS)
    assert sockets.closed == [1]
    assert (slow.unsent, peers.unsent.total) == (MARK_BYTES, 2 * MARK_BYTES)
    marks[0].done = marks[2].done = True
    peers.unsent.settle_some(10, STALLED_NS)
    assert peers.unsent.total == 0


def test_when_answers_fill_what_there_is_the_largest_that_stands_still_is_closed(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    for fd in (1, 2, 3):
        peer = connect(peers, fd)
        peers.unsent.needs_mark(peer, fd * MIB)
        peers.unsent.mark(peer, FakeMark(), None, 0 if fd < 3 else ROOM_NS)
    peers.sweep(ROOM_NS)
    assert sockets.closed == [2], "the third one has begun a moment ago"


def test_memory_that_is_short_closes_who_is_in_the_middle_of_something(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    idle, busy, endless = connect(peers, 1), connect(peers, 2), connect(peers, 3)
    sockets.received = {1: 200, 2: 900 * KIB, 3: 100 * KIB}
    peers.sweep(0)
    sockets.memory += LIMITS.memory_growth_max + 1
    busy.taken = 100 * KIB
    peers.sweep(2 * SWEEP_INTERVAL_NS)
    assert sockets.closed == [3]
    assert not idle.is_closing
    assert endless.is_closing


def test_memory_that_is_short_closes_those_without_a_count_when_nobody_else_is_to_blame(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    connect(peers, 1)
    connect(peers, 2, is_counted=False)
    connect(peers, 3, is_counted=False, shaken=False)
    sockets.received = {1: 200, 2: -1, 3: -1}
    sockets.memory += LIMITS.memory_growth_max + 1
    peers.sweep(2 * SWEEP_INTERVAL_NS)
    assert sockets.closed == [3]
    peers.disconnected(3, 0, 0)
    peers.sweep(3 * ROOM_NS)
    assert sockets.closed == [3, 2]


def test_many_connections_are_looked_at_in_turn(sockets: FakeSockets) -> None:
    peers = FrontPeers(sockets, LIMITS._replace(connections_max=10_000))
    for fd in range(3 * SWEEP_PEERS):
        connect(peers, fd)
        sockets.received[fd] = 4 * MIB if fd == 3 * SWEEP_PEERS - 1 else 0
    for turn in range(3):
        assert not sockets.closed
        peers.sweep(turn * SWEEP_INTERVAL_NS)
    assert sockets.closed == [3 * SWEEP_PEERS - 1]
