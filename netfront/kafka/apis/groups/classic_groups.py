"""JoinGroup, SyncGroup, Heartbeat, LeaveGroup: the classic protocol of consumer groups.

The gateway has the members of classic groups, the process of groups has their offsets. While a
classic group has members, the gateway renews a lease for it (GROUP_HEARTBEAT with kind "classic"),
so that no consumer of our protocol joins the same group, and no operator changes its offsets.

Invariants:
- A request for a member is its user's (GROUP_AUTHORIZATION_FAILED).
- A classic group has no members while the group has members of another protocol.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError, Services
from netfront.kafka.apis.shared_state import classic_groups
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.groups.classic_group import ClassicGroup
from netfront.kafka.groups.classic_groups import lease_end
from netfront.kafka.groups.classic_member import MS, GroupError, Join
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from shm.rights.acl import DELETE, GROUP
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

GROUP_NAME_MAX = 249
PROTOCOLS_MAX = 32
METADATA_MAX_BYTES = 1 << 20
"""The most bytes of a member's metadata of all protocols, and of an assignment."""
INSTANCE_ID_MAX = 249
COORDINATOR_MEMBER_ID_MAX = 64
"""Characters of the id of a member that the process of groups knows."""
LEASE_NS = 60_000 * MS
LEASE_RENEWED_NS = 10_000 * MS
REBALANCE_MAX_MS = 3_600_000
ALL_GROUP_OPERATIONS = 0b0000_0001_0100_1000
"""Bits of read, delete, describe."""


def is_group_name(name: str) -> bool:
    """False for a name that no group can have."""
    return 1 <= len(name) <= GROUP_NAME_MAX


def check_group_name(name: str) -> None:
    """Raises RefusedError for a name that no group can have."""
    if not is_group_name(name):
        raise RefusedError(
            KafkaError.INVALID_GROUP_ID, f"a group id has 1 to {GROUP_NAME_MAX} characters"
        )


def join_group(call: Call) -> Steps:
    """Join a group, and wait until all its members have."""
    services, request = call.services, call.request
    name = request["group_id"]
    check_group_name(name)
    join = _join_in(call)
    groups = classic_groups(services)
    group = groups.group(name)
    if group is None:
        raise RefusedError(KafkaError.GROUP_MAX_SIZE_REACHED, "there are too many groups")
    if group.is_unused or group.lease_until_ns < services.now_ns:
        try:
            error = yield from _renew_lease(call, group)
        finally:  # it may end here: its connection was closed
            groups.schedule(group)
        if error is not KafkaError.NONE:
            return {"error_code": error, "protocol_name": "", "leader": "",
                    "member_id": request["member_id"], "members": []}  # fmt: skip
        found = groups.group(name)
        if found is None:
            raise RefusedError(KafkaError.GROUP_MAX_SIZE_REACHED, "there are too many groups")
        found.lease_until_ns = max(found.lease_until_ns, group.lease_until_ns)
        group = found
    try:
        waiter = group.join(join, services.now_ns)
    except GroupError as error:
        groups.schedule(group)
        return {"error_code": error.code, "protocol_name": "", "leader": "",
                "member_id": request["member_id"], "members": []}  # fmt: skip
    groups.schedule(group)
    response: dict[str, Any] = {}
    try:
        response = yield waiter
    finally:
        if not waiter.is_done:
            group.abandon(waiter, services.now_ns)
            groups.schedule(group)
    return {"protocol_name": "", "leader": "", "member_id": request["member_id"], "members": [],
            **response}  # fmt: skip


def _join_in(call: Call) -> Join:
    """The request, its bounds checked. Raises RefusedError."""
    request, settings = call.request, call.services.settings
    session_ms = request["session_timeout_ms"]
    if not (
        settings["group.session.timeout.min.ms"]
        <= session_ms
        <= settings["group.session.timeout.max.ms"]
    ):
        raise RefusedError(
            KafkaError.INVALID_SESSION_TIMEOUT,
            f"session.timeout.ms is {session_ms}; the appliance takes "
            f"{settings['group.session.timeout.min.ms']} (group.session.timeout.min.ms) to "
            f"{settings['group.session.timeout.max.ms']} (group.session.timeout.max.ms)",
        )
    rebalance_ms = request.get("rebalance_timeout_ms", -1)
    protocols = [(each["name"], bytes(each["metadata"] or b"")) for each in request["protocols"]]
    size = sum(len(name) + len(metadata) for name, metadata in protocols)
    instance_id = request.get("group_instance_id")
    if len(protocols) > PROTOCOLS_MAX or size > METADATA_MAX_BYTES:
        raise RefusedError(KafkaError.INVALID_REQUEST, "the member's metadata is too large")
    if instance_id is not None and not 1 <= len(instance_id) <= INSTANCE_ID_MAX:
        raise RefusedError(KafkaError.INVALID_REQUEST, "group.instance.id has 1 to 249 characters")
    return Join(
        member_id=request["member_id"],
        instance_id=instance_id,
        client_id=call.client_id,
        host="/" + call.connection.address.rpartition(":")[0],
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=min(
            rebalance_ms if rebalance_ms > 0 else session_ms, REBALANCE_MAX_MS
        ),
        protocol_type=request["protocol_type"],
        protocols=protocols,
        requires_known_id=call.version >= 4,
        can_skip_assignment=call.version >= 9,
        user=call.user,
    )


def _renew_lease(call: Call, group: ClassicGroup) -> Steps:
    """Ask the process of groups to keep other protocols out. Returns a KafkaError."""
    answer = yield call.ask(
        Api.GROUP_HEARTBEAT,
        {
            "group": group.name, "kind": "classic", "member_id": "kafka", "member_epoch": 0,
            "session_timeout_ms": LEASE_NS // MS,
        },
    )  # fmt: skip
    if answer.code is ErrorCode.OK:
        group.lease_until_ns = call.services.now_ns + LEASE_NS
        return KafkaError.NONE
    if answer.code in (ErrorCode.INVALID_GROUP, ErrorCode.GROUP_NOT_EMPTY):
        return KafkaError.INCONSISTENT_GROUP_PROTOCOL
    return coordinator_error(answer.code)


def _member_group(call: Call) -> ClassicGroup:
    check_group_name(call.request["group_id"])
    group = classic_groups(call.services).get(call.request["group_id"])
    if group is None:
        raise RefusedError(KafkaError.UNKNOWN_MEMBER_ID)
    return group


def sync_group(call: Call) -> Steps:
    """Take the assignment of the generation, or give it, as its leader does."""
    request, services = call.request, call.services
    group = _member_group(call)
    try:
        member = group.member(request["member_id"], request.get("group_instance_id"), call.user)
        group.check_generation(request["generation_id"])
        group.check_protocol(request.get("protocol_type"), request.get("protocol_name"))
        assignments = [
            (each["member_id"], bytes(each["assignment"] or b"")) for each in request["assignments"]
        ]
        if sum(len(assignment) for _, assignment in assignments) > group_bytes_max(group):
            raise RefusedError(KafkaError.INVALID_REQUEST, "the assignments are too large")
        waiter = group.sync(member, assignments, services.now_ns)
    except GroupError as error:
        return {"error_code": error.code, "assignment": b""}
    classic_groups(services).schedule(group)
    response: dict[str, Any] = {}
    try:
        response = yield waiter
    finally:
        if not waiter.is_done:
            group.abandon(waiter, services.now_ns)
            classic_groups(services).schedule(group)
    return {"assignment": b"", **response}


def group_bytes_max(group: ClassicGroup) -> int:
    """The most bytes of a group's assignments."""
    return METADATA_MAX_BYTES + len(group.members) * 4096


def heartbeat(call: Call) -> Steps:
    """Say that the member is alive."""
    request, services = call.request, call.services
    group = _member_group(call)
    if group.lease_until_ns - services.now_ns < LEASE_NS - LEASE_RENEWED_NS:
        error = yield from _renew_lease(call, group)
        if error is KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            # The process of groups was restarted, and others were faster than this renewal.
            group.dissolve()
            classic_groups(services).schedule(group)
            raise RefusedError(KafkaError.UNKNOWN_MEMBER_ID, "it has members of another protocol")
    try:
        member = group.member(request["member_id"], request.get("group_instance_id"), call.user)
        group.check_generation(request["generation_id"])
        code = group.heartbeat(member, services.now_ns)
    except GroupError as error:
        return {"error_code": error.code}
    classic_groups(services).schedule(group)
    return {"error_code": code}


def leave_group(call: Call) -> Steps:
    """Leave a group: one member, or since version 3 several ones. Another user's members may be
    removed with the right to delete the group.
    """
    request, services = call.request, call.services
    user = None if call.may(DELETE, GROUP, request["group_id"]) else call.user
    check_group_name(request["group_id"])
    group = classic_groups(services).get(request["group_id"])
    leaving = [{"member_id": request.get("member_id", ""), "group_instance_id": None}]
    if call.version >= 3:
        leaving = request["members"]
    results = []
    for each in leaving:
        code = KafkaError.UNKNOWN_MEMBER_ID
        if group is not None:
            code = group.leave(
                each["member_id"], each.get("group_instance_id"), services.now_ns, user
            )
        results.append({**each, "error_code": code})
    if group is not None:
        classic_groups(services).schedule(group)
        if group.is_unused:
            yield from _end_lease(call, group)
    error = results[0]["error_code"] if call.version < 3 else KafkaError.NONE
    return {"error_code": error, "members": results}


def _end_lease(call: Call, group: ClassicGroup) -> Steps:
    group.lease_until_ns = 0
    yield call.ask(Api.GROUP_HEARTBEAT, lease_end(group))


def has_members(services: Services, name: str) -> bool:
    """True if the group has classic members; ids that were given out do not count."""
    group = classic_groups(services).get(name)
    return group is not None and bool(group.members)


def is_possible_member(member_id: str) -> bool:
    """True if the process of groups can know a member of this id. Ids of classic members have the
    client's in them, so they may be longer than all of its own.
    """
    return 0 < len(member_id) <= COORDINATOR_MEMBER_ID_MAX


def commit_error(
    call: Call, name: str, member_id: str, instance_id: str | None, generation: int
) -> KafkaError:
    """The error of a commit that is not of its user's member of the group's generation, or NONE.

    A group without classic members takes commits from outside. The process of groups checks those
    of a member, which it may know.
    """
    services = call.services
    group = classic_groups(services).get(name)
    if group is None or not group.members:
        is_unknown = generation >= 0 and not is_possible_member(member_id)
        return KafkaError.UNKNOWN_MEMBER_ID if is_unknown else KafkaError.NONE
    try:
        member = group.member(member_id, instance_id, call.user)
        group.check_generation(generation)
    except GroupError as error:
        return error.code
    group.heartbeat(member, services.now_ns)
    classic_groups(services).schedule(group)
    return KafkaError.NONE
