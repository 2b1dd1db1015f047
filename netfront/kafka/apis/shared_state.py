"""State that handlers of several APIs share: classic groups, transactional producers, positions."""

from __future__ import annotations

from netfront.kafka.apis.call import Services
from netfront.kafka.groups.classic_group import ClassicGroup
from netfront.kafka.groups.classic_groups import ClassicGroups, lease_end
from netfront.kafka.groups.read_positions import ReadPositions
from netfront.kafka.producers.transactional_producer import TransactionalProducers
from tailrace.protocol.frame import Api


def classic_groups(services: Services) -> ClassicGroups:
    """The classic groups of this gateway."""
    groups: ClassicGroups | None = services.state.get("classic_groups")
    if groups is None:
        groups = services.state["classic_groups"] = ClassicGroups(
            services.timers,
            lambda: services.now_ns,
            services.settings,
            lambda group: _end_lease(services, group),
        )
    return groups


def _end_lease(services: Services, group: ClassicGroup) -> None:
    """End the lease of a group whose last member has expired: operators and members of another
    protocol need not wait for its end.
    """
    if services.own_peer is not None and group.lease_until_ns > services.now_ns:
        group.lease_until_ns = 0
        services.own_peer.ask_json(Api.GROUP_HEARTBEAT, lease_end(group))


def read_positions(services: Services) -> ReadPositions:
    """The positions at which the clients of this gateway read."""
    found: ReadPositions | None = services.state.get("read_positions")
    if found is None:
        found = services.state["read_positions"] = ReadPositions()
    return found


def producers_of(services: Services) -> TransactionalProducers:
    """The producers of this gateway."""
    found: TransactionalProducers = services.state.setdefault(
        "transactions", TransactionalProducers()
    )
    return found
