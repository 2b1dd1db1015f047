"""State that handlers of several APIs share: classic groups, transactional producers, positions."""

from __future__ import annotations

from netfront.kafka.apis.call import Services
from netfront.kafka.groups.classic_groups import ClassicGroups
from netfront.kafka.groups.read_positions import ReadPositions
from netfront.kafka.producers.transactional_producer import TransactionalProducers


def classic_groups(services: Services) -> ClassicGroups:
    """The classic groups of this gateway."""
    groups: ClassicGroups | None = services.state.get("classic_groups")
    if groups is None:
        groups = services.state["classic_groups"] = ClassicGroups(
            services.timers, lambda: services.now_ns, services.settings
        )
    return groups


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
