"""Roles: the ACLs that a producer or a consumer needs, as `kafka-acls --producer` has them.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shm.rights.acl import (
    ALTER,
    ALTER_CONFIGS,
    CLUSTER,
    CREATE,
    DELAY,
    DESCRIBE,
    GROUP,
    IDEMPOTENT_WRITE,
    LITERAL,
    PREFIXED,
    READ,
    TOPIC,
    TRANSACTIONAL_ID,
    WRITE,
)

PRODUCER, CONSUMER = "producer", "consumer"
DEAD_LETTERS = ".dlq"


def producer_acls(
    principal: str, topic: str, *, pattern: str = LITERAL, transactional_id: str | None = None
) -> Iterator[dict[str, Any]]:
    """Write to topics, create them, delay records and change these delays."""
    for operation in (WRITE, DESCRIBE, CREATE):
        yield _acl(principal, TOPIC, pattern, topic, operation)
    for operation in (DESCRIBE, ALTER):
        yield _acl(principal, DELAY, pattern, topic, operation)
    yield _acl(principal, CLUSTER, LITERAL, None, IDEMPOTENT_WRITE)
    if transactional_id is not None:
        for operation in (WRITE, DESCRIBE):
            yield _acl(principal, TRANSACTIONAL_ID, pattern, transactional_id, operation)


def consumer_acls(
    principal: str, topic: str, group: str, *, pattern: str = LITERAL, retries: bool = False
) -> Iterator[dict[str, Any]]:
    """Read topics as a member of a group. With `retries` also make, write and read the topics with
    which clients retry the group's records, and write dead letters.
    """
    for operation in (READ, DESCRIBE):
        yield _acl(principal, TOPIC, pattern, topic, operation)
    yield _acl(principal, GROUP, pattern, group, READ)
    if retries:
        for operation in (READ, WRITE, CREATE, ALTER_CONFIGS):
            yield _acl(principal, TOPIC, PREFIXED, f"{topic}.{group}.", operation)
        for operation in (WRITE, CREATE, ALTER_CONFIGS):
            yield _acl(principal, TOPIC, LITERAL, f"{topic}{DEAD_LETTERS}", operation)


def _acl(
    principal: str, kind: str, pattern: str, name: str | None, operation: str
) -> dict[str, Any]:
    fields = {
        "principal": principal, "resource_type": kind, "pattern": pattern, "operation": operation
    }  # fmt: skip
    return fields if name is None else {**fields, "name": name}
