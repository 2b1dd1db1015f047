"""The one table of error codes: number, name, retriable, what happened, what to do.

Invariants: a number is never reused and never changes its name; 0 is success. Retriable means: the same request, unchanged, may succeed when it is sent
again later. `docs/protocol.md` prints this table; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ErrorCode(IntEnum):
    """Numbers of errors on the wire, named."""

    OK = 0
    UNKNOWN_TOPIC = 1
    PARTITION_OUT_OF_RANGE = 2
    RECORD_TOO_LARGE = 3
    CORRUPT_BATCH = 4
    UNSUPPORTED_BATCH = 5
    UNSAFE_BATCH = 6
    SCHEMA_MISMATCH = 7
    INVALID_SCHEMA = 8
    INVALID_TOPIC_NAME = 9
    TOPIC_EXISTS = 10
    INVALID_SETTING = 11
    OFFSET_OUT_OF_RANGE = 12
    OUT_OF_ORDER_SEQUENCE = 13
    UNKNOWN_SEQUENCE = 14
    STALE_PRODUCER_EPOCH = 15
    NOT_READY = 16
    SHUTTING_DOWN = 17
    STORAGE_ERROR = 18
    PARTITION_OFFLINE = 19
    DISK_FULL = 20
    TIMED_OUT = 21
    SESSION_UNKNOWN = 22
    UNSUPPORTED_VERSION = 23
    MALFORMED_REQUEST = 24
    REQUEST_TOO_LARGE = 25
    CREDIT_EXCEEDED = 26
    UNKNOWN_API = 27
    LOG_TRUNCATED = 28
    NOT_SUPPORTED = 29
    DELIVERY_TIMEOUT = 30
    BUFFER_EXHAUSTED = 31
    NOT_REACHABLE = 32
    CLIENT_CLOSED = 33
    INVALID_RECORD = 34
    INTERNAL_ERROR = 35
    INVALID_REQUEST = 36
    DELAY_NOT_ENABLED = 37
    UNKNOWN_DELAY = 38
    TOO_MANY_REQUESTS = 39
    TOO_MANY_PRODUCERS = 40
    INVALID_GROUP = 41
    UNKNOWN_GROUP = 42
    GROUP_NOT_EMPTY = 43
    GROUP_FULL = 44
    TOO_MANY_GROUPS = 45
    UNKNOWN_MEMBER = 46
    FENCED_MEMBER = 47
    INSTANCE_ID_IN_USE = 48
    PARTITION_NOT_OWNED = 49
    UNSUPPORTED_ASSIGNOR = 50
    LOCK_LOST = 51
    STALE_SLOT_MAP = 52


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What the table says of one code."""

    code: ErrorCode
    retriable: bool
    meaning: str
    advice: str


def _row(code: ErrorCode, retriable: bool, meaning: str, advice: str) -> tuple[ErrorCode, ErrorRow]:
    return code, ErrorRow(code, retriable, meaning, advice)


_C = ErrorCode
ERROR_TABLE: dict[ErrorCode, ErrorRow] = dict(
    (
        _row(_C.OK, False, "Success.", "Nothing."),
        _row(_C.UNKNOWN_TOPIC, False, "There is no such topic.", "Create it with `tailrace topic create NAME`, or check its spelling with `tailrace topic list`."),
        _row(_C.PARTITION_OUT_OF_RANGE, False, "The topic has no such partition.", "Use a partition from 0 to one less than `partitions` in `tailrace topic describe NAME`."),
        _row(_C.RECORD_TOO_LARGE, False, "The record or batch is larger than the limit, as it is or unpacked.", "Send smaller records or batches, or raise the topic's max.message.bytes and the producer's max_request_size."),
        _row(_C.CORRUPT_BATCH, False, "A batch does not match its checksum.", "On produce, send it again from the source; on consume, run `tailrace log dump` on the segment that the message names."),
        _row(_C.UNSUPPORTED_BATCH, False, "The batch header has another magic, version or length, or asks for what this version has not.", "Use a client of the same major version as the appliance; its log says what it refused."),
        _row(_C.UNSAFE_BATCH, False, "The batch's metadata contradicts its bytes or the topic's schema, or sets a field that is the appliance's.", "Make the batch with an Arrow library from the topic's schema; see docs/format.md."),
        _row(_C.SCHEMA_MISMATCH, False, "The data does not match the topic's schema.", "Compare with `tailrace topic describe NAME` and cast or rename the columns."),
        _row(_C.INVALID_SCHEMA, False, "The schema cannot be a topic's schema.", "Use plain column types: no dictionaries, unions, views or columns of nulls."),
        _row(_C.INVALID_TOPIC_NAME, False, "The topic name is not allowed.", "Use 1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-', and not '.' or '..'."),
        _row(_C.TOPIC_EXISTS, False, "A topic of this name exists.", "Choose another name, or use the topic as it is."),
        _row(_C.INVALID_SETTING, False, "A setting is unknown or has a value that is not allowed.", "Correct the setting that the message names."),
        _row(_C.OFFSET_OUT_OF_RANGE, False, "The offset lies outside the log.", "Seek to an offset between the beginning and the end, or set auto_offset_reset to earliest or latest."),
        _row(_C.OUT_OF_ORDER_SEQUENCE, True, "An earlier batch of this producer is missing.", "Send the batches again in order; the SDK does."),
        _row(_C.UNKNOWN_SEQUENCE, False, "The partition knows nothing of this producer's earlier batches.", "Take a new epoch and start at sequence 0; the SDK does."),
        _row(_C.STALE_PRODUCER_EPOCH, False, "A newer producer with the same id has taken over.", "Close this producer: another one replaced it."),
        _row(_C.NOT_READY, True, "The appliance is still starting or restarting a process.", "Try again shortly; the SDK does."),
        _row(_C.SHUTTING_DOWN, True, "The appliance is stopping.", "Try again when it has restarted; the SDK does."),
        _row(_C.STORAGE_ERROR, False, "The disk failed to write or to read.", "Look at `tailrace status` and the system log, then repair or replace the disk."),
        _row(_C.PARTITION_OFFLINE, False, "The partition takes no writes since its disk failed.", "Look at `tailrace status` for the reason; repair the disk and restart the appliance."),
        _row(_C.DISK_FULL, True, "The data directory has no space left.", "Free space or lower retention; writing resumes by itself."),
        _row(_C.TIMED_OUT, True, "No answer came in time.", "Check that the appliance is running with `tailrace status`; raise request_timeout_ms if it is only slow."),
        _row(_C.SESSION_UNKNOWN, True, "The front does not know this connection (it restarted, or no handshake was made).", "Connect anew with a handshake; the SDK does."),
        _row(_C.UNSUPPORTED_VERSION, False, "Client and appliance have no protocol version in common.", "Upgrade the older of the two."),
        _row(_C.MALFORMED_REQUEST, False, "The request is not one of this protocol.", "Check that the client speaks Tailrace's protocol (docs/protocol.md) and that this is its port."),
        _row(_C.REQUEST_TOO_LARGE, False, "A length in the request is above its limit.", "Send less in one request."),
        _row(_C.CREDIT_EXCEEDED, False, "The client sent more bytes than it was granted.", "Wait for credit before sending; see docs/protocol.md."),
        _row(_C.UNKNOWN_API, False, "The request's API number is unknown.", "Upgrade the appliance, or use an API that the handshake lists."),
        _row(_C.LOG_TRUNCATED, False, "The log was cut below this offset after a crash.", "Seek to the offset that the message names; records above it were never durable."),
        _row(_C.NOT_SUPPORTED, False, "This is not supported.", "Choose one of the alternatives that the message names."),
        _row(_C.DELIVERY_TIMEOUT, False, "The record was not acknowledged within delivery_timeout_ms.", "It may or may not have been written; raise delivery_timeout_ms, or find out what slows the appliance with `tailrace status`."),
        _row(_C.BUFFER_EXHAUSTED, True, "buffer_memory stayed full for max_block_ms.", "Send more slowly, raise buffer_memory or max_block_ms, or find out what slows the appliance."),
        _row(_C.NOT_REACHABLE, True, "No appliance answers at this address.", "Start one with `tailrace serve`, or check the address."),
        _row(_C.CLIENT_CLOSED, False, "The client is closed.", "Create a new one."),
        _row(_C.INVALID_RECORD, False, "The record has a part of a wrong type.", "Correct the part that the message names."),
        _row(_C.INTERNAL_ERROR, False, "The appliance failed in a way that it should not.", "Look at its log and report it."),
        _row(_C.INVALID_REQUEST, False, "The request asks for something that makes no sense.", "Correct what the message names."),
        _row(_C.DELAY_NOT_ENABLED, False, "The topic takes no delayed records.", "Allow them with `tailrace topic alter NAME --config delay.enabled=true`, or send the record when it is due."),
        _row(_C.UNKNOWN_DELAY, False, "No such delayed record is pending: it was delivered, cancelled or rescheduled.", "Look at what is pending with `tailrace delay list TOPIC`."),
        _row(_C.TOO_MANY_REQUESTS, True, "More requests are under way than are allowed.", "Wait for answers before asking for more, and ask again shortly; the SDK does."),
        _row(_C.TOO_MANY_PRODUCERS, True, "The partition, or its worker, remembers as many producers as it may.", "Use fewer producers, and each for longer; or raise producer.ids.max. The SDK tries again until delivery_timeout_ms."),
        _row(_C.INVALID_GROUP, False, "The group's name is not allowed, or the group is of another kind.", "Use 1 to 249 characters without control characters; a name belongs to a consumer group or to a share group, not to both."),
        _row(_C.UNKNOWN_GROUP, False, "There is no such group.", "Check its spelling with `tailrace group list`."),
        _row(_C.GROUP_NOT_EMPTY, False, "The group has members.", "Stop its consumers first; `tailrace group describe NAME` names them."),
        _row(_C.GROUP_FULL, False, "The group has as many members as it may.", "Use fewer consumers, or raise group.members.max."),
        _row(_C.TOO_MANY_GROUPS, False, "There are as many groups as there may be.", "Delete groups that are not needed with `tailrace group delete NAME`, or raise groups.max."),
        _row(_C.UNKNOWN_MEMBER, False, "The group does not know this member: it left, or its session has timed out.", "Join again; the SDK does."),
        _row(_C.FENCED_MEMBER, False, "The member's epoch is not the group's: it was removed, or another consumer with its instance id has taken its place.", "Join again; the SDK does, unless another consumer has the same group_instance_id."),
        _row(_C.INSTANCE_ID_IN_USE, False, "Another live consumer of the group has this group_instance_id.", "Give each consumer an instance id of its own, or stop the other one."),
        _row(_C.PARTITION_NOT_OWNED, False, "The partition belongs to another member of the group now.", "Drop what was read of it: the member that has it now begins at the last committed offset."),
        _row(_C.UNSUPPORTED_ASSIGNOR, False, "The appliance has no assignor of this name, or the group's members name different ones.", "Use range, roundrobin or sticky, the same in all consumers of the group."),
        _row(_C.LOCK_LOST, False, "The record's lock has timed out: it may be with another consumer.", "Acknowledge sooner, or raise group.share.record.lock.duration.ms."),
        _row(_C.STALE_SLOT_MAP, True, "The topic's hash slots have moved since the client looked.", "Ask for the topic's metadata and route the records anew; the SDK does."),
    )
)  # fmt: skip
assert set(ERROR_TABLE) == set(ErrorCode)


_OK = ErrorCode.OK


def code_of(number: int) -> ErrorCode:
    """The code of a number from the wire; numbers of a newer version become INTERNAL_ERROR."""
    if not number:
        return _OK  # looking a member up takes longer than all else that is done with most answers
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.INTERNAL_ERROR
