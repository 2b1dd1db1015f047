"""What users of Kafka's clients write that is called something else here, or comes with a later version: each with a sentence that says what to write.

A method of a later version is there and raises NotSupportedError; a method under another client's name is not there (`hasattr` says so), and the
AttributeError says what it is called. Settings are alike: see `tailrace.settings.build`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from tailrace.errors import NotSupportedError

GROUPS_LATER = "consumer groups are not part of this version: leave group_id out and read with assign() or topics, keeping offsets yourself"
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
    "default_topic_config": "its settings are given beside the others",
    "fetch_message_max_bytes": "it is max_partition_fetch_bytes",
    "fetch_wait_max_ms": "it is fetch_max_wait_ms",
    "max_in_flight": "it is max_in_flight_requests_per_connection",
    "message_max_bytes": "it is max_request_size",
    "message_send_max_retries": "it is retries",
    "message_timeout_ms": "it is delivery_timeout_ms",
    "metadata_broker_list": "it is bootstrap, or bootstrap_servers",
    "queue_buffering_max_kbytes": "it is buffer_memory, in bytes",
    "queue_buffering_max_messages": "buffer_memory counts bytes",
    "queue_buffering_max_ms": "it is linger_ms",
    "request_required_acks": "it is acks",
}
"""Settings that other clients call otherwise -> what to write."""


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


class GroupsOfAdminLater:
    """Kafka's administration of consumer groups: a later version has it."""

    __slots__ = ()

    def list_groups(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(GROUPS_LATER)

    def describe_groups(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(GROUPS_LATER)

    def list_group_offsets(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(GROUPS_LATER)

    def alter_group_offsets(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(GROUPS_LATER)

    def delete_groups(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(GROUPS_LATER)
