"""One request that changes topics: its entries, their results, and the decisions under way.

Owner: `change_queue`.
Invariants: names and texts of the request are cut in its answer (`request_fields`), so that the
    answer fits a lane.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from appliance.catalog.catalog import Topic
from appliance.control.request_fields import Requester
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json, encode_reply

ENTRIES_MAX = 1000
OFFSETS_MAX = 10_000
"""Most partitions of one DELETE_RECORDS request."""
MESSAGE_MAX = 80
"""Characters of each message in an answer that would be too long otherwise."""


@dataclass(slots=True)
class Change:
    """One request."""

    requester: Requester
    api: Api
    payload: bytes
    """The request's body, dropped by `start`."""
    deadline_ns: int
    is_started: bool = False
    validate_only: bool = False
    undecided: deque[Any] = field(default_factory=deque)
    results: list[dict[str, Any]] = field(default_factory=list)
    pending: dict[bytes, tuple[Topic, list[dict[str, Any]]]] = field(default_factory=dict)
    """Topic id -> the newest decision on its way into the partition table, and the results that
    wait for it.
    """
    offset_count: int = 0

    @property
    def is_decided(self) -> bool:
        """True if every entry is decided; decisions may still be under way."""
        return self.is_started and not self.undecided

    def start(self) -> None:
        """Decode the request into its entries. Raises InvalidRequestError, WireError."""
        request = decode_json(self.payload)
        self.payload = b""
        items = request.get("topics")
        if not isinstance(items, list) or not 0 < len(items) <= ENTRIES_MAX:
            raise InvalidRequestError(
                f"the request needs a list `topics` of 1 to {ENTRIES_MAX} entries"
            )
        self.validate_only = bool(request.get("validate_only", False))
        self.undecided.extend(items)
        self.is_started = True

    def check_offsets(self, item: dict[str, Any]) -> None:
        """Count the partitions of a DELETE_RECORDS entry. Raises TailraceError (REQUEST_TOO_LARGE)
        above OFFSETS_MAX.
        """
        requested = item.get("partitions")
        if self.api is Api.DELETE_RECORDS and isinstance(requested, dict):
            self.offset_count += len(requested)
            if self.offset_count > OFFSETS_MAX:
                raise TailraceError(
                    f"the request names too many partitions; the limit is {OFFSETS_MAX}",
                    ErrorCode.REQUEST_TOO_LARGE,
                )

    def encode_results(self, answer_max: int) -> tuple[ErrorCode, bytes]:
        """The answer, with messages cut to MESSAGE_MAX if it would have more than `answer_max`
        bytes.
        """
        code, body = encode_reply(ErrorCode.OK, {"results": self.results}, answer_max)
        if code is not ErrorCode.OK:
            shortened = [
                {**result, "message": result["message"][:MESSAGE_MAX]}
                if "message" in result
                else result
                for result in self.results
            ]
            code, body = encode_reply(ErrorCode.OK, {"results": shortened}, answer_max)
        return code, body
