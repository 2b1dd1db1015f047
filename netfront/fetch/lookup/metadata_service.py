"""METADATA and LIST_OFFSETS, answered from the catalog and the partition tables.

Each is a generator for `time_slicer`: it yields its cost and sends its response at the end.

Owner: one front.

Invariants:
- A METADATA response has at most ANSWER_MAX_BYTES. A larger one is refused, with the advice to ask
  for fewer topics.
- A request is parsed once.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from netfront.fetch.log.file_reader import SHORTAGES
from netfront.fetch.log.isolation import Isolation, end_of
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import LogReadError
from netfront.partition_routes import PartitionRoutes
from netfront.session.time_slicing import UNITS_OF_A_FILE
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import CLEANING_NAMES, CleaningState, PartitionState
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import lookup_messages
from tailrace.protocol.frame import WireError
from tailrace.protocol.lookup_messages import TOPICS_AT_ONCE_MAX, ListOffsetsEntry

if TYPE_CHECKING:
    from netfront.access.page_tokens import PageTokens
    from netfront.fetch.lookup.timestamp_lookup import TimestampLookup
    from shm.rights.authorizer import Principal

logger = logging.getLogger(__name__)

ANSWER_MAX_BYTES = 4 << 20
OLDER_SCHEMA_BYTES = 1 << 20
"""Older schemas in a response about several topics. A request for one topic gets all of them."""
_BYTES_PER_UNIT = 2_048
COMPACT = "compact"
_NONE_FETCHED = [0, 0]


class MetadataService:
    """METADATA and LIST_OFFSETS of one front."""

    def __init__(
        self,
        routing: PartitionRoutes,
        reader: LogReader,
        front_ports: Callable[[], list[int]],
        fetched: Mapping[int, list[int]],
        decisions: Callable[[], tuple[int, int]],
    ) -> None:
        """`fetched` has [offsets, bytes] that this front has sent to readers, by slot. `decisions`:
        the newest decision about a transaction, and up to which they are carried out.
        """
        self._fetched = fetched
        self._decisions = decisions
        self._routing = routing
        self._reader = reader
        self._times: TimestampLookup | None = None
        self._front_ports = front_ports
        self.tokens: PageTokens | None = None
        """Seals names which their reader may not see. None: everybody may see all."""

    def metadata(
        self, body: bytes, answer: Callable[[bytes], None], principal: Principal | None = None
    ) -> Iterator[int]:
        """Return topics by name, or all of them (`topics` null), as far as `principal` may describe
        them.

        `names_only` lists names, page by page.
        """
        request = lookup_messages.decode_metadata(body)
        yield len(body) // _BYTES_PER_UNIT + 1
        behind: list[bytes] = []
        if request.topics is not None:
            names = request.topics
        elif request.names_only and request.after is not None:
            every = self._routing.names()
            start = bisect_right(every, self._opened(request.after))
            names = every[start : start + TOPICS_AT_ONCE_MAX]
            following = names[-1] if start + len(names) < len(every) else None
            if following is not None and principal is not None and self.tokens is not None:
                is_shown = principal.may("describe", "topic", following)
                following = following if is_shown else self.tokens.seal(following)
            behind.append(b'"after":' + orjson.dumps(following))
        else:
            names = self._routing.names()
        if not request.names_only:
            behind.append(
                b'"fronts":' + orjson.dumps([{"port": port} for port in self._front_ports()])
            )
        pieces: list[bytes] = []
        length = 0
        room = OLDER_SCHEMA_BYTES if len(names) > 1 else ANSWER_MAX_BYTES
        for name in names:
            is_visible = principal is None or principal.may("describe", "topic", name)
            if not is_visible and request.topics is None:
                yield 1
                continue
            piece = orjson.dumps(
                self._described(name, request.names_only, room)
                if is_visible
                else _absent(name, request.names_only)
            )
            pieces.append(piece)
            length += len(piece) + 1
            room = OLDER_SCHEMA_BYTES - length if len(names) > 1 else room
            if length > ANSWER_MAX_BYTES:
                raise WireError(
                    ErrorCode.REQUEST_TOO_LARGE,
                    f"the metadata of these {len(names)} topics takes more than "
                    f"{ANSWER_MAX_BYTES} bytes: ask for fewer at once, by name",
                )
            yield 1 + len(piece) // _BYTES_PER_UNIT
        answer(
            b'{"topics":['
            + b",".join(pieces)
            + b"]"
            + b"".join(b"," + piece for piece in behind)
            + b"}"
        )

    def _opened(self, after: str) -> str:
        """The name where a page begins. Raises WireError."""
        return self.tokens.open(after) if self.tokens and after.startswith("\0") else after

    def _described(self, name: str, names_only: bool, older_schema_bytes: int) -> dict[str, Any]:
        if names_only:
            return {"name": name, "partitions": self._routing.partition_count(name)}
        return self._routing.describe(name, older_schema_bytes) or _absent(name, names_only=False)

    def list_offsets(
        self, body: bytes, answer: Callable[[bytes], None], principal: Principal | None = None
    ) -> Iterator[int]:
        """Return the offsets of partitions, in the order of the request, as far as `principal` may
        describe them. Where open transactions hold back an end of committed records, the progress
        of the decisions is added: some of these transactions may be committed already.
        """
        requested = lookup_messages.decode_list_offsets(body)
        decided, carried_out = self._decisions()  # before the ends are read
        yield len(body) // _BYTES_PER_UNIT + 1
        pieces = []
        ends_early = False
        for item in requested:
            is_visible = principal is None or principal.may("describe", "topic", item.topic)
            found = yield from self._offset_of(item, is_visible)
            ends_early = ends_early or (
                item.at != "earliest" and found.get("end", 0) < found.get("high_watermark", 0)
            )
            pieces.append(orjson.dumps(found))
        progress = b',"decided":%d,"carried_out":%d' % (decided, carried_out)
        answer(
            b'{"offsets":[' + b",".join(pieces) + b"]" + (progress if ends_early else b"") + b"}"
        )

    def _time_search(self) -> TimestampLookup:
        """Return the timestamp search.

        It is loaded at the first query by time, so that a front starts sooner.
        """
        if self._times is None:
            from netfront.fetch.lookup.timestamp_lookup import TimestampLookup

            self._times = TimestampLookup(self._reader)
        return self._times

    def _offset_of(
        self, requested: ListOffsetsEntry, is_visible: bool
    ) -> Generator[int, None, dict[str, Any]]:
        """Answer one entry of LIST_OFFSETS. A topic that is not visible is unknown.

        The requested `at` is one of:
        - "earliest" or "latest".
        - A time in microseconds: the first record at or after it, or -1.
        - "behind" an offset: the start of the next batch.
        - "time_of" an offset: the first record at or after it, with its time.
        """
        topic, partition = requested.topic, requested.partition
        answer: dict[str, Any] = {
            "topic": topic,
            "partition": partition,
            "code": int(requested.code),
            "offset": -1,
        }
        yield 2
        if requested.code is not ErrorCode.OK:
            return answer
        route = self._routing.find_by_name(topic, partition) if is_visible else None
        if route is None:
            known = is_visible and self._routing.partition_count(topic)
            return {
                **answer,
                "code": int(ErrorCode.PARTITION_OUT_OF_RANGE if known else ErrorCode.UNKNOWN_TOPIC),
            }
        isolation = Isolation.UNCOMMITTED if requested.is_uncommitted else Isolation.COMMITTED
        try:
            state = self._reader.state(route)
            end = end_of(state, isolation)
            fetched = self._fetched.get(route.slot, _NONE_FETCHED)
            answer.update(_shown_state(state, route, end, fetched))
            answer.update((yield from self._place_of(requested, route, state, end, isolation)))
        except LogReadError as error:
            answer["code"] = int(error.code)
        except OSError as error:
            logger.error("read_failed topic=%s partition=%d error=%r", topic, partition, str(error))
            answer["code"] = int(
                ErrorCode.NOT_READY if error.errno in SHORTAGES else ErrorCode.STORAGE_ERROR
            )
        return answer

    def _place_of(
        self,
        requested: ListOffsetsEntry,
        route: Assignment,
        state: PartitionState,
        end: int,
        isolation: Isolation,
    ) -> Generator[int, None, dict[str, Any]]:
        """The offset that an entry asks for; with its time, if it asks by time. Raises
        LogReadError, OSError.
        """
        at = requested.at
        if at == "earliest":
            return {"offset": state.log_start_offset}
        if at == "latest":
            return {"offset": end}
        if at != "time_of" and not isinstance(at, int):
            yield UNITS_OF_A_FILE
            return {"offset": self._reader.behind(route, state, requested.offset, end)}
        search = self._time_search()
        found = (
            yield from search.find(route, state, at, isolation)
            if isinstance(at, int)
            else search.time_of(route, state, requested.offset, isolation)
        )
        if found is None:
            return {"timestamp_us": -1, "exact": True}
        return {"offset": found.offset, "timestamp_us": found.timestamp_us, "exact": found.is_exact}


def _shown_state(
    state: PartitionState, route: Assignment, end: int, fetched: Any
) -> dict[str, Any]:
    """The state of a partition as LIST_OFFSETS shows it."""
    shown: dict[str, Any] = {
        "beginning": state.log_start_offset,
        "end": end,
        "high_watermark": state.high_watermark,
        "leader_epoch": state.leader_epoch,
        "size_bytes": state.size_bytes,
        "segments": state.segment_count,
        "max_timestamp_us": state.max_timestamp_us,
        "last_append_us": state.last_append_us,
        "state": state.state.name,
        "appended_batches": state.appended_batches,
        "appended_bytes": state.appended_bytes,
        "fetched": fetched,
    }
    if COMPACT in route.settings.get("cleanup.policy", ""):
        shown["compaction"] = {
            "state": CLEANING_NAMES[CleaningState(state.cleaning_state)],
            "cleaned_below": state.cleaned_below,
            "clean_bytes": state.clean_bytes,
            "dirty_bytes": state.dirty_bytes,
            "dirty_since_us": state.dirty_since_us,
        }
    return shown


def _absent(name: str, names_only: bool) -> dict[str, Any]:
    """The metadata of a topic that does not exist, or that the client may not see."""
    if names_only:
        return {"name": name, "partitions": 0}
    return {"name": name, "code": int(ErrorCode.UNKNOWN_TOPIC)}
