"""The migration of a command line: its two clusters, and the session that its journal has."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance.cli.main import CONNECT_TIMEOUT_MS
from appliance.cli.migrate.progress import Progress
from appliance.cli.output import complain
from appliance.migrate.errors import MigrationError

if TYPE_CHECKING:
    from appliance.migrate.migration import Migration
    from appliance.migrate.session import Source


def journal_values(
    name: str, bootstrap: str, kafka: str | None, config_file: str | None
) -> list[bytes | None]:
    """The values of a journal: the appliance's, or that of a Kafka cluster."""
    from appliance.migrate.clusters.kafka_client import KafkaCluster, properties_of, server_of
    from appliance.migrate.clusters.kafka_target import KafkaTarget
    from appliance.migrate.clusters.tailrace_target import TailraceTarget

    if kafka is not None:
        cluster = KafkaCluster(server_of(kafka), properties_of(config_file), complain)
        return KafkaTarget(cluster, name).peek()
    target = TailraceTarget(bootstrap, name, CONNECT_TIMEOUT_MS)
    try:
        return target.peek()
    finally:
        target.end()


def session_of(
    name: str, bootstrap: str, kafka: str | None, config_file: str | None
) -> dict[str, Any]:
    """The last session of a migration. Raises MigrationError."""
    from appliance.migrate.journal import Journal

    journal = Journal(journal_values(name, bootstrap, kafka, config_file))
    if journal.switched_ms is not None:
        raise MigrationError(f"the migration {name} was switched already.")
    if not journal.session:
        raise MigrationError(
            f"there is no migration {name}: begin with `tailrace migrate --from kafka:HOST:PORT "
            "--topics NAMES --follow`."
        )
    return journal.session


def make_migration(
    is_from: bool,
    address: str,
    name: str,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    config_file: str | None,
    bootstrap: str,
    as_json: bool,
    *,
    rate: int = 0,
    isolation: str = "read_committed",
    appends: bool = False,
    left_out: tuple[str, ...] = (),
) -> tuple[Migration, Progress]:
    """The migration. Raises MigrationError, NotReachableError."""
    from appliance.migrate.clusters.kafka_client import KafkaCluster, properties_of, server_of
    from appliance.migrate.clusters.kafka_source import KafkaSource
    from appliance.migrate.clusters.kafka_target import KafkaTarget
    from appliance.migrate.clusters.tailrace_source import TailraceCluster, TailraceSource
    from appliance.migrate.clusters.tailrace_target import TailraceTarget
    from appliance.migrate.groups import patterns_of
    from appliance.migrate.migration import Migration, Options, SourceCluster, TargetCluster
    from appliance.migrate.topic_settings import to_kafka, to_ours

    printed = Progress(as_json)
    server = server_of(address)
    cluster = KafkaCluster(server, properties_of(config_file), printed.note)
    cluster.topic_names()
    source: SourceCluster
    target: TargetCluster
    make_source: Callable[[str], Source]
    if is_from:
        ours = TailraceTarget(bootstrap, name, CONNECT_TIMEOUT_MS)
        ours.admin.list_topics()
        source, target, make_source = cluster, ours, partial(KafkaSource, cluster)
    else:
        here = TailraceCluster(bootstrap, CONNECT_TIMEOUT_MS)
        here.topic_names()
        source, target, make_source = (
            here,
            KafkaTarget(cluster, name),
            partial(TailraceSource, here),
        )
    options = Options(
        name, topics, patterns_of(groups), isolation, appends, left_out, rate,
        session={
            "direction": "from" if is_from else "to", "server": server, "isolation": isolation,
            "appends": appends, "left_out": list(left_out),
            "config_file": None if config_file is None else os.path.abspath(config_file),
        },
    )  # fmt: skip
    map_settings = to_ours if is_from else to_kafka
    return Migration(source, make_source, target, map_settings, options, printed), printed
