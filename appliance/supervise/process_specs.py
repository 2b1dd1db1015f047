"""Specifications of the processes: each gets its regions, doorbells, cores and settings.

Owner: the supervisor.
Invariants: a process that may be started later has its doorbell from the beginning, since a child
inherits doorbells only when it is started.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from appliance.config.core_plan import CorePlan
from appliance.config.ipc_access import ipc_access
from appliance.config.settings import Settings
from appliance.data.credentials import credential_path
from appliance.data.data_dir_lock import DataDirLock
from appliance.supervise.live_settings import LiveSettings
from appliance.supervise.memory.memory_pressure import MemoryPressure
from appliance.supervise.memory.shm_regions import Regions
from appliance.supervise.processes.child_processes import Child
from shm.memory.layout import Role
from shm.queues.doorbell import Doorbell
from shm.runtime.agent_runner import ProcessSpec, process_name


class ProcessSpecs:
    """Makes the specification of each process from what the supervisor has made."""

    def __init__(
        self,
        live: LiveSettings,
        plan: CorePlan,
        owners: Sequence[DataDirLock],
        worker_dirs: list[int],
        slots: int,
        regions: Regions,
        pressure: MemoryPressure,
        sockets: dict[str, int],
    ) -> None:
        """`owners`: one for each data directory. `worker_dirs`: worker -> index of its data
        directory. `slots`: number of partition slots. `sockets`: listening sockets of addresses of
        fronts.
        """
        self._live = live
        self._plan = plan
        self._owners = owners
        self._worker_dirs = worker_dirs
        self._slots = slots
        self._regions = regions
        self._pressure = pressure
        self._sockets = sockets
        self.doorbells: dict[str, Doorbell] = {}

    def make_doorbells(self, children: list[Child]) -> None:
        """Make a doorbell for each process, also for those that may be started later."""
        settings = self._live.settings
        names = [process_name(Role.SUPERVISOR, 0)] + [child.name for child in children]
        names += [process_name(Role.WORKER, index) for index in self.spare_workers()]
        names += [process_name(Role.GROUPS, 0), process_name(Role.SCHEDULER, 0)]
        names += [process_name(Role.CLEANER, index) for index in range(len(self._owners))]
        names += [process_name(Role.CONSOLE, 0)] if settings.http_listen else []
        self.doorbells = {name: Doorbell.create() for name in names}

    def spare_workers(self) -> range:
        """The workers that topics with worker.dedicated may get."""
        first = len(self._worker_dirs)
        return range(first, first + self._live.settings.dedicated_workers)

    def spec_of(self, child: Child) -> ProcessSpec:
        """The specification of a process that is about to be started."""
        return ProcessSpec(
            role=child.role, index=child.index, generation=child.generation,
            instance=self._owners[0].instance.hex(), parent_pid=os.getpid(),
            data_dirs=[o.path for o in self._owners], regions=self._regions.names_with_spares(),
            doorbells={name: bell.fd for name, bell in self.doorbells.items()}, cores=child.cores,
            settings=self.settings_of(self._live.settings)
            | {"settings_version": self._live.version},
            recover=self._rings_for(child),
            shared_memory=self._owners[0].identity.shared_memory.hex(),
        )  # fmt: skip

    def _rings_for(self, child: Child) -> list[dict[str, Any]]:
        """Rings of an earlier run that this flusher must drain."""
        if child.role is not Role.FLUSHER:
            return []
        return [
            old
            for old in self._regions.undrained
            if old["dir"] == self._owners[child.index].instance.hex()
        ]

    def settings_of(self, s: Settings) -> dict[str, Any]:
        """The settings of the appliance that processes get."""
        return {
            "workers": len(self._worker_dirs), "worker_dirs": self._worker_dirs,
            "fronts": s.front_count, "gateways": s.gateways,
            "kafka.listen": s.kafka_listen, "kafka.advertised": s.kafka_advertised,
            "kafka.num.partitions": s.kafka_num_partitions,
            "kafka.group.settings": s.kafka_group_settings,
            "kafka.sasl.enabled.mechanisms": s.kafka_sasl_enabled_mechanisms,
            "kafka.sasl.plain_without_tls": s.kafka_sasl_plain_without_tls,
            "kafka.sasl.oauthbearer.jwks": credential_path(s.kafka_oauth_jwks),
            "kafka.sasl.oauthbearer.expected.issuer": s.kafka_oauth_issuer,
            "kafka.sasl.oauthbearer.expected.audience": s.kafka_oauth_audience,
            "kafka.sasl.oauthbearer.sub.claim.name": s.kafka_oauth_user_claim,
            "kafka.sasl.oauthbearer.clock.skew.seconds": s.kafka_oauth_clock_skew_s,
            "kafka.connections.max.reauth.ms": s.kafka_connections_max_reauth_ms,
            "kafka.tls.certificate": credential_path(s.kafka_tls_certificate),
            "kafka.tls.key": credential_path(s.kafka_tls_key),
            "kafka.tls.client_ca": credential_path(s.kafka_tls_client_ca),
            "kafka.tls.client_auth": s.kafka_tls_client_auth,
            "kafka.tls.principal.mapping.rules": s.kafka_tls_principal_rules,
            "run": self._regions.run_id,
            "lost_memory": self._regions.lost_memory, "spare_workers": list(self.spare_workers()),
            "checkpoint_bytes": s.checkpoint_bytes, "journal_bytes": s.journal_bytes,
            "producer.id.expiration.ms": s.producer_id_expiration_ms,
            "producer.ids.max": s.producer_ids_max,
            "reserve_bytes": s.reserve_bytes(len(self._worker_dirs)),
            "security": s.is_secured,
            "listen": s.listen, "listen.sockets": self._sockets, "slots": self._slots,
            "ipc.access": list(ipc_access(s.ipc_mode, s.ipc_group)),
            "ring_bytes": s.ring_bytes, "lane_bytes": s.lane_bytes, "credit_bytes": s.credit_bytes,
            "memory.is_short": self._pressure.is_high,
            "memory.stalled_percent": self._pressure.percent,
            "auto_create_topics": s.auto_create_topics,
            "group.assignors": s.group_assignors,
            "group.members.max": s.group_members_max, "groups.max": s.groups_max,
            "group.session.timeout.min.ms": s.group_session_timeout_min_ms,
            "group.session.timeout.max.ms": s.group_session_timeout_max_ms,
            "offsets.retention.minutes": s.offsets_retention_minutes,
            "transaction.max.timeout.ms": s.transaction_max_timeout_ms,
            "transactional.id.expiration.ms": s.transactional_id_expiration_ms,
            "transaction.prepared.max.ms": s.transaction_prepared_max_ms,
            "transactional.ids.max": s.transactional_ids_max,
            "flush.linger_ms": s.flush_linger_ms, "flush.batch_size": s.flush_batch_size,
            "busy_poll_us": s.busy_poll(self._plan).us,
            "http.listen": s.http_listen, "http.hosts": s.http_hosts,
            "http.proxies": s.http_proxies,
            "metrics.topics": s.metrics_topics,
            "connections.max": s.connections_max,
            "topic_defaults": s.topic_defaults,
            "retention.check.interval.ms": s.retention_check_interval_ms,
            "topic.delete.retention.ms": s.topic_delete_retention_ms,
            "cleaner.check.interval.ms": s.cleaner_check_interval_ms,
            "cleaner.dedupe.buffer.size": s.cleaner_dedupe_buffer_size,
            "cleaner.io.max.bytes.per.second": s.cleaner_io_max_bytes_per_second,
            "log_level": s.log_level, "log_format": s.log_format,
            "slow_operation_ms": s.slow_operation_ms, "quotas": s.quotas,
            "drained_dirs": s.drained_dirs,
            "audit": s.audit_settings(),
        }  # fmt: skip
