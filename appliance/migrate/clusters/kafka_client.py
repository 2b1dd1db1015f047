"""A Kafka cluster through confluent-kafka: its topics, groups and clients.

The library is imported when a cluster is first asked. Its options pass through from a file of
properties, so SASL and TLS are as librdkafka has them.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from appliance.migrate.errors import MigrationError, NoClientError
from tailrace.core.topic_partition import TopicPartition

TIMEOUT_S = 20.0
GROUP_RETRY_S = 30.0
COORDINATOR_ERRORS = (
    "NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "_TIMED_OUT",
    "NOT_COORDINATOR_FOR_GROUP", "GROUP_COORDINATOR_NOT_AVAILABLE", "GROUP_LOAD_IN_PROGRESS",
)  # fmt: skip
ANSWER_S = 10.0
"""A cluster that gives no metadata for this long does not answer."""
ATTEMPTS_S = (0.5, 1.0, 2.0, ANSWER_S)
"""A first look is short: errors of the login are reported between attempts."""
CONNECT_S = 2.0
LOGIN_ERRORS = ("_AUTHENTICATION", "_SSL")
_ADDRESS = re.compile(r"(kafka:(//)?)?(?P<servers>[^\s/@]+:\d{1,5}(,[^\s/@]+:\d{1,5})*)", re.ASCII)
_JAVA_ALONE = re.compile(r"(ssl|sasl)\..*(jaas|store|callback\.handler).*")


class TopicDescription(NamedTuple):
    """A topic of the source."""

    name: str
    topic_id: str
    partition_count: int
    configs: dict[str, str]
    """Those that were set for the topic."""


def server_of(address: str) -> str:
    """`kafka:HOST:PORT` as librdkafka takes it. Raises MigrationError."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise MigrationError(f"{address!r} is not a Kafka cluster; write kafka:HOST:PORT.")
    return found["servers"]


def properties_of(path: str | None) -> dict[str, str]:
    """Options of librdkafka from a file of `name=value` lines. Raises MigrationError, OSError."""
    if path is None:
        return {}
    found: dict[str, str] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if not text or text[0] in "#!":
                continue
            name, separator, value = text.partition("=")
            if not separator:
                raise MigrationError(f"{path} has no name=value in line {number}.")
            name = name.strip()
            if _JAVA_ALONE.fullmatch(name):
                raise MigrationError(
                    f"{path} has {name}, which is Java's; librdkafka takes sasl.username, "
                    "sasl.password, ssl.ca.location, ssl.certificate.location and ssl.key.location."
                )
            found[name] = value.strip()
    return found


def library() -> Any:
    """confluent_kafka. Raises NoClientError."""
    try:
        import confluent_kafka
    except ImportError:
        raise NoClientError from None
    return confluent_kafka


class KafkaCluster:
    """One cluster."""

    def __init__(
        self, servers: str, options: Mapping[str, str], log: Callable[[str], None]
    ) -> None:
        """`log` gets the sentences of librdkafka's errors."""
        self.servers = servers
        self.problem = ""
        """The library's last error that is not over."""
        self._login_problem = self._hint = ""
        """The last error of SASL or TLS, and the last one that advises security.protocol."""
        self._log = log
        self._options = {
            "client.id": "tailrace-migrate",
            **options,
            "bootstrap.servers": servers,
            "error_cb": self._on_error,
            "log_level": 0,
        }
        self._library = library()
        try:
            from confluent_kafka.admin import AdminClient

            self._admin = AdminClient(self._options)
        except self._library.KafkaException as error:
            raise MigrationError(f"{sentence_of(error)}; look at --kafka-config.") from None

    def _on_error(self, error: Any) -> None:
        sentence = str(error.str() if hasattr(error, "str") else error)
        if hasattr(error, "name") and error.name() in LOGIN_ERRORS:
            self._login_problem = sentence
        elif "security.protocol" in sentence:
            self._hint = sentence
        if sentence != self.problem:
            self.problem = sentence
            self._log(f"kafka {self.servers}: {sentence}")

    def consumer(self, **options: Any) -> Any:
        """A consumer. Raises KafkaException."""
        return self._library.Consumer(
            {
                **self._options,
                "group.id": f"tailrace-migrate-{os.getpid()}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                **options,
            }
        )

    def producer(self, **options: Any) -> Any:
        """A producer. Raises KafkaException."""
        return self._library.Producer({**self._options, **options})

    # ---- topics ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise MigrationError if the cluster does not answer."""
        self.topic_names()

    def topic_names(self) -> dict[str, int]:
        """Name -> number of partitions, of all topics. Raises MigrationError."""
        found = self._metadata()
        self.problem = ""
        return {
            name: len(topic.partitions) for name, topic in found.topics.items() if not topic.error
        }

    def _metadata(self) -> Any:
        """The cluster's metadata. A refused login ends the attempts. Raises MigrationError."""
        self._login_problem = self._hint = ""
        until_s = time.monotonic() + ANSWER_S
        for attempt_s in ATTEMPTS_S:
            left_s = max(0.1, until_s - time.monotonic())
            try:
                return self._admin.list_topics(timeout=min(attempt_s, left_s))
            except self._library.KafkaException as error:
                failure = sentence_of(error)
            self._admin.poll(0)  # calls `_on_error`
            if self._login_problem or time.monotonic() >= until_s:
                break
        if self._login_problem:
            raise MigrationError(
                f"Kafka at {self.servers} refuses the connection: {self._login_problem}. Correct "
                "the user, the password or the certificates in the file of --kafka-config."
            )
        problem = self._hint or self.problem
        reason = f"({failure}{f'; {problem}' if problem else ''})"
        if _accepts_connections(self.servers):
            raise MigrationError(
                f"{self.servers} accepts connections, and gives no list of topics {reason}. If it "
                "needs SASL or TLS, give --kafka-config."
            )
        raise MigrationError(
            f"no Kafka cluster answers at {self.servers} {reason}. Check the address, and "
            "--kafka-config for SASL and TLS."
        )

    def describe(self, names: Iterable[str]) -> dict[str, TopicDescription]:
        """Topics that exist. Raises MigrationError."""
        from confluent_kafka import TopicCollection
        from confluent_kafka.admin import ConfigResource, ResourceType

        listed = self.topic_names()
        names = [name for name in names if name in listed]
        if not names:
            return {}
        ids = {
            name: self._result(f"the description of topic {name}", future)
            for name, future in self._admin.describe_topics(
                TopicCollection(names), request_timeout=TIMEOUT_S
            ).items()
        }
        configs = self._admin.describe_configs(
            [ConfigResource(ResourceType.TOPIC, name) for name in names],
            request_timeout=TIMEOUT_S,
        )
        found = {}
        for resource, future in configs.items():
            entries = self._result(f"the settings of topic {resource.name}", future)
            found[resource.name] = TopicDescription(
                resource.name, _text(ids[resource.name].topic_id), listed[resource.name],
                {
                    name: entry.value
                    for name, entry in entries.items()
                    if entry.source == 1 and entry.value is not None  # DYNAMIC_TOPIC_CONFIG
                },
            )  # fmt: skip
        return found

    def configs(self, name: str) -> dict[str, str]:
        """All settings of a topic. Raises MigrationError."""
        from confluent_kafka.admin import ConfigResource, ResourceType

        resource = ConfigResource(ResourceType.TOPIC, name)
        future = self._admin.describe_configs([resource], request_timeout=TIMEOUT_S)[resource]
        entries = self._result(f"the settings of topic {name}", future)
        return {setting: entry.value for setting, entry in entries.items()}

    def add_partitions(self, name: str, partitions: int) -> None:
        """Let a topic have as many partitions. Raises MigrationError."""
        from confluent_kafka.admin import NewPartitions

        future = self._admin.create_partitions(
            [NewPartitions(name, partitions)], request_timeout=TIMEOUT_S
        )[name]
        self._result(f"topic {name} more partitions", future)

    def alter(self, name: str, configs: Mapping[str, str]) -> None:
        """Change settings of a topic. Raises MigrationError."""
        from confluent_kafka.admin import (
            AlterConfigOpType,
            ConfigEntry,
            ConfigResource,
            ResourceType,
        )

        resource = ConfigResource(
            ResourceType.TOPIC,
            name,
            incremental_configs=[
                ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
                for setting, value in configs.items()
            ],
        )
        for future in self._admin.incremental_alter_configs([resource]).values():
            self._result(f"topic {name} its settings", future)

    def create(
        self, name: str, partitions: int, configs: Mapping[str, str], *, validate_only: bool = False
    ) -> None:
        """Create a topic, if it does not exist. Raises MigrationError."""
        from confluent_kafka.admin import NewTopic

        future = self._admin.create_topics(
            [NewTopic(name, partitions, -1, config=dict(configs))],
            request_timeout=TIMEOUT_S,
            validate_only=validate_only,
        )[name]
        try:
            future.result()
        except self._library.KafkaException as error:
            if error.args[0].code() != self._library.KafkaError.TOPIC_ALREADY_EXISTS:
                raise MigrationError(
                    f"topic {name} cannot be created in Kafka: {sentence_of(error)}."
                ) from None

    def bounds(
        self, partitions: Iterable[TopicPartition], isolation: str
    ) -> dict[TopicPartition, tuple[int, int]]:
        """(first offset, end) of partitions. Raises KafkaException."""
        from confluent_kafka.admin import OffsetSpec

        asked = list(partitions)
        firsts = self._list_offsets(asked, OffsetSpec.earliest(), isolation)
        ends = self._list_offsets(asked, OffsetSpec.latest(), isolation)
        return {each: (firsts[each], ends[each]) for each in asked}

    def _list_offsets(
        self, partitions: Iterable[TopicPartition], spec: Any, isolation: str
    ) -> dict[TopicPartition, int]:
        from confluent_kafka import IsolationLevel

        make = self._library.TopicPartition
        asked = {make(each.topic, each.partition): spec for each in partitions}
        if not asked:
            return {}
        level = IsolationLevel.READ_UNCOMMITTED
        if isolation == "read_committed":
            level = IsolationLevel.READ_COMMITTED
        found = self._admin.list_offsets(asked, isolation_level=level, request_timeout=TIMEOUT_S)
        return {
            TopicPartition(each.topic, each.partition): future.result(timeout=2 * TIMEOUT_S).offset
            for each, future in found.items()
        }

    # ---- groups ----------------------------------------------------------------------------------

    def groups(self) -> list[str]:
        """Names of the groups that have offsets. Raises MigrationError."""
        listed = self._result(
            "the list of groups", self._admin.list_consumer_groups(request_timeout=TIMEOUT_S)
        )
        return sorted(group.group_id for group in listed.valid)

    def member_count(self, group: str) -> int:
        """The number of a group's members. Raises MigrationError."""
        described = self._result(
            f"the description of group {group}",
            self._admin.describe_consumer_groups([group], request_timeout=TIMEOUT_S)[group],
        )
        return len(described.members)

    def offsets(self, group: str) -> dict[TopicPartition, tuple[int, str]]:
        """(committed offset, metadata) of each partition. Raises MigrationError."""
        return {
            TopicPartition(each.topic, each.partition): (each.offset, each.metadata or "")
            for each in self._of_group(group, self._admin.list_consumer_group_offsets)
            if each.offset >= 0
        }

    def set_offsets(self, group: str, offsets: Mapping[TopicPartition, tuple[int, str]]) -> None:
        """Set committed offsets. Raises MigrationError."""
        make = self._library.TopicPartition
        asked = [
            make(each.topic, each.partition, offset, *([metadata] if metadata else []))
            for each, (offset, metadata) in offsets.items()
        ]
        self._of_group(group, self._admin.alter_consumer_group_offsets, asked)

    def _of_group(
        self, group: str, ask: Callable[..., Any], partitions: list[Any] | None = None
    ) -> list[Any]:
        """The partitions of a response about a group's offsets. A coordinator that moves or starts
        is asked again for GROUP_RETRY_S. Raises MigrationError.
        """
        asked = [self._library.ConsumerGroupTopicPartitions(group, partitions)]
        until_s = time.monotonic() + GROUP_RETRY_S
        while True:
            try:
                found = ask(asked, request_timeout=TIMEOUT_S)[group].result(2 * TIMEOUT_S)
                errors = [each.error for each in found.topic_partitions if each.error is not None]
            except self._library.KafkaException as error:
                found, errors = None, [error.args[0]]
            if not errors and found is not None:
                return list(found.topic_partitions)
            if errors[0].name() not in COORDINATOR_ERRORS or time.monotonic() > until_s:
                raise MigrationError(
                    f"Kafka refuses the offsets of group {group}: {errors[0].str()}."
                )
            time.sleep(0.2)

    def _result(self, subject: str, future: Any) -> Any:
        try:
            return future.result(timeout=2 * TIMEOUT_S)
        except self._library.KafkaException as error:
            raise MigrationError(f"Kafka does not give {subject}: {sentence_of(error)}.") from None


def sentence_of(error: BaseException) -> str:
    """The text of a KafkaException."""
    found = error.args[0] if error.args else error
    return str(found.str() if hasattr(found, "str") else found).rstrip(".")


def _accepts_connections(servers: str) -> bool:
    for server in servers.split(","):
        host, _, port = server.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError:
            continue
        return True
    return False


def _text(topic_id: Any) -> str:
    text = str(topic_id) if topic_id is not None else ""
    return "" if set(text) <= {"A"} else text
