"""Records of a share group: a Record with its delivery count."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any

from tailrace.core.records import Record


class ShareRecord(Record):
    """A Record with `delivery_count`, the number of its deliveries, this one included."""

    __slots__ = ()
    _fields = (*Record._fields, "delivery_count")  # type: ignore[assignment]

    def __new__(cls, *parts: Any) -> ShareRecord:
        """`parts` are those of a Record, then the delivery count."""
        if len(parts) != len(cls._fields):
            raise TypeError(f"a ShareRecord has {len(cls._fields)} parts, not {len(parts)}")
        return tuple.__new__(cls, parts)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> ShareRecord:  # type: ignore[override]
        return cls(*iterable)

    def _replace(self, **changes: Any) -> ShareRecord:
        values = dict(zip(self._fields, self, strict=True))
        if unknown := changes.keys() - values.keys():
            raise ValueError(f"a record has no {sorted(unknown)}")
        return ShareRecord(*(values | changes).values())

    def __repr__(self) -> str:
        return f"ShareRecord({', '.join(f'{name}={value!r}' for name, value in zip(self._fields, self, strict=True))})"  # noqa: E501

    delivery_count = property(itemgetter(len(Record._fields)))


_new = partial(tuple.__new__, ShareRecord)


def with_delivery_count(records: Iterable[Record], delivery_count: int) -> list[ShareRecord]:
    """The records as ShareRecords with this delivery count."""
    return list(map(_new, map(tuple.__add__, records, repeat((delivery_count,)))))
