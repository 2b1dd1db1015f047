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
from tailrace.core.errors import InvalidSettingError


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
            "whoever reaches the port could do everything. Leave security.enabled at auto, or say "
            "security.trusted_network = true if you vouch for everybody in that network",
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
    yield from _kafka_addresses(settings)


def _kafka_addresses(settings: Settings) -> Iterator[Conflict]:
    for address in settings.kafka_listen:
        if not _is_host_and_port(address):
            yield Conflict(
                ("kafka.listen",),
                f"kafka.listen has {address!r}; write HOST:PORT, such as 127.0.0.1:9092",
            )
    if settings.kafka_listen and settings.is_secured:
        yield Conflict(
            ("kafka.listen", "security.enabled"),
            "kafka.listen is set, and clients must be users (security.enabled): Kafka's clients "
            "cannot be users in this version, so whoever reaches that port could do everything. "
            "Leave kafka.listen out, or listen on this host alone without security",
        )
    elif not settings.security_trusted_network and (
        reached := open_addresses(f"tcp://{address}" for address in settings.kafka_listen)
    ):
        yield Conflict(
            ("kafka.listen", "security.trusted_network"),
            f"kafka.listen has {reached[0].removeprefix('tcp://')}, which other hosts reach, and "
            "Kafka's clients cannot be users in this version: whoever reaches the port could do "
            "everything. Say security.trusted_network = true if you vouch for everybody there",
        )
    advertised = settings.kafka_advertised
    if advertised and (not _is_host_and_port(advertised) or advertised.endswith(":0")):
        yield Conflict(
            ("kafka.advertised",),
            f"kafka.advertised is {advertised!r}; write the HOST:PORT that clients can reach",
        )
    if settings.front_count > FRONTS_MAX:
        yield Conflict(
            ("fronts", "kafka.listen"),
            f"fronts is {settings.fronts}; with kafka.listen there are at most {FRONTS_MAX - 1}, "
            "because the Kafka gateway is one more",
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
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidSettingError(
            f"listen has {address!r}; write tcp://127.0.0.1:7420 or "
            "ipc:///run/tailrace/tailrace.sock"
        )


def split_host_port(text: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT"; an IPv6 address stands in brackets. Raises
    InvalidSettingError.
    """
    host, _, port = text.rpartition(":")
    if (
        not host
        or not port.isdigit()
        or int(port) > 65535
        or (":" in host and not (host[0], host[-1]) == ("[", "]"))
    ):
        raise InvalidSettingError(
            f"http.listen is {text!r}; write HOST:PORT, such as 127.0.0.1:7400, or an empty "
            "text for no console"
        )
    return host.strip("[]"), int(port)
