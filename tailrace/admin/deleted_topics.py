"""Administration of deleted topics that can come back. `tailrace.Admin` has these methods.

Each call makes a request or a few in the caller's thread. A change is complete when the method
returns.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, operation
from tailrace.core.errors import UnknownTopicError
from tailrace.core.validation import name_of
from tailrace.protocol.frame import Api

T = TypeVar("T")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_NAMED = "the name or the id of a deleted topic"


class DeletedTopicAdmin:
    """The methods of `Admin` for deleted topics."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    def _change(
        self, api: Api, items: list[dict[str, Any]], validate_only: bool = False
    ) -> Steps[list[dict[str, Any]]]:
        raise NotImplementedError

    @operation
    def list_deleted_topics(self) -> Steps[list[dict[str, Any]]]:
        """The deleted topics that the bin keeps, the one that it loses first in front. Each has its
        name, topic_id, number of partitions, time of the deletion (ISO 8601), the milliseconds that
        are left, and its bytes on the disk. Its state is `kept`, or `purging` while it is removed.
        """
        self._connection.check_usable()
        found: list[dict[str, Any]] = []
        request: dict[str, Any] = {}
        while True:
            answer = yield from self._call(Api.LIST_DELETED_TOPICS, request)
            found += [_described(entry) for entry in answer["topics"]]
            if answer["next"] is None:
                return found
            request = {"after": answer["next"]}

    @operation
    def undelete_topic(self, topic: str, new_name: str | None = None) -> Steps[str]:
        """Bring a deleted topic back, by its name or id, with its records, settings, delayed
        records and the offsets that groups had committed. It has `new_name`, or the name it had;
        returned. Raises UnknownTopicError, TopicExistsError if another topic has the name,
        InvalidRequestError if several deleted topics had it.
        """
        item = {"name": name_of(_NAMED, topic)}
        if new_name is not None:
            item["as"] = name_of("new_name", new_name)
        (result,) = yield from self._change_deleted(Api.UNDELETE_TOPICS, item)
        return str(result["restored"])

    @operation
    def purge_topic(self, topic: str) -> Steps[int]:
        """Remove a deleted topic from the bin for good, by its name or id. Returns the bytes that
        it had. Raises UnknownTopicError, InvalidRequestError if several deleted topics had the
        name.
        """
        item = {"name": name_of(_NAMED, topic)}
        (result,) = yield from self._change_deleted(Api.PURGE_TOPICS, item)
        return int(result["bytes"])

    def _change_deleted(self, api: Api, item: dict[str, Any]) -> Steps[list[dict[str, Any]]]:
        """`_change` of one entry. The advice about an unknown topic is that of deleted ones."""
        try:
            return (yield from self._change(api, [item]))
        except UnknownTopicError as error:
            error.advice = "`tailrace topic list --deleted` shows those that can come back."
            raise


def _described(entry: dict[str, Any]) -> dict[str, Any]:
    deleted = (_EPOCH + dt.timedelta(microseconds=entry["deleted_us"])).isoformat()
    return {
        **{name: value for name, value in entry.items() if name != "deleted_us"},
        "deleted": deleted,
    }
