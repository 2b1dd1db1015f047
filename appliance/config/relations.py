"""Checks of settings against each other and against the host, all problems at once.

Owner: pure, but for the paths of data directories, which are resolved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from appliance.config.core_plan import CorePlan, plan_cores
from appliance.config.ipc_access import ipc_access
from appliance.config.security import open_addresses
from appliance.config.settings import Settings
from appliance.config.topology import Topology
from shm.memory.layout import FLUSHERS_MAX, FRONTS_MAX, WORKERS_MAX
from shm.rights.certificate_names import PrincipalRules
from shm.rights.kafka_listeners import (
    PLAINTEXT,
    PROTOCOLS,
    SASL_PLAINTEXT,
    SSL,
    KafkaListener,
    kafka_listener,
    without_protocol,
)
from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import digits_in

OAUTHBEARER = "OAUTHBEARER"
MECHANISMS = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", OAUTHBEARER)
"""Mechanisms of Kafka clients' logins."""
_SIGNS_IN_NAMES = str.maketrans("", "", "-._")
"""Removes what the name of a host may have beside letters and digits."""


class Conflict(NamedTuple):
    """Settings whose values do not go together."""

    names: tuple[str, ...]
    sentence: str


def checked_plan(settings: Settings, topology: Topology) -> CorePlan:
    """The core plan of settings that are right.

    Raises: InvalidSettingError with all conflicts.
    """
    found = list(conflicts(settings, topology))
    if found:
        raise InvalidSettingError("\n".join(conflict.sentence for conflict in found))
    return planned_cores(settings, topology)


def planned_cores(settings: Settings, topology: Topology) -> CorePlan:
    """The core plan. Raises InvalidSettingError."""
    return plan_cores(
        settings.cores, topology, settings.fronts, max(1, len(settings.data_dirs)),
        WORKERS_MAX - settings.dedicated_workers,
    )  # fmt: skip


def conflicts(settings: Settings, topology: Topology) -> Iterator[Conflict]:
    """Every conflict."""
    yield from _directories(settings)
    yield from _addresses(settings)
    yield from _sizes(settings)
    yield from _topic_defaults(settings)
    yield from _quotas(settings)
    yield from _group_settings(settings)
    if settings.group_session_timeout_min_ms > settings.group_session_timeout_max_ms:
        yield Conflict(
            ("group.session.timeout.min.ms", "group.session.timeout.max.ms"),
            f"group.session.timeout.min.ms is {settings.group_session_timeout_min_ms}; it must "
            "not be above group.session.timeout.max.ms "
            f"({settings.group_session_timeout_max_ms})",
        )
    try:
        plan = planned_cores(settings, topology)
    except InvalidSettingError as error:
        yield Conflict(("cores",), error.detail)
        return
    try:
        settings.busy_poll(plan)
    except InvalidSettingError as error:
        yield Conflict(("busy_poll_us",), error.detail)


def _directories(settings: Settings) -> Iterator[Conflict]:
    paths = [os.path.realpath(path) for path in settings.data_dirs]
    if not 1 <= len(paths) <= FLUSHERS_MAX or len(set(paths)) != len(paths):
        yield Conflict(
            ("data_dirs",),
            f"data_dirs is {settings.data_dirs!r}; it takes 1 to {FLUSHERS_MAX} different "
            "directories",
        )


def _quotas(settings: Settings) -> Iterator[Conflict]:
    if not settings.quotas:
        return
    from shm.quotas.quota_rules import parse_rules  # only who uses quotas

    try:
        parse_rules(settings.quotas)
    except InvalidSettingError as error:
        yield Conflict(("quotas",), error.detail)


def _group_settings(settings: Settings) -> Iterator[Conflict]:
    if not settings.kafka_group_settings:
        return
    from shm.messages.kafka_group_settings import parse_groups  # only where a group has settings

    try:
        parse_groups(settings.kafka_group_settings)
    except InvalidSettingError as error:
        yield Conflict(("kafka.group.settings",), error.detail)


def _addresses(settings: Settings) -> Iterator[Conflict]:
    if not settings.listen:
        yield Conflict(
            ("listen",), "listen is empty: give at least one address such as tcp://127.0.0.1:7420"
        )
    for address in settings.listen:
        try:
            check_address(address)
        except InvalidSettingError as error:
            yield Conflict(("listen",), error.detail)
            continue
        if (
            address.startswith("tcp://")
            and int(address.rpartition(":")[2]) + settings.fronts - 1 > 65535
        ):
            yield Conflict(
                ("listen", "fronts"),
                f"listen is {address!r}, and fronts = {settings.fronts} need as many ports from "
                "there on; choose a lower port",
            )
    reached = open_addresses(settings.listen)
    if reached and not settings.is_secured and not settings.security_trusted_network:
        yield Conflict(
            ("security.enabled", "listen"),
            f"listen has {reached[0]}, which other hosts reach, and security.enabled is false: "
            "everybody who reaches the port could do everything. Leave security.enabled at auto, "
            "or say security.trusted_network = true if you vouch for everybody in that network",
        )
    try:
        ipc_access(settings.ipc_mode, settings.ipc_group)
    except InvalidSettingError as error:
        name = "ipc.mode" if error.detail.startswith("ipc.mode") else "ipc.group"
        yield Conflict((name,), error.detail)
    if settings.http_listen:
        try:
            split_host_port(settings.http_listen)
        except InvalidSettingError as error:
            yield Conflict(("http.listen",), error.detail)
        else:
            yield from _open_console(settings)
    yield from _host_names(settings)
    if settings.http_proxies:
        yield from _proxies(settings)
    yield from _kafka_addresses(settings)
    yield from _kafka_security(settings)


def _host_names(settings: Settings) -> Iterator[Conflict]:
    """Names that no Host header has once its port is cut off."""
    for text in settings.http_hosts:
        if not (text.isascii() and text.translate(_SIGNS_IN_NAMES).isalnum()):
            yield Conflict(
                ("http.hosts",),
                f"http.hosts has {text!r:.200}, which no browser asks for; write a name without "
                "scheme, port and path, such as broker.example (other letters as xn--...). "
                "Addresses need no entry",
            )


def _proxies(settings: Settings) -> Iterator[Conflict]:
    from ipaddress import ip_network  # only who has proxies

    for text in settings.http_proxies:
        try:
            ip_network(text)
        except ValueError:
            yield Conflict(
                ("http.proxies",),
                f"http.proxies has {text!r}; write the address of a proxy, such as 10.1.0.5, or a "
                "network, such as 10.1.0.0/16",
            )


def _open_console(settings: Settings) -> Iterator[Conflict]:
    """Without users, everybody who reaches the console reads all records."""
    if (
        open_addresses([f"tcp://{settings.http_listen}"])
        and not settings.is_secured
        and not settings.security_trusted_network
    ):
        yield Conflict(
            ("http.listen", "security.enabled"),
            f"http.listen is {settings.http_listen!r}, which other hosts reach, and this appliance "
            "has no users: everybody who reaches the console could read every record. Listen on "
            "127.0.0.1, set security.enabled = true (then the console has a login), or say "
            "security.trusted_network = true if you vouch for everybody in that network",
        )


def _kafka_addresses(settings: Settings) -> Iterator[Conflict]:
    for address in settings.kafka_listen:
        if not _is_host_and_port(without_protocol(address)):
            yield Conflict(
                ("kafka.listen",),
                f"kafka.listen has {address!r}; write HOST:PORT, such as 127.0.0.1:9092, or "
                "PROTOCOL://HOST:PORT",
            )
    for part in filter(None, settings.kafka_advertised.split(",")):
        protocol, separator, address = part.strip().rpartition("://")
        is_known = not separator or protocol.upper() in PROTOCOLS
        if not is_known or not _is_host_and_port(address) or address.endswith(":0"):
            yield Conflict(
                ("kafka.advertised",),
                f"kafka.advertised has {part!r}; write the HOST:PORT that clients can reach, or "
                "PROTOCOL://HOST:PORT for each protocol of kafka.listen, with commas between",
            )
    if settings.front_count > FRONTS_MAX:
        yield Conflict(
            ("fronts", "kafka.listen"),
            f"fronts is {settings.fronts}; with kafka.listen there are at most {FRONTS_MAX - 1}, "
            "because the Kafka gateway is one more",
        )


def _kafka_security(settings: Settings) -> Iterator[Conflict]:
    has_users, certificate = settings.is_secured, settings.kafka_tls_certificate
    unknown = [name for name in settings.kafka_sasl_enabled_mechanisms if name not in MECHANISMS]
    if unknown or not settings.kafka_sasl_enabled_mechanisms:
        yield Conflict(
            ("kafka.sasl.enabled.mechanisms",),
            f"kafka.sasl.enabled.mechanisms has {unknown}; it takes {', '.join(MECHANISMS)}",
        )
    if OAUTHBEARER in settings.kafka_sasl_enabled_mechanisms:
        yield from _token_keys(settings)
    try:
        PrincipalRules(settings.kafka_tls_principal_rules)
    except ValueError as error:
        yield Conflict(("kafka.tls.principal.mapping.rules",), str(error))
    if settings.kafka_tls_client_auth != "none" and not settings.kafka_tls_client_ca:
        yield Conflict(
            ("kafka.tls.client_auth", "kafka.tls.client_ca"),
            f"kafka.tls.client_auth is {settings.kafka_tls_client_auth}, and kafka.tls.client_ca "
            "names no authority whose certificates are accepted",
        )
    for text in settings.kafka_listen:
        try:
            listener = kafka_listener(
                text, has_users=has_users, has_certificate=bool(certificate)
            )  # fmt: skip
        except ValueError as error:
            yield Conflict(("kafka.listen",), str(error))
            continue
        yield from _listener_security(settings, listener, has_users=has_users)


def _token_keys(settings: Settings) -> Iterator[Conflict]:
    if not settings.kafka_oauth_jwks:
        yield Conflict(
            ("kafka.sasl.enabled.mechanisms", "kafka.sasl.oauthbearer.jwks"),
            "kafka.sasl.enabled.mechanisms has OAUTHBEARER, and kafka.sasl.oauthbearer.jwks names "
            "no file with keys that verify tokens",
        )
    if not (settings.kafka_oauth_audience or settings.kafka_oauth_issuer):
        yield Conflict(
            ("kafka.sasl.enabled.mechanisms", "kafka.sasl.oauthbearer.expected.audience"),
            "kafka.sasl.enabled.mechanisms has OAUTHBEARER, and nothing is expected of a token: "
            "set kafka.sasl.oauthbearer.expected.audience, so that tokens for other services are "
            "refused, or kafka.sasl.oauthbearer.expected.issuer",
        )


def _listener_security(
    settings: Settings, listener: KafkaListener, *, has_users: bool
) -> Iterator[Conflict]:
    shown = f"{listener.protocol}://{listener.address}"
    is_reached = bool(open_addresses([f"tcp://{listener.address}"]))
    if listener.has_tls and not settings.kafka_tls_certificate:
        yield Conflict(
            ("kafka.listen", "kafka.tls.certificate"),
            f"kafka.listen has {shown}, and kafka.tls.certificate names no certificate for it",
        )
    if not has_users:
        if listener.has_sasl:
            yield Conflict(
                ("kafka.listen", "security.enabled"),
                f"kafka.listen has {shown}, where clients log in, and this appliance has no users: "
                "set security.enabled = true, or leave SASL_ out",
            )
        if is_reached and not settings.security_trusted_network:
            yield Conflict(
                ("kafka.listen", "security.enabled"),
                f"kafka.listen has {listener.address}, which other hosts reach, and "
                "security.enabled is false: everybody who reaches the port could do everything. "
                "Leave security.enabled at auto, or say security.trusted_network = true if you "
                "vouch for everybody there",
            )
        return
    if listener.protocol == PLAINTEXT:
        yield Conflict(
            ("kafka.listen", "security.enabled"),
            f"kafka.listen has {shown}, where nobody logs in, and clients must be users: use "
            "SASL_SSL:// or SSL://, or SASL_PLAINTEXT:// on this host",
        )
    if listener.protocol == SSL and not settings.kafka_tls_client_ca:
        yield Conflict(
            ("kafka.listen", "kafka.tls.client_ca"),
            f"kafka.listen has {shown}, where a certificate says which user a client is, and "
            "kafka.tls.client_ca names no authority whose certificates are accepted",
        )
    if listener.protocol == SASL_PLAINTEXT and is_reached and not settings.security_trusted_network:
        yield Conflict(
            ("kafka.listen", "kafka.tls.certificate"),
            f"kafka.listen has {shown}, which other hosts reach, and it is not encrypted: "
            "everybody who listens to the network could read and change what clients send. Name a "
            "certificate (kafka.tls.certificate), or say security.trusted_network = true if you "
            "vouch for everybody there",
        )


def _is_host_and_port(text: str) -> bool:
    try:
        split_host_port(text)
    except InvalidSettingError:
        return False
    return True


def _sizes(settings: Settings) -> Iterator[Conflict]:
    for name, value in (("ring_bytes", settings.ring_bytes), ("lane_bytes", settings.lane_bytes)):
        if value % 4096:
            yield Conflict((name,), f"{name} is {value}; it must be a multiple of 4096")
    if settings.credit_bytes < settings.lane_bytes // 2:
        yield Conflict(
            ("credit_bytes", "lane_bytes"),
            f"credit_bytes is {settings.credit_bytes}; it must be at least half of lane_bytes "
            f"({settings.lane_bytes}), so that one batch always fits",
        )


def _topic_defaults(settings: Settings) -> Iterator[Conflict]:
    """Defaults of topics that this appliance could not give to a topic."""
    if not settings.topic_defaults:
        return
    from appliance.config.topic_config import complete  # most appliances have no such defaults

    try:
        complete(
            {},
            ring_bytes=settings.ring_bytes,
            lane_bytes=settings.lane_bytes,
            defaults=settings.topic_defaults,
        )
    except InvalidSettingError as error:
        names = ("topic.max.message.bytes", "ring_bytes", "lane_bytes")
        yield Conflict(names, f"topic.{error.detail}")


def check_address(address: str) -> None:
    """Raise InvalidSettingError unless this is an address to listen on."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        if len(rest.encode()) > 100:
            raise InvalidSettingError(
                f"listen address {address!r} is too long: the path of a Unix socket has at most "
                "100 bytes"
            )
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not _is_port(port):
        raise InvalidSettingError(
            f"listen has {address!r}; write tcp://127.0.0.1:7420 or "
            "ipc:///run/tailrace/tailrace.sock"
        )


def _is_port(text: str) -> bool:
    number = digits_in(text)
    return number is not None and number <= 65535


def split_host_port(text: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT"; an IPv6 address stands in brackets. Raises
    InvalidSettingError.
    """
    host, _, port = text.rpartition(":")
    if not host or not _is_port(port) or (":" in host and not (host[0], host[-1]) == ("[", "]")):
        raise InvalidSettingError(
            f"http.listen is {text!r}; write HOST:PORT, such as 127.0.0.1:7400, or an empty "
            "text for no console"
        )
    return host.strip("[]"), int(port)
