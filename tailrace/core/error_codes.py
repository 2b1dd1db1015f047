"""The table of error codes: number, name, retriable, meaning and advice.

A retriable code means that the same request, unchanged, may succeed later. `docs/protocol.md` shows
this table, and a test compares the two.

Invariants:
- A number is never reused and never changes its name.
- 0 is success.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import NamedTuple


@unique
class ErrorCode(IntEnum):
    """Error numbers of the protocol."""

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
    UNKNOWN_TOPIC_ID = 53
    PRODUCER_FENCED = 54
    CONCURRENT_TRANSACTIONS = 55
    TRANSACTION_ABORTED = 56
    INVALID_TRANSACTION = 57
    UNKNOWN_TRANSACTIONAL_ID = 58
    QUOTA_EXCEEDED = 59
    AUDIT_UNAVAILABLE = 60
    OFFSET_CONFLICT = 61
    NOT_AUTHENTICATED = 70
    NOT_AUTHORIZED = 71


class ErrorRow(NamedTuple):
    """One row of the error table."""

    code: ErrorCode
    retriable: bool
    meaning: str
    advice: str


def _row(code: ErrorCode, retriable: bool, meaning: str, advice: str) -> tuple[ErrorCode, ErrorRow]:
    return code, ErrorRow(code, retriable, meaning, advice)


_C = ErrorCode
ERROR_TABLE: dict[ErrorCode, ErrorRow] = dict(
    (
        _row(
            _C.OK,
            False,
            "Success.",
            "Nothing.",
        ),
        _row(
            _C.UNKNOWN_TOPIC,
            False,
            "The topic does not exist.",
            (
                "Create it with `tailrace topic create NAME`, or check its spelling with `tailrace "
                "topic list`."
            ),
        ),
        _row(
            _C.PARTITION_OUT_OF_RANGE,
            False,
            "The topic has no such partition.",
            (
                "Use a partition from 0 to one less than `partitions` in `tailrace topic describe "
                "NAME`."
            ),
        ),
        _row(
            _C.RECORD_TOO_LARGE,
            False,
            "The record or batch is larger than the limit, as sent or after decompression.",
            (
                "Send smaller records or batches, or raise the topic's max.message.bytes and the "
                "producer's max_request_size."
            ),
        ),
        _row(
            _C.CORRUPT_BATCH,
            False,
            "A batch does not match its checksum.",
            (
                "On produce, send it again from the source. On consume, run `tailrace log dump` on "
                "the segment that the message names."
            ),
        ),
        _row(
            _C.UNSUPPORTED_BATCH,
            False,
            "The batch header has an unsupported magic, version, length or feature.",
            (
                "Use a client of the same major version as the appliance. The appliance's log names "
                "what it rejected."
            ),
        ),
        _row(
            _C.UNSAFE_BATCH,
            False,
            (
                "The batch's metadata contradicts its bytes or the topic's schema, or sets a field "
                "that only the appliance may set."
            ),
            "Make the batch with an Arrow library from the topic's schema. See docs/format.md.",
        ),
        _row(
            _C.SCHEMA_MISMATCH,
            False,
            "The data does not match the topic's schema.",
            "Compare with `tailrace topic describe NAME` and cast or rename the columns.",
        ),
        _row(
            _C.INVALID_SCHEMA,
            False,
            "The schema cannot be a topic's schema.",
            "Correct what the message names. See docs/schemas.md for types and allowed changes.",
        ),
        _row(
            _C.INVALID_TOPIC_NAME,
            False,
            "The topic name is not allowed.",
            (
                "Use 1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-'. The names '.' and "
                "'..' are reserved."
            ),
        ),
        _row(
            _C.TOPIC_EXISTS,
            False,
            "A topic of this name exists.",
            "Choose another name, or use the existing topic.",
        ),
        _row(
            _C.INVALID_SETTING,
            False,
            "A setting is unknown, or its value is not allowed.",
            "Correct the setting that the message names.",
        ),
        _row(
            _C.OFFSET_OUT_OF_RANGE,
            False,
            "The offset is outside the log.",
            (
                "Seek to an offset between the beginning and the end of the log, or set "
                "auto_offset_reset to earliest or latest."
            ),
        ),
        _row(
            _C.OUT_OF_ORDER_SEQUENCE,
            True,
            "An earlier batch of this producer is missing.",
            "Send the batches again in order. The SDK does this.",
        ),
        _row(
            _C.UNKNOWN_SEQUENCE,
            False,
            "The partition has no state for this producer's earlier batches.",
            "Take a new producer epoch and start at sequence 0. The SDK does this.",
        ),
        _row(
            _C.STALE_PRODUCER_EPOCH,
            False,
            "A newer producer with the same id has taken over.",
            "Close this producer: another one replaced it.",
        ),
        _row(
            _C.NOT_READY,
            True,
            "The appliance is starting, or restarting a process.",
            "Try again shortly. The SDK does this.",
        ),
        _row(
            _C.SHUTTING_DOWN,
            True,
            "The appliance is stopping.",
            "Try again when it has restarted. The SDK does this.",
        ),
        _row(
            _C.STORAGE_ERROR,
            False,
            "A disk read or write failed.",
            "Check `tailrace status` and the system log, then repair or replace the disk.",
        ),
        _row(
            _C.PARTITION_OFFLINE,
            False,
            "The partition rejects writes since its disk failed.",
            "Find the reason with `tailrace status`, repair the disk and restart the appliance.",
        ),
        _row(
            _C.DISK_FULL,
            True,
            "The data directory has no space left.",
            "Free space or lower retention. Writes resume automatically.",
        ),
        _row(
            _C.TIMED_OUT,
            True,
            "No response came in time.",
            (
                "Check with `tailrace status` that the appliance is running. If it is slow, raise "
                "the timeout of the call, or request_timeout_ms."
            ),
        ),
        _row(
            _C.SESSION_UNKNOWN,
            True,
            (
                "The front does not know this connection: the front restarted, or there was no "
                "handshake."
            ),
            "Connect again with a handshake. The SDK does this.",
        ),
        _row(
            _C.UNSUPPORTED_VERSION,
            False,
            "Client and appliance have no protocol version in common.",
            "Upgrade the older of the two.",
        ),
        _row(
            _C.MALFORMED_REQUEST,
            False,
            "The request does not follow the protocol.",
            (
                "Check that the client speaks Tailrace's protocol (docs/protocol.md) and that it "
                "connects to the right port."
            ),
        ),
        _row(
            _C.REQUEST_TOO_LARGE,
            False,
            "A length in the request exceeds its limit.",
            "Send less in one request.",
        ),
        _row(
            _C.CREDIT_EXCEEDED,
            False,
            "The client sent more bytes than its credit.",
            "Wait for credit before sending. See docs/protocol.md.",
        ),
        _row(
            _C.UNKNOWN_API,
            False,
            "The request's API number is unknown.",
            "Upgrade the appliance, or use an API that the handshake lists.",
        ),
        _row(
            _C.LOG_TRUNCATED,
            False,
            "The log was truncated below this offset after a crash.",
            "Seek to the offset that the message names. Records from there on were never durable.",
        ),
        _row(
            _C.NOT_SUPPORTED,
            False,
            "The operation is not supported.",
            "Use one of the alternatives that the message names.",
        ),
        _row(
            _C.DELIVERY_TIMEOUT,
            False,
            "The record was not acknowledged within delivery_timeout_ms.",
            (
                "The record may or may not be stored. Raise delivery_timeout_ms, or find out with "
                "`tailrace status` what slows the appliance."
            ),
        ),
        _row(
            _C.BUFFER_EXHAUSTED,
            True,
            "buffer_memory stayed full for max_block_ms.",
            (
                "Send more slowly, raise buffer_memory or max_block_ms, or find out what slows the "
                "appliance."
            ),
        ),
        _row(
            _C.NOT_REACHABLE,
            True,
            "No appliance answers at this address.",
            "Start one with `tailrace serve`, or check the address.",
        ),
        _row(
            _C.CLIENT_CLOSED,
            False,
            "The client is closed.",
            "Create a new one.",
        ),
        _row(
            _C.INVALID_RECORD,
            False,
            (
                "A part of the record has the wrong type, or it has no key, which each record of a "
                "compacted topic needs."
            ),
            "Correct the part that the message names.",
        ),
        _row(
            _C.INTERNAL_ERROR,
            False,
            "Internal error in the appliance.",
            "Look at its log and report the error.",
        ),
        _row(
            _C.INVALID_REQUEST,
            False,
            "The request or one of its arguments is invalid.",
            "Correct what the message names.",
        ),
        _row(
            _C.DELAY_NOT_ENABLED,
            False,
            "The topic does not accept delayed records.",
            (
                "Enable them with `tailrace topic alter NAME --config delay.enabled=true`, or send "
                "the record when it is due."
            ),
        ),
        _row(
            _C.UNKNOWN_DELAY,
            False,
            "No such delayed record is pending: it was delivered, cancelled or rescheduled.",
            "List pending records with `tailrace delay list TOPIC`.",
        ),
        _row(
            _C.TOO_MANY_REQUESTS,
            True,
            "The limit of concurrent requests is reached.",
            "Wait for responses, then try again shortly. The SDK does this.",
        ),
        _row(
            _C.TOO_MANY_PRODUCERS,
            True,
            "The partition or its worker has reached its limit of remembered producers.",
            (
                "Use fewer producers and keep each open longer, or raise producer.ids.max. The SDK "
                "tries again until delivery_timeout_ms."
            ),
        ),
        _row(
            _C.INVALID_GROUP,
            False,
            "The group's name is not allowed, or the group is of another kind.",
            (
                "Use 1 to 249 characters without control characters. A name belongs to a consumer "
                "group or to a share group, not to both."
            ),
        ),
        _row(
            _C.UNKNOWN_GROUP,
            False,
            "The group does not exist.",
            "Check its spelling with `tailrace group list`.",
        ),
        _row(
            _C.GROUP_NOT_EMPTY,
            False,
            "The group has members.",
            "Stop its consumers first. `tailrace group describe NAME` lists them.",
        ),
        _row(
            _C.GROUP_FULL,
            False,
            "The group has reached its limit of members.",
            "Use fewer consumers, or raise group.members.max.",
        ),
        _row(
            _C.TOO_MANY_GROUPS,
            False,
            "The limit of groups is reached.",
            "Delete unused groups with `tailrace group delete NAME`, or raise groups.max.",
        ),
        _row(
            _C.UNKNOWN_MEMBER,
            False,
            "The group does not know this member: it left, or its session timed out.",
            "Join again. The SDK does this.",
        ),
        _row(
            _C.FENCED_MEMBER,
            False,
            (
                "The member was fenced: it was removed from the group, or another consumer with its "
                "instance id took its place."
            ),
            (
                "Join again. The SDK does this, unless another consumer has the same "
                "group_instance_id."
            ),
        ),
        _row(
            _C.INSTANCE_ID_IN_USE,
            False,
            "Another live consumer of the group has this group_instance_id.",
            "Give each consumer its own instance id, or stop the other one.",
        ),
        _row(
            _C.PARTITION_NOT_OWNED,
            False,
            "The partition belongs to another member of the group now.",
            "Drop the records read from it: the new owner begins at the last committed offset.",
        ),
        _row(
            _C.UNSUPPORTED_ASSIGNOR,
            False,
            (
                "The appliance has no assignor of this name, or the group's members name different "
                "ones."
            ),
            "Use range, roundrobin or sticky, the same in all consumers of the group.",
        ),
        _row(
            _C.LOCK_LOST,
            False,
            "The record's lock has expired: another consumer may have the record.",
            "Acknowledge sooner, or raise group.share.record.lock.duration.ms.",
        ),
        _row(
            _C.STALE_SLOT_MAP,
            True,
            "The topic's hash slots have moved since the client read the slot map.",
            "Request the topic's metadata and route the records again. The SDK does this.",
        ),
        _row(
            _C.UNKNOWN_TOPIC_ID,
            False,
            "The topic of this id was deleted; another one may have its name now.",
            (
                "Drop the records read from the deleted topic. For the one that has the name now, "
                "assign or subscribe again and begin at its first record."
            ),
        ),
        _row(
            _C.PRODUCER_FENCED,
            False,
            "Another producer has taken over the transactional id.",
            (
                "Stop this producer. If both belong to one program, give each its own "
                "transactional_id."
            ),
        ),
        _row(
            _C.CONCURRENT_TRANSACTIONS,
            True,
            "The end of an earlier transaction of this transactional id is being carried out.",
            "Try again in a moment. The SDK does this.",
        ),
        _row(
            _C.TRANSACTION_ABORTED,
            False,
            "The transaction was aborted, and nothing of it will be read as committed.",
            (
                "Call abort_transaction() and repeat the whole transaction. After a timeout make "
                "it shorter, or raise transaction_timeout_ms."
            ),
        ),
        _row(
            _C.INVALID_TRANSACTION,
            False,
            "The call does not fit the state of the transaction.",
            (
                "Make the call that the message names. The calls of a transaction and their order "
                "are in docs/transactions.md."
            ),
        ),
        _row(
            _C.UNKNOWN_TRANSACTIONAL_ID,
            False,
            "The appliance does not know the transactional id.",
            "Look at `tailrace transaction list`. An id is forgotten when it was long unused.",
        ),
        _row(
            _C.QUOTA_EXCEEDED,
            False,
            "A quota of a sum is used up: stored bytes, topics, connections or the like.",
            (
                "`tailrace quota list` shows it. Delete what is not needed, or raise it with "
                "`tailrace quota set`."
            ),
        ),
        _row(
            _C.AUDIT_UNAVAILABLE,
            True,
            "The audit log cannot be written, so administration is refused.",
            "Free space on the disk of the audit log, or repair it. Records are served meanwhile.",
        ),
        _row(
            _C.OFFSET_CONFLICT,
            False,
            "The partition does not end at the offset that the batch requires.",
            (
                "Look up the end of the partition and what lies before it, and go on from there: "
                "another producer has written, or an earlier attempt has succeeded."
            ),
        ),
        _row(
            _C.NOT_AUTHENTICATED,
            False,
            "The appliance does not accept who the client says it is.",
            (
                "Use a context of `tailrace user add NAME --out FILE`, for a user who exists of "
                "`tailrace user rotate NAME --out FILE`. `tailrace user list` shows disabled users "
                "and expired keys."
            ),
        ),
        _row(
            _C.NOT_AUTHORIZED,
            False,
            "The user may not do this.",
            (
                "An administrator can allow it with `tailrace acl add`; `tailrace acl test` says "
                "which rule decides."
            ),
        ),
    )
)
assert set(ERROR_TABLE) == set(ErrorCode)


_OK = ErrorCode.OK


def code_of(number: int) -> ErrorCode:
    """The code of a number in a response. A number of a newer version is INTERNAL_ERROR."""
    if not number:
        return _OK  # the common case, without the slow lookup of an enum member
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.INTERNAL_ERROR
