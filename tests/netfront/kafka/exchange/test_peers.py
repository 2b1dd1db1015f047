"""Peers: tasks that wait for credit get it in their order, each of them."""

from __future__ import annotations

from netfront.kafka.exchange.peers import Peer, PeerTransport
from netfront.kafka.exchange.waiter import Steps, Task
from netfront.socket.flow_control import Credit, CreditLedger
from tailrace.protocol import credit_messages
from tailrace.protocol.frame import (
    PUSH_CORRELATION_ID,
    Api,
    decode_request_header,
    encode_response,
)


class FakeFront:
    """Answers CREDIT as a front does, with an account of one peer."""

    def __init__(self, transport: PeerTransport) -> None:
        self.transport = transport
        self.ledger = CreditLedger(100, 100, 100)
        self.taken = self.ledger.open()
        self.ledger.ask(self.taken, 100)  # another connection holds all of it
        self.credit = self.ledger.open()
        self.asks: list[int] = []

    def push(self, accounts: list[Credit]) -> None:
        if self.credit in accounts:
            self.transport.try_send(
                self.transport_identity,
                encode_response(Api.CREDIT, 1, PUSH_CORRELATION_ID, 0, self.credit.limit, 1),
            )

    def step(self) -> None:
        while (request := self.transport.try_receive()) is not None:
            self.transport_identity = request[0]
            header = decode_request_header(request[1])
            if header.api == Api.CREDIT:
                asked = credit_messages.decode_credit(request[2])
                self.asks.append(asked)
                self.push(self.ledger.ask(self.credit, asked))
            elif header.api == Api.PRODUCE:
                size = sum(map(len, request[3:]))
                assert self.ledger.receive(self.credit, size)
                self.push(self.ledger.release(self.credit, size))

    def give_back(self) -> None:
        self.push(self.ledger.close(self.taken))


def sender(peer: Peer, name: str, size: int, sent: list[str]) -> Steps:
    while not peer.has_credit(size):
        yield peer.ask_for_credit(size)
    peer.send_unanswered(Api.PRODUCE, [b"", bytes(size)])
    sent.append(name)


def raise_it(error: Exception) -> None:
    raise error


def begin(peer: Peer, sizes: dict[str, int]) -> list[str]:
    sent: list[str] = []
    for name, size in sizes.items():
        Task(sender(peer, name, size, sent), lambda _: None, raise_it).resume()
    return sent


def test_all_tasks_that_wait_for_credit_of_one_peer_get_it() -> None:
    transport = PeerTransport()
    front, peer = FakeFront(transport), transport.open("test")
    sent = begin(peer, {"first": 90, "second": 10, "third": 80})
    front.step()
    assert not sent
    front.give_back()
    front.step()
    assert sent == ["first", "second", "third"]
    assert front.asks[0] == 90


def test_a_session_that_ends_wakes_all_that_wait_for_credit() -> None:
    transport = PeerTransport()
    front, peer = FakeFront(transport), transport.open("test")
    waiters = [peer.ask_for_credit(size) for size in (90, 10)]
    front.step()
    peer.drop()
    assert [waiter.is_done for waiter in waiters] == [True, True]
