"""KeyCodec: the keys of a table as users write them, and as bytes.

Invariants:
- The bytes of a key are those by which `tailrace.scanning.latest.key_column` numbers it.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tailrace.client.records.serdes import Function, serialized
from tailrace.core.errors import InvalidRequestError
from tailrace.scanning.latest.key_column import plain_type


class KeyCodec:
    """Keys of one column."""

    def __init__(
        self, kind: pa.DataType, serializer: Function | None, deserializer: Function | None
    ) -> None:
        self._serializer = serializer
        self._deserializer = deserializer
        self._kind = kind
        plain = plain_type(kind)
        assert plain is not None, kind
        self._plain = plain
        self._is_text = pa.types.is_string(plain)
        self.is_variable = self._is_text or pa.types.is_binary(plain)
        """True for bytes and text, False for keys of a fixed width."""

    def encode(self, key: Any) -> bytes:
        """The bytes of a key. Raises InvalidRequestError, InvalidRecordError (the serializer)."""
        if self._serializer is not None:
            key = serialized("key", self._serializer, key)
        if isinstance(key, str) and self.is_variable:
            return _utf8(key)
        if isinstance(key, bytes | bytearray | memoryview) and self.is_variable:
            return bytes(key)
        if self.is_variable:
            raise InvalidRequestError(
                f"the key {key!r:.100} is of type {type(key).__name__}; give bytes or text, or a "
                "key_serializer"
            )
        try:
            column = pa.array([key], self._kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"the key {key!r:.100} is no {self._kind}: {error}") from None
        if column.null_count:
            raise InvalidRequestError("the key is None, and records without a key are not kept")
        width = self._plain.bit_width // 8
        return bytes(memoryview(column.cast(self._plain).buffers()[1])[:width])

    def decode(self, data: bytes) -> Any:
        """The key of these bytes."""
        key: Any = data
        if self._is_text:
            key = data.decode()
        elif not self.is_variable:
            column = pa.Array.from_buffers(self._plain, 1, [None, pa.py_buffer(data)])
            key = column.cast(self._kind)[0].as_py()
        return self.shown(key)

    def shown(self, key: Any) -> Any:
        """A key of the column as the user sees it."""
        return key if self._deserializer is None else self._deserializer(key)


def _utf8(key: str) -> bytes:
    """Text as bytes. Raises InvalidRequestError."""
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"the key {key!r:.100} cannot be encoded as UTF-8; give bytes, or other text"
        ) from None
