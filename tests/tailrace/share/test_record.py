"""A ShareRecord is a Record with one part more."""

from __future__ import annotations

import copy
import pickle

import pytest

from tailrace import Record, ShareRecord
from tailrace.share.record import with_delivery_count

PLAIN = Record("t", 1, 2, 3, 0, b"k", b"v", [("h", b"x")], 3_000)


def test_it_is_a_record_that_knows_its_delivery_count() -> None:
    (record,) = with_delivery_count([PLAIN], 7)
    assert isinstance(record, Record)
    assert isinstance(record, ShareRecord)
    assert (record.delivery_count, record.topic, record.offset, record.datetime) == (
        7,
        "t",
        2,
        PLAIN.datetime,
    )
    assert tuple(record) == (*PLAIN, 7)
    assert repr(record).endswith("timestamp_us=3000, delivery_count=7)")
    changed = record._replace(value=b"w")
    assert (type(changed), changed.value, changed.delivery_count) == (ShareRecord, b"w", 7)
    assert record._asdict()["delivery_count"] == 7
    assert pickle.loads(pickle.dumps(record)) == record == copy.copy(record)
    assert type(pickle.loads(pickle.dumps(record))) is ShareRecord
    with pytest.raises(ValueError, match="no"):
        record._replace(size=1)
    with pytest.raises(TypeError, match="10 parts"):
        ShareRecord(*PLAIN)
