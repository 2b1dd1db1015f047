"""The gate of an asyncio producer's sends, with many callers and little room."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.aio.send_gate import WOKEN_MIN, SendGate


class Counting(SendGate):
    """Counts the callers that were woken."""

    __slots__ = ("woken_count",)

    def __init__(self) -> None:
        super().__init__()
        self.woken_count = 0

    def _wake(self) -> None:
        before = len(self._woken)
        super()._wake()
        self.woken_count += len(self._woken) - before


@pytest.mark.parametrize("room", [1, 10, 3_000])
def test_callers_go_in_their_order_and_few_are_woken_for_nothing(room: int) -> None:
    count, sent = 3_000, []

    async def main() -> Counting:
        gate = Counting()

        async def send(number: int) -> None:
            await gate.acquire()
            if number % room == 0:
                await asyncio.sleep(0)  # waits for room, and holds the gate
            sent.append(number)
            gate.release()

        await asyncio.gather(*(send(number) for number in range(count)))
        return gate

    gate = asyncio.run(main())
    assert sent == list(range(count))
    assert gate.woken_count <= (1 + WOKEN_MIN / room) * count + WOKEN_MIN
