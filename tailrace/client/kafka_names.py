"""What users of Kafka's clients write that is called something else here, or comes with a later version: each with a sentence that says what to write.

A method of a later version is there and raises NotSupportedError; a method under another client's name is not there (`hasattr` says so), and the
AttributeError says what it is called. Settings are alike: see `tailrace.settings.build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from tailrace.client_log import logger
from tailrace.errors import InvalidRequestError, NotSupportedError

TRANSACTIONS_LATER = (
    "transactions are not part of this version: send() with enable_idempotence (the default) writes each record once, in order"
)
SECURITY_LATER = "encryption and users are not part of this version: leave this out, and let the appliance listen on 127.0.0.1 or ipc://"

SETTINGS_LATER = {
    "enable_auto_offset_store": "offsets are not stored apart from their commit: set enable_auto_commit to False and commit what is done",
    **dict.fromkeys(("transaction_timeout_ms", "transactional_id"), TRANSACTIONS_LATER),
    "isolation_level": "transactions are not part of this version: every record that is read is committed, so leave it out",
}  # fmt: skip
"""Settings of Kafka's that a later version has -> the sentence."""

SETTINGS_ELSEWHERE = {
    "batch_num_messages": "batch_size counts bytes",
    "compression_codec": "it is compression_type",
    "consumer_timeout_ms": "poll(timeout_ms=...) waits for so long",
    "default_offset_commit_callback": "commit_async(callback=...) calls back",
    "default_topic_config": "its settings are given beside the others",
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
"""Settings that other clients call otherwise -> what to write."""


CONSUMER_ELSEWHERE = {
    "assignment_lost": "on_partitions_lost of the listener says so",
    "bootstrap_connected": "any call raises NotReachableError where no appliance answers",
    "commit_sync": "write commit()",
    "enforce_rebalance": "write unsubscribe() and subscribe(...)",
    "get_watermark_offsets": "write beginning_offsets([partition]) and end_offsets([partition])",
    "group_metadata": "write consumer_group_metadata()",
    "incremental_assign": "write assign() with all partitions that are to be read; those assigned already go on where they are",
    "incremental_unassign": "write assign() with those partitions that are to be read on",
    "list_topics": "write topics()",
    "member_id": "write memberid()",
    "partitions_for_topic": "write partitions_for(topic)",
    "seek_to_committed": "write seek(partition, committed(partition))",
    "store_offsets": "set enable_auto_commit to False, and write commit() or commit_async() when records are done with",
    "unassign": "write assign([])",
}
"""Methods of other clients' consumers -> what to write."""

_NO_POSITIONS = "a share group has no positions: records are acknowledged one by one"
_SET_START = "a share group has no positions: write `tailrace group reset-offsets` while it has no consumers"
_PAUSE = "a topic is paused for all its groups: write `tailrace topic alter TOPIC --config delivery.paused={}`"
_EVERY_PARTITION = "every consumer of a share group is given records of all partitions"
_ASK_A_CONSUMER = "write tailrace.Consumer(bootstrap=...).{}"
SHARE_CONSUMER_ELSEWHERE = {
    **dict.fromkeys(("assign", "incremental_assign"), "a share group has no assignment: write ShareConsumer(*topics, group_id=...)"),
    **dict.fromkeys(("assignment", "assignment_lost"), _EVERY_PARTITION),
    **{
        name: _ASK_A_CONSUMER.format(here)
        for name, here in {
            "beginning_offsets": "beginning_offsets([partition])", "end_offsets": "end_offsets([partition])", "list_topics": "topics()",
            "get_watermark_offsets": "beginning_offsets([partition]), and end_offsets([partition])", "topics": "topics()",
            "offsets_for_times": "offsets_for_times({partition: time})", "partitions_for": "partitions_for(topic)",
            "partitions_for_topic": "partitions_for(topic)",
        }.items()
    },
    "commit_async": "what was acknowledged goes with the next poll(); write commit() to wait for it",
    "commit_sync": "write commit()",
    "committed": "a share group has no committed offsets: `tailrace group describe` shows how far it is",
    "consume": "write poll(timeout_ms=..., max_records=...)",
    **dict.fromkeys(("consumer_group_metadata", "group_metadata", "member_id", "memberid"), "`tailrace group describe` names its members"),
    **dict.fromkeys(("pause", "paused"), _PAUSE.format("true")),
    **dict.fromkeys(("highwater", "lag"), "`tailrace group describe` shows how far the group is"),
    "poll_arrow": "records of a share group come one by one: write poll()",
    "position": _NO_POSITIONS,
    "resume": _PAUSE.format("false"),
    "retry_later": 'write acknowledge(record, "release"): it comes again at once',
    **dict.fromkeys(("seek", "seek_to_beginning", "seek_to_committed", "seek_to_end"), _SET_START),
    "set_acknowledgement_commit_callback": "commit() raises LockLostError, whose `refused` says what was not acknowledged",
    "store_offsets": 'write acknowledge(record, "accept")',
    **dict.fromkeys(("incremental_unassign", "unassign"), "write unsubscribe()"),
}  # fmt: skip
"""Methods of consumers, here and in other clients, that a share consumer has not -> what to write."""

_KEYWORDS = {
    "timeout": "write {method}(timeout_ms=...), in milliseconds: timeout_ms=1000 is a second",
    "update_offsets": "leave it out: what {method}() has returned is passed over by the next one",
}
"""Arguments of other clients' `poll` -> what to write."""

SECONDS_MAX = 60.0
_wondered = False


def wonder_at_seconds(timeout_ms: float) -> None:
    """Say, once in a process, that `poll(1.0)` waits a millisecond: confluent-kafka's takes seconds, and a loop over it looks as if nothing came."""
    global _wondered
    if not _wondered and 0 < timeout_ms <= SECONDS_MAX and timeout_ms.is_integer():
        _wondered = True
        logger.warning(
            "poll(%s) waits %s ms at most: its timeout is in milliseconds, and it returns a list of records. consume(num_messages, timeout) takes seconds",
            timeout_ms,
            timeout_ms,
        )


def refuse_keywords(method: str, given: Mapping[str, Any]) -> NoReturn:
    """A method was given keywords that it does not take. Raises InvalidRequestError for one of another client's, TypeError as Python does for others."""
    for name in given:
        if name in _KEYWORDS:
            raise InvalidRequestError(f"{method}() has no argument {name}: {_KEYWORDS[name].format(method=method)}")
    raise TypeError(f"{method}() got an unexpected keyword argument {next(iter(given))!r}")


def setting_hint(name: str) -> str:
    """What to say of a setting that other clients have and this one does not under the name; empty: nothing is known of it. Raises NotSupportedError for
    one of a later version.
    """
    if name in SETTINGS_LATER:
        raise NotSupportedError(f"{name}: {SETTINGS_LATER[name]}")
    if name.startswith(("sasl_", "ssl_", "security_")):
        raise NotSupportedError(f"{name}: {SECURITY_LATER}")
    return SETTINGS_ELSEWHERE.get(name, "")


class OtherNames:
    """A client that says what another client's method is called here."""

    __slots__ = ()

    _elsewhere: ClassVar[dict[str, str]] = {}
    """Method of another client -> what to write."""

    def __getattr__(self, name: str) -> Any:
        """Only for what is not there. Raises AttributeError."""
        kind = type(self)
        known = kind.__dict__.get("_elsewhere", {}).get(name)
        hint = f"; {known}" if known is not None else ""
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)


class OtherProducerNames:
    """confluent-kafka's methods of a producer. They are methods here, too: a `__getattr__` would slow every `send` down."""

    __slots__ = ()

    def produce(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """confluent-kafka's name: write `send(topic, value, key, on_delivery=...)`. Raises NotSupportedError."""
        raise NotSupportedError("a Producer has no produce(): write send(topic, value, key, on_delivery=...)")

    def poll(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """confluent-kafka's name: on_delivery is called without it. Raises NotSupportedError."""
        raise NotSupportedError("a Producer has no poll(): on_delivery is called without it; leave it out, or write flush()")


class TransactionsLater:
    """Kafka's transactions, on a producer: a later version has them."""

    __slots__ = ()

    def init_transactions(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(TRANSACTIONS_LATER)

    def begin_transaction(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(TRANSACTIONS_LATER)

    def commit_transaction(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(TRANSACTIONS_LATER)

    def abort_transaction(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(TRANSACTIONS_LATER)

    def send_offsets_to_transaction(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(TRANSACTIONS_LATER)
