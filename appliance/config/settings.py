"""Settings of the appliance, each documented beside its definition.

Invariants:
- No name is another one's section (`a` and `a.b`): TOML could not hold both.
- Processes get only what they use, as plain values.
`settings_sources` merges them from file, environment and flags; `relations` checks them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from appliance.config.core_plan import BusyPoll, CorePlan, plan_busy_poll
from appliance.config.security import CHOICES, is_secured
from appliance.config.setting_definition import Definition, definition_of, setting
from shm.memory.layout import FRONTS_MAX
from shm.rights.kafka_listeners import without_protocol

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MIB = 1 << 20
TOPIC_PREFIX = "topic."
TOPIC_DEFAULTS = (
    "segment.bytes", "segment.ms", "max.message.bytes", "compression.type",
    "message.timestamp.type", "retention.ms", "retention.bytes", "durability",
    "group.share.record.lock.duration.ms", "group.share.delivery.count.limit",
    "group.share.partition.max.record.locks",
)  # fmt: skip
"""Topic settings whose defaults the appliance's settings may replace, as `topic.retention.ms`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the appliance; `definitions()` has their names in the file, `--set` and the
    documentation.
    """

    listen: list[str] = setting(
        ["tcp://127.0.0.1:7420"],
        "Where clients connect: tcp://HOST:PORT (port 0: any free one) and ipc://PATH.",
    )
    security_enabled: str = setting(
        "auto",
        "Clients must be users, with encrypted connections over TCP: true, false, or auto: "
        "true if `listen` or `kafka.listen` has an address that other hosts reach.",
        name="security.enabled",
        choices=CHOICES,
    )
    security_trusted_network: bool = setting(
        False,
        "Everybody who reaches the addresses of `listen` may do everything: the operator "
        "vouches for the network. Other hosts can then be served without users.",
        name="security.trusted_network",
    )
    security_core_dumps: bool = setting(
        False,
        "A process that crashes may leave a core dump, where the host makes them. It has the "
        "secret keys of the process, and records.",
        name="security.core_dumps",
    )
    ipc_mode: str = setting(
        "0660",
        "Access to the sockets of ipc:// addresses, octal: who may write may connect.",
        name="ipc.mode",
    )
    ipc_group: str = setting(
        "",
        "Group of the sockets of ipc:// addresses; the appliance's user must be in it. Empty: that "
        "user's own group.",
        name="ipc.group",
    )
    http_listen: str = setting(
        "127.0.0.1:7400",
        "HOST:PORT of the console, /metrics and /health. Port 0: any free one. Empty: no console.",
        name="http.listen",
    )
    http_hosts: list[str] = setting(
        [],
        "Names under which browsers may open the console, beside its addresses and localhost: the "
        "host's name in the network, or a proxy's. A page that another name leads here is refused, "
        "and so are the metrics, unless the name is the host's own or a scraper's token is given.",
        name="http.hosts",
    )
    http_proxies: list[str] = setting(
        [],
        "Addresses or networks (10.1.0.0/16) of the proxies before the console. The client that "
        "they name in X-Forwarded-For is then the one that failed logins are counted by, and that "
        "rules of access with a host see. Empty: the header is ignored.",
        name="http.proxies",
    )
    metrics_topics: int = setting(
        1_000,
        "Topics with series of their own in /metrics, by name; the others are summed.",
        name="metrics.topics",
        minimum=0,
        maximum=100_000,
    )
    fronts: int = setting(
        1,
        "Number of front processes; front i listens on the ports of `listen` plus i, and on "
        "its ipc paths with .i appended.",
        minimum=1,
        maximum=FRONTS_MAX,
    )
    kafka_listen: list[str] = setting(
        [],
        "Addresses where Kafka clients connect, in a process of their own: [PROTOCOL://]HOST:PORT "
        "(port 0 of the first: any free one). PROTOCOL is PLAINTEXT, SSL, SASL_PLAINTEXT or "
        "SASL_SSL; without it SASL_... where clients must be users, and ...SSL where there is "
        "`kafka.tls.certificate`. Empty: none, and nothing of it runs.",
        name="kafka.listen",
    )
    kafka_sasl_enabled_mechanisms: list[str] = setting(
        ["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"],
        "Mechanisms by which Kafka clients log in: SCRAM-SHA-512, SCRAM-SHA-256, PLAIN and "
        "OAUTHBEARER.",
        name="kafka.sasl.enabled.mechanisms",
        live=True,
    )
    kafka_sasl_plain_without_tls: bool = setting(
        False,
        "Kafka clients may log in with PLAIN or OAUTHBEARER on a connection that is not "
        "encrypted: everybody who listens to the network then reads their passwords and tokens.",
        name="kafka.sasl.plain_without_tls",
        live=True,
    )
    kafka_oauth_jwks: str = setting(
        "",
        "File with the keys that verify tokens of OAUTHBEARER, a JWK set: those of the identity "
        "provider, or secrets. A reload reads it again.",
        name="kafka.sasl.oauthbearer.jwks",
        live=True,
    )
    kafka_oauth_issuer: str = setting(
        "",
        "Issuer that a token must be of (iss). Empty: any that has signed with one of the keys.",
        name="kafka.sasl.oauthbearer.expected.issuer",
        live=True,
    )
    kafka_oauth_audience: list[str] = setting(
        [],
        "Names that this appliance has for the identity provider: a token must be for one of them "
        "(aud). Empty: it may be for any service.",
        name="kafka.sasl.oauthbearer.expected.audience",
        live=True,
    )
    kafka_oauth_user_claim: str = setting(
        "sub",
        "Part of a token that has the name of the user.",
        name="kafka.sasl.oauthbearer.sub.claim.name",
        live=True,
    )
    kafka_oauth_clock_skew_s: int = setting(
        30,
        "Time by which the clock of the identity provider may differ, seconds.",
        name="kafka.sasl.oauthbearer.clock.skew.seconds",
        minimum=0,
        maximum=600,
        live=True,
    )
    kafka_connections_max_reauth_ms: int = setting(
        0,
        "Time after which a Kafka client must log in again on its connection. 0: never.",
        name="kafka.connections.max.reauth.ms",
        live=True,
    )
    kafka_tls_certificate: str = setting(
        "",
        "File with the certificate of the Kafka port and those that lead to its authority, PEM. A "
        "reload reads it again; `credential:NAME` for a credential of systemd. Empty: no TLS.",
        name="kafka.tls.certificate",
        live=True,
    )
    kafka_tls_key: str = setting(
        "",
        "File with the private key of the certificate, PEM, not encrypted; `credential:NAME` for a "
        "credential of systemd. Empty: it is in the file of the certificate.",
        name="kafka.tls.key",
        live=True,
    )
    kafka_tls_client_ca: str = setting(
        "",
        "File with the certificates of the authorities that sign those of Kafka clients, PEM.",
        name="kafka.tls.client_ca",
        live=True,
    )
    kafka_tls_client_auth: str = setting(
        "none",
        "Certificates of Kafka clients: none, requested or required. On an SSL:// address "
        "of an appliance with users they must, for it says which user they are.",
        name="kafka.tls.client_auth",
        choices=("none", "requested", "required"),
        live=True,
    )
    kafka_tls_principal_rules: list[str] = setting(
        ["RULE:^(?:.*[^\\\\],)?CN=([A-Za-z0-9._@-]+)(?:,.*)?$/$1/"],
        "Rules that make the name of a user from the subject of a client's certificate, as Kafka's "
        "ssl.principal.mapping.rules. The first one that matches decides; the default takes the "
        "common name.",
        name="kafka.tls.principal.mapping.rules",
    )
    kafka_advertised: str = setting(
        "",
        "HOST:PORT that Kafka clients are told to connect to, or PROTOCOL://HOST:PORT for each "
        "protocol of `kafka.listen`, with commas between. Empty: the address that each has connected "
        "to.",
        name="kafka.advertised",
    )
    kafka_group_settings: list[str] = setting(
        [],
        "Settings of groups for their Kafka members, a text for each group: `group=NAME "
        "setting=value ...`. `kafka-configs --entity-type groups` changes them; docs/kafka.md has "
        "their names.",
        name="kafka.group.settings",
        live=True,
    )
    kafka_num_partitions: int = setting(
        1,
        "Partitions of a topic that a Kafka client creates without a number, or by using it "
        "(`auto_create_topics`).",
        minimum=1,
        maximum=10_000,
        name="kafka.num.partitions",
        live=True,
    )
    data_dirs: list[str] = setting(
        ["./tailrace-data"],
        "Directories of the log. Each has a flusher and workers of its own, so give each disk "
        "one. The catalog is in the first.",
    )
    drained_dirs: list[str] = setting(
        [],
        "Directories of `data_dirs` that get no new partitions while another one takes writes. "
        "`tailrace disk drain` adds the one that it empties.",
        live=True,
    )
    cores: str | list[int] = setting(
        "auto",
        'Cores that workers are pinned to, one worker each: "auto" or a list such as [2, 3]. '
        '"auto" takes the physical cores that fronts and flushers leave, on the NUMA nodes of the '
        "flushers; `tailrace layout` shows them.",
    )
    busy_poll_us: int | str = setting(
        "auto",
        "Time that fronts and workers poll for more work before they sleep, microseconds (0 to "
        "10000; 0: not at all). Polling saves a wake-up for each step of an ack and uses the "
        'core meanwhile. "auto" polls (100) only if each front, worker and flusher can have a '
        "core; never with 1 or 2 cores.",
        live=True,
    )
    dedicated_workers: int = setting(
        16,
        "Most partitions of topics with worker.dedicated; memory is taken when there are such "
        "topics.",
        maximum=64,
    )
    ring_bytes: int = setting(
        64 * MIB,
        "Size of a worker's ring in shared memory, bytes.",
        minimum=1 * MIB,
        maximum=1 << 36,
    )
    ring_descriptors: int = setting(
        65_536,
        "Requests that a ring can hold, whatever their size.",
        minimum=1024,
        maximum=1 << 22,
    )
    lane_bytes: int = setting(
        4 * MIB,
        "Size of a lane between two processes in shared memory, bytes; small enough to stay in "
        "cache.",
        minimum=256 << 10,
        maximum=1 << 30,
    )
    credit_bytes: int = setting(
        64 * MIB,
        "Bytes that all producers together may have in flight to a front.",
        minimum=1 * MIB,
        live=True,
    )
    memory_pressure_percent: int = setting(
        10,
        "Share of time in which tasks of the appliance's cgroup wait for memory (PSI), percent, "
        "above which producers get credit for one batch at a time. 0: never.",
        maximum=100,
        name="memory.pressure.percent",
        live=True,
    )
    memory_pressure_file: str = setting(
        "",
        "File with that share, in the kernel's format. Empty: memory.pressure of the cgroup, or "
        "/proc/pressure/memory.",
        name="memory.pressure.file",
    )
    connections_max: int = setting(
        16_384,
        "Connections that a front keeps. The limit of open files, less the log's files, is the "
        "upper bound.",
        minimum=1,
        maximum=1 << 20,
        name="connections.max",
        live=True,
    )
    slots: int = setting(4096, "Most partitions of the appliance.", minimum=16, maximum=1 << 20)
    stop_timeout_ms: int = setting(
        20_000,
        "Time that a clean stop may take before the remaining processes are killed, ms.",
        minimum=100,
        live=True,
    )
    hang_timeout_ms: int = setting(
        30_000,
        "A process that makes no progress for this long is killed and restarted, ms.",
        minimum=1000,
        live=True,
    )
    zygote: bool = setting(
        True,
        "Fork processes from one that has imported what they share. false: each is an "
        "interpreter of its own, as debuggers need it, which starts more slowly and takes more "
        "memory.",
    )
    log_level: str = setting(
        "info",
        "Lowest level that is logged: debug, info, warning or error.",
        choices=LOG_LEVELS,
        live=True,
    )
    log_format: str = setting(
        "text",
        "Form of log lines: text (event key=value ...) or json (an object a line). The journal gets "
        "the fields in either.",
        choices=LOG_FORMATS,
    )
    slow_operation_ms: int = setting(
        1_000,
        "A produce, fetch, sync or commit that takes longer is logged, ms; 0: none is.",
        maximum=3_600_000,
        live=True,
    )
    auto_create_topics: bool = setting(
        False,
        "Producers may create a missing topic by sending to it; embedded appliances allow it.",
        live=True,
    )
    checkpoint_bytes: int = setting(
        64 * MIB,
        "Bytes of a data directory's log that recovery may have to read, about.",
        minimum=1 * MIB,
        live=True,
    )
    journal_bytes: int = setting(
        64 * MIB,
        "Size of a data directory's journal, bytes; it makes groups that touch many partitions "
        "durable.",
        minimum=1 * MIB,
        maximum=1 << 32,
    )
    disk_reserve_bytes: int = setting(
        64 * MIB,
        "Space kept free in each data directory beside that for its rings (at most an eighth "
        "of the disk). Below it producers are refused with DISK_FULL.",
        live=True,
    )
    producer_id_expiration_ms: int = setting(
        86_400_000,
        "A partition forgets a producer that has sent nothing to it for this long, ms.",
        minimum=1,
        name="producer.id.expiration.ms",
        live=True,
    )
    producer_ids_max: int = setting(
        10_000,
        "Number of producers that each partition remembers, to recognise repeated batches (about 250 "
        "bytes each, in worker and flusher; ten times that in all partitions of a worker). "
        "Beyond 256, producers that sent nothing for 15 minutes are forgotten; if there are "
        "none, new ones are refused with TOO_MANY_PRODUCERS.",
        minimum=256,
        maximum=1 << 24,
        name="producer.ids.max",
        live=True,
    )
    group_members_max: int = setting(
        10_000,
        "Most members of a consumer group or share group.",
        minimum=1,
        maximum=1_000_000,
        name="group.members.max",
        live=True,
    )
    group_assignors: list[str] = setting(
        [],
        "Names of the assignors of installed packages (entry point group tailrace.assignors) that "
        "consumers may choose: their code runs in the appliance. Others are never loaded.",
        name="group.assignors",
    )
    groups_max: int = setting(
        100_000,
        "Most groups, those without members included.",
        minimum=1,
        maximum=10_000_000,
        name="groups.max",
        live=True,
    )
    group_session_timeout_min_ms: int = setting(
        1_000,
        "Smallest session_timeout_ms that a consumer may ask for, ms.",
        minimum=100,
        name="group.session.timeout.min.ms",
        live=True,
    )
    group_session_timeout_max_ms: int = setting(
        1_800_000,
        "Largest session_timeout_ms that a consumer may ask for, ms.",
        minimum=100,
        name="group.session.timeout.max.ms",
        live=True,
    )
    offsets_retention_minutes: int = setting(
        10_080,
        "A group without members is deleted, with its committed offsets, this long after its "
        "last member left and its last commit, minutes.",
        minimum=1,
        name="offsets.retention.minutes",
        live=True,
    )
    transaction_max_timeout_ms: int = setting(
        900_000,
        "Largest transaction_timeout_ms that a producer may ask for, ms. A transaction that is open "
        "for longer than its timeout is aborted.",
        minimum=1,
        name="transaction.max.timeout.ms",
        live=True,
    )
    transaction_prepared_max_ms: int = setting(
        604_800_000,
        "A prepared transaction that is not decided for this long is aborted, ms. 0: it waits "
        "for ever.",
        minimum=0,
        name="transaction.prepared.max.ms",
        live=True,
    )
    transactional_id_expiration_ms: int = setting(
        604_800_000,
        "A transactional id is forgotten when it was unused for this long, ms.",
        minimum=60_000,
        name="transactional.id.expiration.ms",
        live=True,
    )
    transactional_ids_max: int = setting(
        1_000_000,
        "Most transactional ids.",
        minimum=1,
        maximum=10_000_000,
        name="transactional.ids.max",
        live=True,
    )
    flush_linger_ms: int = setting(
        0,
        "Time that the flusher waits for a larger group of batches, ms. 0: not at all; under "
        "load groups form without it.",
        maximum=10_000,
        name="flush.linger_ms",
        live=True,
    )
    flush_batch_size: int = setting(
        1 * MIB,
        "A group of this many bytes is flushed without waiting longer.",
        minimum=1,
        name="flush.batch_size",
        live=True,
    )
    retention_check_interval_ms: int = setting(
        3_600_000,
        "Longest time between two checks of a partition for expired segments, ms. A segment is "
        "otherwise removed when it expires.",
        minimum=100,
        maximum=86_400_000,
        name="retention.check.interval.ms",
        live=True,
    )
    topic_delete_retention_ms: int = setting(
        0,
        "Time that a deleted topic stays in the bin, ms, where `tailrace topic undelete` finds it; "
        "its records keep their space until then, or until their disk is nearly full. 0: deletion "
        "frees the space at once.",
        name="topic.delete.retention.ms",
        live=True,
    )
    cleaner_check_interval_ms: int = setting(
        15_000,
        "Interval at which compacted topics are checked for something to clean, ms.",
        minimum=10,
        maximum=86_400_000,
        name="cleaner.check.interval.ms",
        live=True,
    )
    cleaner_dedupe_buffer_size: int = setting(
        128 * MIB,
        "Most memory of a cleaner for the keys of a partition. It takes 30 bytes a key at most; "
        "where they have no room, it reads the keys several times.",
        minimum=1 * MIB,
        name="cleaner.dedupe.buffer.size",
        live=True,
    )
    cleaner_io_max_bytes_per_second: int = setting(
        0,
        "Most bytes a second that a cleaner reads and writes together. 0: no limit.",
        name="cleaner.io.max.bytes.per.second",
        live=True,
    )
    quotas: list[str] = setting(
        [],
        "Quotas of users, client ids and prefixes of topic names, a text for each: `user=NAME "
        "client=NAME quota=value ...` or `prefix=NAME quota=value ...`, * for the default. "
        "`tailrace quota set` changes them; docs/quotas.md describes them.",
        live=True,
    )
    audit_enabled: bool = setting(
        False,
        "Sign-ins, administration and denials are written to the audit log (docs/audit.md). "
        "While it cannot be written, administration is refused.",
        name="audit.enabled",
    )
    audit_directory: str = setting(
        "",
        "Directory of the audit log. Empty: `audit` in the first data directory.",
        name="audit.directory",
    )
    audit_key_file: str = setting(
        "",
        "File with a key of at least 16 bytes, by which the lines' hashes are keyed; "
        "`credential:NAME` for a credential of systemd. Empty: they are not keyed.",
        name="audit.key_file",
    )
    audit_file_bytes: int = setting(
        64 * MIB,
        "Size from which the next file of the audit log is begun, bytes.",
        minimum=4096,
        name="audit.file.bytes",
    )
    audit_files_max: int = setting(
        0,
        "Files of the audit log that are kept; the oldest are removed. 0: all.",
        maximum=1_000_000,
        name="audit.files.max",
    )
    audit_journal: bool = setting(
        False,
        "The lines of the audit log go to systemd's journal, too.",
        name="audit.journal",
    )
    audit_data: list[str] = setting(
        [],
        "Prefixes of topics whose first reading and writing by each connection is written to the "
        "audit log, * for all.",
        name="audit.data",
    )
    backup_target: str = setting(
        "",
        "Where `tailrace backup --config FILE`, and with it tailrace-backup.timer, makes backups: "
        "a directory, or a URL of fsspec. Empty: nowhere.",
        name="backup.target",
    )
    backup_key_file: str = setting(
        "",
        "File with the key that encrypts these backups; `credential:NAME` for a credential of "
        "systemd. Empty: they are not encrypted.",
        name="backup.key_file",
    )
    backup_keep: int = setting(
        0,
        "These backups are removed but for the newest of this number. 0: none is removed.",
        name="backup.keep",
        maximum=1_000_000,
    )
    topic_defaults: dict[str, Any] = field(default_factory=dict, metadata={})
    """Defaults of topic settings that were given as `topic.NAME`, by the topic setting's name."""

    @property
    def gateways(self) -> int:
        """Number of Kafka gateways: fronts behind those of `fronts`."""
        return 1 if self.kafka_listen else 0

    @property
    def front_count(self) -> int:
        """Number of fronts, gateways included."""
        return self.fronts + self.gateways

    @property
    def is_secured(self) -> bool:
        """True if clients must be users."""
        reached = [f"tcp://{without_protocol(address)}" for address in self.kafka_listen]
        return is_secured(
            self.security_enabled,
            [*self.listen, *reached],
            is_trusted_network=self.security_trusted_network,
        )

    def audit_settings(self) -> dict[str, Any] | None:
        """Settings of the audit log for processes; None: there is none."""
        if not self.audit_enabled:
            return None
        return {
            "directory": self.audit_directory or f"{self.data_dirs[0]}/audit",
            "key_file": self.audit_key_file, "file_bytes": self.audit_file_bytes,
            "files_max": self.audit_files_max, "journal": self.audit_journal,
            "data": self.audit_data,
        }  # fmt: skip

    def reserve_bytes(self, worker_count: int) -> int:
        """Reserve of free space in each data directory, including the content of its workers'
        rings; 0: none.
        """
        return (
            self.disk_reserve_bytes + self.ring_bytes * worker_count
            if self.disk_reserve_bytes
            else 0
        )

    def busy_poll(self, plan: CorePlan) -> BusyPoll:
        """Resolve `busy_poll_us` for a core plan.

        Raises: InvalidSettingError.
        """
        return plan_busy_poll(self.busy_poll_us, plan)


@cache
def definitions() -> dict[str, Definition]:
    """Every setting by its name. The defaults of topic settings are among them, as `topic.NAME`."""
    found = {}
    for item in fields(Settings):
        if item.metadata:
            definition = definition_of(item)
            found[definition.name] = definition
    return found | {TOPIC_PREFIX + name: _topic_default(name) for name in TOPIC_DEFAULTS}


def value_of(settings: Settings, definition: Definition) -> Any:
    """The value of a setting. None: a default of topics that is not given."""
    value = getattr(settings, definition.field_name)
    if definition.field_name == "topic_defaults":
        return value.get(definition.name.removeprefix(TOPIC_PREFIX), definition.default)
    return value


def _topic_default(name: str) -> Definition:
    from appliance.config.topic_settings import TOPIC_SETTINGS  # most processes do not need it

    row = TOPIC_SETTINGS[name]
    return Definition(
        TOPIC_PREFIX + name, "topic_defaults", row.kind.__name__, row.default,
        f"Default of the topic setting {name}, for topics that do not set it: existing ones too.",
        row.minimum, row.maximum, row.allowed, is_live=True,
    )  # fmt: skip
