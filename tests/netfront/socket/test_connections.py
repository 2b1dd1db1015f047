"""What connections cost: who is closed for what, who is not, and when nothing more of a connection
will come.
"""

from __future__ import annotations

import pytest

from netfront.socket.connections import (
    MARK_BYTES,
    ROOM_NS,
    SESSION_SLACK_BYTES,
    STALLED_NS,
    SWEEP_INTERVAL_NS,
    SWEEP_PEERS,
    UNSHAKEN_NS,
    Connections,
    Limits,
)
from netfront.socket.flow_control import Credit
from netfront.socket.peer_connection import PeerConnection

KIB = 1 << 10
MIB = 1 << 20
LIMITS = Limits(
    connections_max=10,
    unshaken_peer_max=MIB,
    unshaken_max=2 * MIB,
    untaken_max=8 * MIB,
    unsent_max=4 * MIB,
    memory_growth_max=100 * MIB,
)


class FakeSockets:
    """The kernel's side."""

    def __init__(self) -> None:
        self.received: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.closed: list[int] = []
        self.held: list[int] = []
        self.memory = 50 * MIB

    def inode(self, fd: int) -> int:
        return fd

    def received_bytes(self, fd: int) -> int:
        return self.received.get(fd, 0)

    def waiting_bytes(self, fd: int) -> int:
        return self.waiting.get(fd, 0)

    def shrink_local_send_buffer(self, fd: int) -> bool:
        self.held.append(fd)
        return True

    def shut(self, fd: int, inode: int) -> bool:
        self.closed.append(fd)
        return fd == inode

    def private_bytes(self) -> int:
        return self.memory

    def trim_memory(self) -> None:
        pass


class FakeMark:
    def __init__(self) -> None:
        self.done = False


@pytest.fixture
def sockets() -> FakeSockets:
    return FakeSockets()


@pytest.fixture
def peers(sockets: FakeSockets) -> Connections:
    return Connections(sockets, LIMITS)


def everything_is_read() -> bool:
    return True


def not_everything() -> bool:
    return False


def is_connected(identity: bytes) -> bool:
    return identity != b"gone"


def connect(
    peers: Connections, fd: int, now_ns: int = 0, *, shaken: bool = True, is_counted: bool = True
) -> PeerConnection:
    peers.accepted(fd, is_counted, now_ns)
    peer = peers.identify(b"%d" % fd, fd)
    assert peer is not None
    if shaken:
        peers.shaken(b"%d" % fd, Credit())
    return peer


def test_what_came_out_as_whole_messages_costs_nothing(
    peers: Connections, sockets: FakeSockets
) -> None:
    peer = connect(peers, 1)
    for turn in range(100):
        sockets.received[1] = peer.taken = turn * 10 * MIB
        peers.sweep(turn * SWEEP_INTERVAL_NS, everything_is_read, is_connected)
    assert not sockets.closed


def test_an_unfinished_message_is_bounded_by_the_handshake_and_the_credit(
    peers: Connections, sockets: FakeSockets
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
    peers.sweep(0, everything_is_read, is_connected)
    assert not sockets.closed
    sockets.received = {fd: count + 1 for fd, count in sockets.received.items()}
    peers.sweep(0, everything_is_read, is_connected)
    assert sockets.closed == [1, 2, 3]
    assert peers.closed_count == 3
    peers.sweep(SWEEP_INTERVAL_NS, everything_is_read, is_connected)
    assert peers.closed_count == 3, "once"
    assert client.is_closing


def test_what_the_front_has_not_come_to_is_not_its_senders_fault(
    peers: Connections, sockets: FakeSockets
) -> None:
    connect(peers, 1)
    sockets.received[1] = 7 * MIB
    peers.sweep(0, not_everything, is_connected)
    assert not sockets.closed


def test_what_libzmq_has_not_read_yet_costs_the_front_nothing(
    peers: Connections, sockets: FakeSockets
) -> None:
    """Its thread may be starved of a core while a client sends whole requests."""
    connect(peers, 1)
    sockets.received[1] = 7 * MIB
    sockets.waiting[1] = 6 * MIB
    peers.sweep(0, everything_is_read, is_connected)
    assert not sockets.closed
    sockets.waiting[1] = 0
    peers.sweep(SWEEP_INTERVAL_NS, everything_is_read, is_connected)
    assert sockets.closed == [1]


def test_whether_everything_was_read_is_asked_after_the_count(
    peers: Connections, sockets: FakeSockets
) -> None:
    """What is counted here is read between the two: were it asked before, a client that sent whole
    requests would be closed.
    """
    peer = connect(peers, 1)
    sockets.received[1] = 7 * MIB

    def counted() -> bool:
        return peer.untaken == 0

    peers.sweep(0, counted, is_connected)
    assert not sockets.closed


def test_all_together_are_bounded_and_the_largest_goes_first(
    peers: Connections, sockets: FakeSockets
) -> None:
    for fd in range(1, 6):
        peer = connect(peers, fd)
        assert peer.credit is not None
        peer.credit.granted = 5 * MIB
        sockets.received[fd] = MIB + fd * 400 * KIB
    peers.sweep(0, not_everything, is_connected)
    assert sockets.closed == [5]
    for fd in range(1, 6):
        peers.disconnected(fd, 0, 0)
    assert peers.untaken_total == 0


def test_without_a_handshake_all_together_have_little(
    peers: Connections, sockets: FakeSockets
) -> None:
    for fd in range(1, 6):
        connect(peers, fd, shaken=False)
        sockets.received[fd] = 500 * KIB + fd
    peers.sweep(0, everything_is_read, is_connected)
    assert sockets.closed == [5]


def test_an_unfinished_message_without_a_handshake_has_some_seconds(
    peers: Connections, sockets: FakeSockets
) -> None:
    connect(peers, 1, shaken=False)
    connect(peers, 2, shaken=False)
    sockets.received = {1: 8 * KIB, 2: 300}
    peers.sweep(UNSHAKEN_NS - 1, everything_is_read, is_connected)
    assert not sockets.closed
    peers.sweep(UNSHAKEN_NS, everything_is_read, is_connected)
    assert sockets.closed == [1], "who has sent nothing costs nothing"


def test_with_all_connections_taken_the_oldest_without_a_session_makes_room(
    peers: Connections, sockets: FakeSockets
) -> None:
    for fd in range(1, 11):
        connect(peers, fd, shaken=fd not in (4, 7))
    connect(peers, 11, ROOM_NS, shaken=False)
    assert sockets.closed == [4]
    peers.disconnected(4, ROOM_NS, 0)
    connect(peers, 12, ROOM_NS, shaken=False)
    assert sockets.closed == [4, 7]
    peers.disconnected(7, ROOM_NS, 0)
    peers.accepted(13, True, ROOM_NS)
    assert sockets.closed == [4, 7, 13], "others have not had the time yet: this one"


def test_who_takes_none_of_its_answers_is_closed_and_who_takes_them_slowly_is_not(
    peers: Connections, sockets: FakeSockets
) -> None:
    marks = [FakeMark() for _ in range(3)]
    dead, slow = connect(peers, 1), connect(peers, 2)
    for peer, mark in ((dead, marks[0]), (slow, marks[1]), (slow, marks[2])):
        assert peers.needs_mark(peer, MARK_BYTES)
        peers.mark(peer, mark, None, 0)
    assert peers.unsent_total == 3 * MARK_BYTES
    marks[1].done = True
    peers.settle(slow, STALLED_NS - 1)
    peers.sweep(STALLED_NS, everything_is_read, is_connected)
    assert sockets.closed == [1]
    assert (slow.unsent, peers.unsent_total) == (MARK_BYTES, 2 * MARK_BYTES)
    marks[0].done = marks[2].done = True
    peers.settle_some(10, STALLED_NS)
    assert peers.unsent_total == 0


def test_buffers_come_back_in_any_order_over_connections(peers: Connections) -> None:
    frozen, reader = connect(peers, 1), connect(peers, 2)
    first, second = FakeMark(), FakeMark()
    for peer, mark in ((frozen, first), (reader, second)):
        peers.needs_mark(peer, MIB)
        peers.mark(peer, mark, bytearray(peer.fd), 0)
    second.done = True
    assert peers.settle_some(4, 0) == [bytearray(2)]
    first.done = True
    assert peers.settle_some(4, 0) == [bytearray(1)]


def test_when_answers_fill_what_there_is_the_largest_that_stands_still_is_closed(
    peers: Connections, sockets: FakeSockets
) -> None:
    for fd in (1, 2, 3):
        peer = connect(peers, fd)
        peers.needs_mark(peer, fd * MIB)
        peers.mark(peer, FakeMark(), None, 0 if fd < 3 else ROOM_NS)
    peers.sweep(ROOM_NS, everything_is_read, is_connected)
    assert sockets.closed == [2], "the third one has begun a moment ago"


def test_memory_that_is_short_closes_who_is_in_the_middle_of_something(
    peers: Connections, sockets: FakeSockets
) -> None:
    idle, busy, endless = connect(peers, 1), connect(peers, 2), connect(peers, 3)
    sockets.received = {1: 200, 2: 900 * KIB, 3: 100 * KIB}
    peers.sweep(0, everything_is_read, is_connected)
    sockets.memory += LIMITS.memory_growth_max + 1
    busy.taken = 100 * KIB
    peers.sweep(2 * SWEEP_INTERVAL_NS, everything_is_read, is_connected)
    assert sockets.closed == [3]
    assert not idle.is_closing
    assert endless.is_closing


def test_memory_that_is_short_closes_those_without_a_count_when_nobody_else_is_to_blame(
    peers: Connections, sockets: FakeSockets
) -> None:
    connect(peers, 1)
    connect(peers, 2, is_counted=False)
    connect(peers, 3, is_counted=False, shaken=False)
    sockets.received = {1: 200, 2: -1, 3: -1}
    sockets.memory += LIMITS.memory_growth_max + 1
    peers.sweep(2 * SWEEP_INTERVAL_NS, everything_is_read, is_connected)
    assert sockets.closed == [3]
    peers.disconnected(3, 0, 0)
    peers.sweep(3 * ROOM_NS, everything_is_read, is_connected)
    assert sockets.closed == [3, 2]


def test_a_connection_has_ended_when_what_it_had_sent_was_read(peers: Connections) -> None:
    connect(peers, 1)
    peers.disconnected(1, 0, 5)
    assert peers.drain_ended(SWEEP_INTERVAL_NS, 5) == [], "the socket has not been empty since"
    assert peers.drain_ended(0, 6) == [], "libzmq may still hand something over"
    assert peers.drain_ended(SWEEP_INTERVAL_NS, 6) == [b"1"]
    assert not peers.has_ended


def test_a_descriptor_that_means_another_connection_ends_the_one_before(peers: Connections) -> None:
    connect(peers, 1)
    assert peers.identify(b"later", 1) is peers.by_identity[b"later"]
    assert peers.drain_ended(0, 0) == [b"1"]


def test_what_a_connection_sent_before_it_ended_is_not_taken_for_its_successors(
    peers: Connections,
) -> None:
    """libzmq takes messages from connections in turn: the first of one that has ended may come
    behind the first of the next one with its descriptor.
    """
    peers.accepted(5, True, 0)
    peers.disconnected(5, 0, 0)
    lives = connect(peers, 5)
    assert peers.identify(b"ended", 5) not in (None, lives)
    assert peers.drain_ended(SWEEP_INTERVAL_NS, 1) == [b"ended"]
    assert peers.by_identity == {b"5": lives}


def test_who_was_displaced_though_it_lives_is_put_back_by_its_next_message(
    peers: Connections,
) -> None:
    lives = connect(peers, 5)
    credit = lives.credit
    assert peers.identify(b"of one that is forgotten", 5) is lives
    assert lives.credit is None
    assert peers.drain_ended(0, 0) == [b"5"]
    assert peers.identify(b"5", 5) is lives
    assert lives.credit is credit
    assert peers.drain_ended(0, 0) == [b"of one that is forgotten"]


def test_without_descriptors_nobody_is_told_that_connections_max_is_too_small(
    peers: Connections, sockets: FakeSockets, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails is told where it fails (`accept_failed`); connections that come and go meanwhile
    are no news, by the hundred.
    """
    for fd in range(4):
        connect(peers, fd)
    peers.make_room(2)
    for fd in range(50, 80):
        peers.accepted(fd, True, 0)
        assert sockets.closed.pop() == fd
        peers.disconnected(fd, 1, 1)
    assert not caplog.records
    peers.on_room_available()
    for fd in range(50, 58):
        peers.accepted(fd, True, 0)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["connections_full"]


@pytest.mark.parametrize("sender", [b"gone", b"connected"])
def test_who_has_the_descriptor_of_an_ended_connection_is_closed_only_for_its_own_messages(
    peers: Connections, sockets: FakeSockets, sender: bytes
) -> None:
    """What a connection that has ended sent before it is read when its successor has sent nothing
    yet, and is taken for its successor's. libzmq tells which of them it was.
    """
    peers.accepted(5, True, 0)
    peers.disconnected(5, 1, 1)
    peers.accepted(5, True, 2)
    successor = peers.identify(sender, 5)
    assert successor is not None
    assert not peers.is_sender(successor)
    peers.condemn(sender, "nonsense")
    for turn in range(1, 3):
        peers.sweep(turn * SWEEP_INTERVAL_NS, everything_is_read, is_connected)
        assert not peers.is_settled, "sweeps go on until it is known"
    peers.drain_ended(2 * SWEEP_INTERVAL_NS, 2)
    assert peers.is_sender(successor)
    for turn in range(3, 5):
        peers.sweep(turn * SWEEP_INTERVAL_NS, everything_is_read, is_connected)
        assert sockets.closed == [], "what it was sent has no time to leave"
    peers.sweep(5 * SWEEP_INTERVAL_NS, everything_is_read, is_connected)
    assert sockets.closed == ([] if sender == b"gone" else [5])
    assert peers.is_settled


def test_a_sender_that_was_taken_for_an_ended_connection_is_closed_when_that_is_read(
    peers: Connections, sockets: FakeSockets
) -> None:
    peers.accepted(5, True, 0)
    assert peers.identify(b"first", 5) is not None
    peers.disconnected(5, 1, 1)
    peers.accepted(5, True, 2)
    peers.disconnected(5, 3, 1)
    peers.accepted(5, True, 4)
    assert peers.identify(b"innocent", 5) is not None
    taken_for = peers.identify(b"guilty", 5)
    assert taken_for is not None
    assert not peers.is_open(taken_for)
    peers.condemn(b"guilty", "nonsense")
    assert b"guilty" in peers.drain_ended(2 * SWEEP_INTERVAL_NS, 2)
    for turn in range(3, 7):
        peers.sweep(turn * SWEEP_INTERVAL_NS, everything_is_read, is_connected)
    assert sockets.closed == [], "the open connection is another's"
    assert peers.is_settled


def test_many_connections_are_looked_at_in_turn(sockets: FakeSockets) -> None:
    peers = Connections(sockets, LIMITS._replace(connections_max=10_000))
    for fd in range(3 * SWEEP_PEERS):
        connect(peers, fd)
        sockets.received[fd] = 4 * MIB if fd == 3 * SWEEP_PEERS - 1 else 0
    for turn in range(3):
        assert not sockets.closed
        peers.sweep(turn * SWEEP_INTERVAL_NS, everything_is_read, is_connected)
    assert sockets.closed == [3 * SWEEP_PEERS - 1]


def test_what_the_kernel_holds_is_said_of_each_tcp_connection_and_no_other(
    peers: Connections, sockets: FakeSockets
) -> None:
    peers.accepted(7, True, 0)
    peers.accepted(8, False, 0)
    peers.accepted(9, True, 0)
    assert sockets.held == [7, 9]


def test_a_changed_number_of_connections_acts_on_the_next_one(
    peers: Connections, sockets: FakeSockets
) -> None:
    for fd in range(1, 6):
        connect(peers, fd)
    peers.set_limits(LIMITS._replace(connections_max=5))
    peers.accepted(6, True, 0)
    assert sockets.closed == [6]
    peers.disconnected(6, 0, 0)
    peers.set_limits(LIMITS._replace(connections_max=6))
    peers.accepted(6, True, 0)
    assert sockets.closed == [6]
    assert len(peers) == 6


def test_a_connection_that_came_and_went_at_once_costs_nothing_and_its_messages_are_its_own(
    peers: Connections, sockets: FakeSockets
) -> None:
    peers.came_and_went(5, 0, 0, is_counted=True)
    assert (len(peers), sockets.held) == (0, [])
    gone = peers.identify(b"gone", 5)
    assert gone is not None
    peers.accepted(5, True, 0)  # the kernel has given the descriptor to another one
    assert not peers.is_open(gone)
    peers.close(gone, "too much")
    assert not sockets.closed
    lives = peers.identify(b"lives", 5)
    assert lives is not None
    assert peers.is_open(lives)
    assert peers.drain_ended(SWEEP_INTERVAL_NS, 1) == [b"gone"]
