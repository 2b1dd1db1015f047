"""Deserializers: what they return, and where they fail."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace import Consumer, InvalidSettingError, Producer, Record, ShareConsumer
from tailrace.client.records.serdes import deserialized


async def waiting(given: Any) -> Any:
    raise AssertionError(given)


class Awaited:
    """An object whose call is a coroutine."""

    async def __call__(self, given: Any) -> Any:
        raise AssertionError(given)


def records(count: int) -> list[Record]:
    return [Record("t", 0, n, 0, 0, b"k", b"%d" % n, [], 0) for n in range(count)]


@pytest.mark.parametrize("function", [waiting, Awaited()], ids=["function", "object"])
def test_settings_refuse_what_is_called_and_never_awaited(function: Any) -> None:
    for setting in ("key_deserializer", "value_deserializer"):
        with pytest.raises(InvalidSettingError, match=f"{setting} is the coroutine function"):
            Consumer(**{setting: function})
        with pytest.raises(InvalidSettingError, match=f"{setting} is the coroutine function"):
            ShareConsumer(group_id="g", **{setting: function})
    for setting in ("key_serializer", "value_serializer", "partitioner"):
        with pytest.raises(InvalidSettingError, match=f"{setting} is the coroutine function"):
            Producer(**{setting: function})


@pytest.mark.parametrize("part", ["key_deserializer", "value_deserializer"])
def test_coroutines_are_no_keys_and_no_values(part: str) -> None:
    """A lambda hides the coroutine function that it calls: the program got coroutines."""
    functions: dict[str, Any] = {"key_deserializer": None, "value_deserializer": None}
    functions[part] = lambda given: waiting(given)
    found, error = deserialized(records(3), **functions)
    assert found == []
    assert isinstance(error, TypeError)
    assert "returned a coroutine, which is not awaited" in str(error)
    values = iter([b"0", waiting(1), waiting(2)])
    functions[part] = lambda _given: next(values)
    found, error = deserialized(records(3), **functions)
    assert [record.offset for record in found] == [0]
    assert isinstance(error, TypeError)
