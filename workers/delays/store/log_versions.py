"""Schema versions of one delay log. A pending row stays in the version that it was written with,
and is converted when it is delivered or replaced.

Owner: the scheduler, one for each partition.

Invariants:
- Rows carry the schema id of their version in the metadata of their Arrow schema.
- The three columns of delays are the last ones of each version.
- Rows are converted by `SchemaHistory`, as readers convert batches of the topic.

Crash: nothing is kept. The controller sends the versions, and `pending.json` names that of each
file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from shm.messages.lane_messages import Assignment
from tailrace.core.schedule.delays import DELAY_COLUMNS
from tailrace.format.schema import DELAY_FIELDS, from_message

if TYPE_CHECKING:
    from tailrace.format.evolution.schema_history import SchemaHistory

Ints = np.ndarray[Any, np.dtype[np.int64]]
DUE, ORIGIN, REPEAT = -3, -2, -1
"""Places of the columns of delays in each version, from the end."""
_VERSION_KEY = b"tailrace.version"


class UnusableSchemaError(ValueError):
    """Delayed records of a topic with this schema cannot be delivered. The message says why."""


def version_of(rows: pa.RecordBatch) -> int:
    """Return the schema id of rows that `LogVersions.schema` was given for."""
    return int(rows.schema.metadata[_VERSION_KEY])


class LogVersions:
    """The versions of one delay log."""

    def __init__(self, log: Assignment) -> None:
        """Raises UnusableSchemaError."""
        self.update(log)

    def update(self, log: Assignment) -> None:
        """Take the versions of a later assignment. Raises UnusableSchemaError."""
        self._messages = {
            **{number: log.older_schemas[number] for number in sorted(log.older_schemas)},
            log.schema_id: log.schema,
        }
        self._schemas: dict[int, pa.Schema] = {}
        self._history: SchemaHistory | None = None
        self.newest_id = log.schema_id
        self.oldest_id = next(iter(self._messages))
        self.newest = self.schema(log.schema_id)
        """Only rows of this version are appended to the log."""

    def __contains__(self, schema_id: int) -> bool:
        return schema_id in self._messages

    @property
    def is_altered(self) -> bool:
        """True if there are several versions."""
        return len(self._messages) > 1

    def message(self, schema_id: int) -> bytes:
        """Return the Arrow message of a version, of the newest one for an unknown id."""
        return self._messages.get(schema_id) or self._messages[self.newest_id]

    def schema(self, schema_id: int) -> pa.Schema:
        """Return the Arrow schema of rows of a version. Raises UnusableSchemaError."""
        found = self._schemas.get(schema_id)
        if found is None:
            if schema_id not in self._messages:
                raise UnusableSchemaError(
                    f"schema {schema_id} is none of the versions of its delay log "
                    f"({', '.join(map(str, self._messages))})"
                )
            found = read_arrow_schema(self._messages[schema_id]).with_metadata(
                {_VERSION_KEY: str(schema_id).encode()}
            )
            self._schemas[schema_id] = found
        return found

    def check(self, topic: Assignment) -> None:
        """Check that rows of the newest version are rows of the topic. Raises
        UnusableSchemaError.
        """
        own = read_arrow_schema(topic.schema)
        count = len(own)
        if [field.type for field in self.newest] != [
            field.type for field in (*own, *DELAY_FIELDS)
        ] or tuple(self.newest.names[count:]) != DELAY_COLUMNS:
            raise UnusableSchemaError(
                "the delay log's schema is not the topic's schema with the columns @due_us, "
                "@origin and @repeat appended; alter the topic to its present schema"
            )
        if (self.is_altered or topic.older_schemas) and self.newest.names[:count] != own.names:
            raise UnusableSchemaError(
                f"the delay log has the columns {self.newest.names[:count]!s:.200}, and the topic "
                f"{own.names!s:.200}; alter the topic to its present schema"
            )

    def has_schema_of(self, topic: Assignment) -> bool:
        """False while only one of topic and delay log is known as altered. Raises
        UnusableSchemaError if the topic's schema cannot be read.
        """
        read_arrow_schema(topic.schema)
        try:
            self.check(topic)
        except UnusableSchemaError:
            return False
        return True

    def to_newest(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows in the newest version. Raises UnsupportedBatchError for a value that it
        cannot hold.
        """
        version = version_of(rows)
        if version == self.newest_id:
            return rows
        if self._history is None:
            from tailrace.format.evolution.schema_history import SchemaHistory

            self._history = SchemaHistory(list(self._messages.items()))
        return pa.RecordBatch.from_arrays(
            self._history.convert(rows, version).columns, schema=self.newest
        )

    def topic_rows(self, rows: pa.RecordBatch, places: Ints) -> pa.RecordBatch:
        """Return the rows at these places as rows of the topic. Raises UnsupportedBatchError."""
        columns = range(len(self.newest) - len(DELAY_COLUMNS))
        if version_of(rows) == self.newest_id:
            return rows.select(columns).take(pa.array(places))
        return self.to_newest(rows.take(pa.array(places))).select(columns)


def read_arrow_schema(message: bytes) -> pa.Schema:
    """Raises UnusableSchemaError."""
    try:
        return from_message(message)
    except Exception as error:
        # pyarrow raises KeyError, ArrowInvalid and others for unknown schemas
        raise UnusableSchemaError(
            f"its schema cannot be read: {type(error).__name__}: {error}"
        ) from None
