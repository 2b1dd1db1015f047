"""Maps names from other Kafka clients to ours, for error messages.

Methods of a later version exist and raise NotSupportedError. Methods under another client's name do
not exist (`hasattr` is false); the AttributeError says what to write. Settings are treated alike in
`tailrace.client.config.setting_fields.build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from tailrace.core.errors import InvalidRequestError, NotSupportedError
from tailrace.core.log import logger

NO_SECURITY = (
    "encryption and users come with a context, here: leave this out, and give context=FILE, the "
    "file of `tailrace user add NAME --out FILE` (docs/security.md)"
)

UNSUPPORTED_SETTINGS = {
    "enable_auto_offset_store": "offsets are stored only by a commit: set enable_auto_commit to "
                                "False and commit records after processing them",
}  # fmt: skip
"""Settings of Kafka that this version lacks -> the advice."""

RENAMED_SETTINGS = {
    "isolation_level": "only a Consumer has it: a share group has committed records alone",
    "batch_num_messages": "batch_size counts bytes",
    "compression_codec": "it is compression_type",
    "consumer_timeout_ms": "poll(timeout_ms=...) takes the timeout",
    "default_offset_commit_callback": "commit_async(callback=...) calls back",
    "default_topic_config": "give its settings beside the others",
    "fetch_message_max_bytes": "it is max_partition_fetch_bytes",
    "fetch_wait_max_ms": "it is fetch_max_wait_ms",
    "group_protocol": "there is one protocol, that of KIP-848: leave it out",
    "group_remote_assignor": "it is partition_assignment_strategy",
    "max_in_flight": "it is max_in_flight_requests_per_connection",
    "message_max_bytes": "it is max_request_size",
    "message_send_max_retries": "it is retries",
    "message_timeout_ms": "it is delivery_timeout_ms",
    "on_commit": "commit_async(callback=...) calls back",
    "metadata_broker_list": "it is bootstrap, or bootstrap_servers",
    "queue_buffering_max_kbytes": "it is buffer_memory, in bytes",
    "queue_buffering_max_messages": "buffer_memory counts bytes",
    "queue_buffering_max_ms": "it is linger_ms",
    "request_required_acks": "it is acks",
}
"""Settings under other clients' names -> what to write."""


RENAMED_CONSUMER_METHODS = {
    "assignment_lost": "on_partitions_lost of the listener reports it",
    "bootstrap_connected": "any call raises NotReachableError if no appliance responds",
    "commit_sync": "write commit()",
    "enforce_rebalance": "write unsubscribe() and subscribe(...)",
    "get_watermark_offsets": "write beginning_offsets([partition]) and end_offsets([partition])",
    "incremental_assign": "write assign() with all partitions to read; those already assigned keep "
    "their positions",
    "incremental_unassign": "write assign() with the partitions to keep",
    "list_topics": "write topics()",
    "member_id": "write memberid()",
    "partitions_for_topic": "write partitions_for(topic)",
    "seek_to_committed": "write seek(partition, committed(partition))",
    "store_offsets": "set enable_auto_commit to False, and write commit() or commit_async() after "
    "processing the records",
    "unassign": "write assign([])",
}
"""Methods of other clients' consumers -> what to write."""

_NO_POSITIONS = "a share group has no positions: records are acknowledged one by one"
_SET_START = (
    "a share group has no positions: write `tailrace group reset-offsets` while it has no consumers"
)
_PAUSE = (
    "a topic is paused for all its groups: write `tailrace topic alter TOPIC --config "
    "delivery.paused={}`"
)
_EVERY_PARTITION = "every consumer of a share group receives records of all partitions"
_USE_A_CONSUMER = "write tailrace.Consumer(bootstrap=...).{}"
RENAMED_SHARE_CONSUMER_METHODS = {
    **dict.fromkeys(("assign", "incremental_assign"), "a share group has no assignment: write "
                                                      "ShareConsumer(*topics, group_id=...)"),
    **dict.fromkeys(("assignment", "assignment_lost"), _EVERY_PARTITION),
    **{
        name: _USE_A_CONSUMER.format(here)
        for name, here in {
            "beginning_offsets": "beginning_offsets([partition])",
            "end_offsets": "end_offsets([partition])", "list_topics": "topics()",
            "get_watermark_offsets": "beginning_offsets([partition]), and end_offsets([partition])",
            "topics": "topics()",
            "offsets_for_times": "offsets_for_times({partition: time})",
            "partitions_for": "partitions_for(topic)",
            "partitions_for_topic": "partitions_for(topic)",
        }.items()
    },
    "commit_async": "acknowledgements go with the next poll(); write commit() to wait for them",
    "commit_sync": "write commit()",
    "committed": "a share group has no committed offsets: `tailrace group describe` shows its "
                 "progress",
    "consume": "write poll(timeout_ms=..., max_records=...)",
    **dict.fromkeys(("consumer_group_metadata", "group_metadata", "member_id", "memberid"),
                    "`tailrace group describe` names its members"),
    **dict.fromkeys(("pause", "paused"), _PAUSE.format("true")),
    **dict.fromkeys(("highwater", "lag"), "`tailrace group describe` shows the group's progress"),
    "poll_arrow": "a share group delivers single records: write poll()",
    "position": _NO_POSITIONS,
    "positions": _NO_POSITIONS,
    "resume": _PAUSE.format("false"),
    "retry_later": 'write acknowledge(record, "release"): it is delivered again at once',
    **dict.fromkeys(("seek", "seek_to_beginning", "seek_to_committed", "seek_to_end"), _SET_START),
    "set_acknowledgement_commit_callback": "commit() raises LockLostError, whose `refused` lists "
                                           "the records that were not acknowledged",
    "store_offsets": 'write acknowledge(record, "accept")',
    **dict.fromkeys(("incremental_unassign", "unassign"), "write unsubscribe()"),
}  # fmt: skip
"""Methods of other consumers that a share consumer lacks -> what to write."""

_KEYWORDS = {
    "timeout": "write {method}(timeout_ms=...), in milliseconds: timeout_ms=1000 is a second",
    "update_offsets": "leave it out: the next {method}() skips the records that this one returned",
}
"""Arguments of other clients' `poll` -> what to write."""

SECONDS_MAX = 60.0
_warned = False


def warn_if_seconds(timeout_ms: float) -> None:
    """Warn once in a process that `poll(1.0)` waits one millisecond.

    confluent-kafka's poll takes seconds, so its users would see a loop without records.
    """
    global _warned
    if not _warned and 0 < timeout_ms <= SECONDS_MAX and timeout_ms.is_integer():
        _warned = True
        logger.warning(
            "poll(%s) waits at most %s ms: its timeout is in milliseconds, and it returns a list "
            "of records. consume(num_messages, timeout) takes seconds",
            timeout_ms,
            timeout_ms,
        )


def refuse_keywords(method: str, given: Mapping[str, Any]) -> NoReturn:
    """Raise for keywords that a method does not take.

    InvalidRequestError for another client's keyword, else TypeError as Python does.
    """
    for name in given:
        if name in _KEYWORDS:
            raise InvalidRequestError(
                f"{method}() has no argument {name}: {_KEYWORDS[name].format(method=method)}"
            )
    raise TypeError(f"{method}() got an unexpected keyword argument {next(iter(given))!r}")


def setting_hint(name: str) -> str:
    """The advice for a setting under another client's name, "" if it is unknown.

    Raises NotSupportedError for a setting of a later version.
    """
    if name in UNSUPPORTED_SETTINGS:
        raise NotSupportedError(f"{name}: {UNSUPPORTED_SETTINGS[name]}")
    if name.startswith(("sasl_", "ssl_", "security_")):
        raise NotSupportedError(f"{name}: {NO_SECURITY}")
    return RENAMED_SETTINGS.get(name, "")


class RenamedMethods:
    """Mixin whose AttributeError for another client's method says what to write."""

    __slots__ = ()

    _renamed: ClassVar[dict[str, str]] = {}
    """Method of another client -> what to write."""

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with the advice. Python calls this only for missing attributes."""
        kind = type(self)
        known = kind.__dict__.get("_renamed", {}).get(name)
        hint = f"; {known}" if known is not None else ""
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
        )


class RenamedProducerMethods:
    """confluent-kafka's producer methods, which raise NotSupportedError.

    They are real methods because a `__getattr__` would slow down every `send`.
    """

    __slots__ = ()

    def produce(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Raise NotSupportedError: write `send(topic, value, key, on_delivery=...)`."""
        raise NotSupportedError(
            "a Producer has no produce(): write send(topic, value, key, on_delivery=...)"
        )

    def poll(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not supported: on_delivery is called without it. Raises NotSupportedError."""
        raise NotSupportedError(
            "a Producer has no poll(): on_delivery is called without it. Leave it out, or write "
            "flush()"
        )
