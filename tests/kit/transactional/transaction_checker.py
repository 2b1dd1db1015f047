"""The checker of transactions: what programs were told, against what readers of both isolation
levels see.

Each value is written once, and says of which transaction it is: `program:owner:number:part`, and
for a transformer `|` and the value that it read. So every anomaly is visible in the values (the
idea is that of Elle, K. Kingsbury and P. Alvaro, 2020).

Owner: one run. It knows nothing of how the appliance decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tailrace.core.topic_partition import TopicPartition

Read = list[tuple[int, bytes]]
"""(offset, value), as a reader gets them."""


class Token(NamedTuple):
    """A transaction. Those of one program are ordered by it."""

    program: str
    owner: int
    number: int


@dataclass(slots=True)
class Written:
    """A transaction, as its program knows it."""

    values: dict[bytes, TopicPartition] = field(default_factory=dict)
    offsets: dict[bytes, int] = field(default_factory=dict)
    """Offsets of the values that were acknowledged."""
    is_commit_asked: bool = False
    outcome: str = ""
    """"commit" or "abort": what the program was told. "": nothing, perhaps never."""


def value_of(token: Token, part: int, source: bytes = b"") -> bytes:
    """A value of a transaction. `source`: what it was made from."""
    made = f"{token.program}:{token.owner}:{token.number}:{part}".encode()
    return made + b"|" + source if source else made


def parse(value: bytes) -> tuple[Token, int, bytes]:
    """(transaction, part, source) of a value."""
    name, _, source = value.partition(b"|")
    program, owner, number, part = name.decode().split(":")
    return Token(program, int(owner), int(number)), int(part), source


class TransactionHistory:
    """History of what the programs have sent and were told, and of what readers saw on the way."""

    def __init__(self) -> None:
        self.transactions: dict[Token, Written] = {}
        self._seen: dict[tuple[str, TopicPartition], dict[int, bytes]] = {}
        """By reader and partition: offset -> value."""
        self._passed: dict[tuple[str, TopicPartition], int] = {}
        self._together: list[tuple[Token, ...]] = []
        """Transactions that one decision commits: an owner's, and those of its branches."""

    # ---- programs --------------------------------------------------------------------------------

    def send(self, token: Token, place: TopicPartition, value: bytes) -> None:
        self.transactions.setdefault(token, Written()).values[value] = place

    def acknowledge(self, value: bytes, offset: int) -> None:
        written = self.transactions[parse(value)[0]]
        known = written.offsets.setdefault(value, offset)
        assert known == offset, f"{value!r} was acknowledged at {known}, now at {offset}"

    def ask_commit(self, *tokens: Token) -> None:
        """A commit is asked for, of these together."""
        for token in tokens:
            self.transactions.setdefault(token, Written()).is_commit_asked = True
        self._together.append(tokens)

    def end(self, token: Token, outcome: str) -> None:
        """The program was told the outcome."""
        written = self.transactions.setdefault(token, Written())
        assert written.outcome in ("", outcome), f"{token}: {written.outcome}, then {outcome}"
        assert outcome == "abort" or written.is_commit_asked, f"{token}: nobody asked for a commit"
        written.outcome = outcome

    # ---- readers ---------------------------------------------------------------------------------

    def read(
        self, reader: str, place: TopicPartition, offset: int, value: bytes, *, is_committed: bool
    ) -> None:
        """A reader got a record, behind all that it had."""
        token = parse(value)[0]
        written = self.transactions.get(token)
        assert written is not None, f"{value!r} was read, and nobody has sent it"
        if is_committed:
            assert written.is_commit_asked, f"{place}: {value!r} was read before its commit"
            assert written.outcome != "abort", f"{place}: aborted, and read: {value!r}"
        passed = self._passed.get((reader, place), 0)
        assert offset >= passed, f"{place}: offset {offset} came behind {passed - 1}"
        self._seen.setdefault((reader, place), {})[offset] = value
        self._passed[reader, place] = offset + 1

    # ---- the end ---------------------------------------------------------------------------------

    def check(
        self,
        committed: Mapping[TopicPartition, Read],
        uncommitted: Mapping[TopicPartition, Read],
        readers: Mapping[str, bool],
    ) -> None:
        """Compare with what is read in the end. `readers`: True for those of committed records."""
        for place, records in committed.items():
            assert set(records) <= set(uncommitted[place]), f"{place}: the levels differ"
            self._check_order(place, records)
        self._check_atomic(committed)
        everything = {value for records in uncommitted.values() for _, value in records}
        for token, written in self.transactions.items():
            lost = [value for value in written.offsets if value not in everything]
            assert not lost, f"{token}: acknowledged, and lost: {lost[:3]}"
        for (reader, place), seen in self._seen.items():
            final = committed[place] if readers[reader] else uncommitted[place]
            passed = self._passed[reader, place]
            expected = {offset: value for offset, value in final if offset < passed}
            assert seen == expected, (
                f"{place}: {reader} has passed {passed} and saw something else: "
                f"{sorted(set(seen.items()) ^ set(expected.items()))[:5]}"
            )

    def _check_order(self, place: TopicPartition, records: Read) -> None:
        last: dict[str, tuple[Token, int]] = {}
        for offset, value in records:
            token, part, _ = parse(value)
            before = last.get(token.program)
            assert before is None or before < (token, part), (
                f"{place}: {value!r} at {offset} lies behind {before}: repeated, or out of order"
            )
            last[token.program] = token, part
            written = self.transactions.get(token)
            assert written is not None, f"{value!r} was read, and nobody has sent it"
            assert written.values.get(value) == place, f"{value!r} was not sent to {place}"
            assert written.offsets.get(value, offset) == offset, (
                f"{value!r} was acknowledged at {written.offsets[value]}, and lies at {offset}"
            )

    def _check_atomic(self, committed: Mapping[TopicPartition, Read]) -> None:
        found: dict[Token, set[bytes]] = {}
        for records in committed.values():
            for _, value in records:
                found.setdefault(parse(value)[0], set()).add(value)
        for tokens in self._together:
            written_by = [one for one in tokens if self.transactions[one].values]
            assert len({one in found for one in written_by}) < 2, f"{tokens}: some are read"
        for token, written in self.transactions.items():
            visible = found.get(token, set())
            if written.outcome == "commit":
                missing = set(written.values) - visible
                assert not missing, f"{token}: committed, and not read: {sorted(missing)[:3]}"
            elif visible:
                assert written.outcome != "abort", f"{token}: aborted, and read"
                assert written.is_commit_asked, f"{token}: read, and nobody asked for a commit"
                missing = set(written.values) - visible
                assert not missing, f"{token}: half visible, without {sorted(missing)[:3]}"


def check_transformed(
    programs: Collection[str], source: Read, next_offset: int, outputs: Iterable[bytes]
) -> None:
    """The outputs of a group's transformers are what they read below the offset that the group has
    committed: each once, those of one program in order.
    """
    expected = [value for offset, value in source if offset < next_offset]
    own = sorted(parsed for value in outputs if (parsed := parse(value))[0].program in programs)
    found = [value for *_, value in own]
    if len(programs) > 1:
        rank = {value: number for number, value in enumerate(expected)}
        for program in programs:
            ranks = [rank.get(value, -1) for token, _, value in own if token.program == program]
            assert ranks == sorted(ranks), f"{program}: outputs are out of order"
        found.sort(key=lambda value: rank.get(value, -1))
    assert found == expected, (
        f"{', '.join(programs)}: offsets and outputs did not move together: committed "
        f"{next_offset}; {len(found)} outputs of {len(expected)} inputs, first difference "
        f"{next(((a, b) for a, b in zip(found, expected, strict=False) if a != b), None)}"
    )
