"""Consumer groups: requests in, answers out, a database below; knows no lane and no process.

A step of the process that runs it:

    handle(...) for each request, session_closed(...), topics_changed(...)      state in memory
    step(now)                                                                   timers
    store.commit()            calls settle: targets are computed, heartbeats that waited for them are answered, rows are written, then all is kept
    take_answers(), take_pushes()                                               to be sent: what they say is on the disk

When `commit` raises: `store.rollback()`, `rolled_back(now)`, and then `take_answers` has that error for each request that the step would have
changed something for. A service is made when the whole catalog is known (see `TopicsView`).

What a client has to keep to, so that no partition has two readers: it says in `owned` what it has given back, and, before or after, what it takes; an
assignment that comes in an answer to a heartbeat without `owned`, or is another than its `owned`, is followed by a heartbeat with `owned`, also where
the member has nothing to change; after a heartbeat that was not answered with OK, the next one carries `owned`; from a heartbeat with `owned` until
one is answered with OK the member takes no partition. (An answer to a heartbeat with `owned` always carries the assignment: what an answer that was lost
has said may not hold any more.)

Owner: one process, one thread.
Invariants: a heartbeat without news costs no write and no look at other members; a group's target is computed once for all that a step changed.
Crash: the rows are the state; sessions begin anew at a start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import orjson

from appliance.groups import membership
from appliance.groups.assignor_plugins import Assignors
from appliance.groups.describing import Describing
from appliance.groups.expiry import Expiry
from appliance.groups.group import ConsumerGroup
from appliance.groups.limits import DELETED_AT_ONCE_MAX, GroupLimits
from appliance.groups.members import AWAY_EPOCH, JOIN_EPOCH, REVOKING, Member, MemberSettings, by_topic
from appliance.groups.messages import Answer, GroupsOfAKind, Partition, Push, Requester, SessionKey, TopicsView
from appliance.groups.offsets import Commit, OffsetBook, entry_parts
from appliance.groups.requests import SHARE, entries_in, epoch_in, group_in, kind_in, member_in, shown
from appliance.groups.store import GroupStore
from tailrace.errors import (
    FencedMemberError,
    GroupNotEmptyError,
    InvalidGroupError,
    InvalidRequestError,
    NotSupportedError,
    StorageError,
    TailraceError,
    UnknownGroupError,
    UnknownMemberError,
)
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import encode_error
from tailrace.protocol.wire import Api

logger = logging.getLogger(__name__)

_NOTHING_REFUSED = b'{"refused":[]}'


class GroupService:
    """All groups of the appliance."""

    def __init__(
        self, store: GroupStore, topics: TopicsView, limits: GroupLimits, answer_max: int, now_ns: int, wall_us: Callable[[], int], *,
        share: GroupsOfAKind | None = None, assignors: Assignors | None = None,
    ) -> None:  # fmt: skip
        """Takes over what the store holds. `answer_max`: bytes of an answer's body. `wall_us`: the time of day. Raises StorageError."""
        self._store = store
        self._topics = topics
        self._limits = limits
        self._answer_max = answer_max
        self._wall_us = wall_us
        self._share = share
        self._assignors = Assignors() if assignors is None else assignors
        self._groups: dict[str, ConsumerGroup] = {}
        self._names: dict[int, str] = {}
        self._sessions = membership.Sessions(now_ns, self._expired)
        self._offsets = OffsetBook(store)
        self._expiry = Expiry(store, topics, limits, now_ns)
        self._catalog_version = wall_us() // 1_000
        self._now_ns = now_ns
        self._answers: list[tuple[Answer, str | None]] = []
        """(answer, the group that it is about): made, not taken. None: about any group; "": about nothing that a rollback could change."""
        self._waiting: list[tuple[Requester, ConsumerGroup, Member, frozenset[Partition] | None]] = []
        """Heartbeats that are answered when the step is settled."""
        self._pushes: dict[SessionKey, Push] = {}
        self._changed: dict[int, str] = {}
        """Groups that this step has changed: id -> name."""
        self._describing = Describing(store, topics, self._offsets, answer_max, self.summary)
        self._load(now_ns)
        store.before_commit.append(self.settle)
        store.after_commit.append(self._kept)

    def _load(self, now_ns: int) -> None:
        rows: dict[int, list[Any]] = {}
        for row in self._store.all_members():
            rows.setdefault(row.group_id, []).append(row)
        for group_row in self._store.groups("consumer"):
            self._take_in(ConsumerGroup.of_rows(group_row, rows.get(group_row.group_id, ()), now_ns))
        self.topics_changed(now_ns)

    def _take_in(self, group: ConsumerGroup) -> None:
        self._groups[group.name] = group
        self._names[group.group_id] = group.name
        for member in group.members.values():
            self._sessions.watch(group.group_id, member)

    # ---- what comes in ---------------------------------------------------------------------------------------------------------------

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """One request. Its answer is taken later, but for a refusal, which this raises: TailraceError."""
        self._now_ns = now_ns
        if api == Api.GROUP_HEARTBEAT:
            self._heartbeat(requester, request, now_ns)
        elif api == Api.COMMIT_OFFSETS:
            self._commit(requester, request)
        elif api == Api.LIST_GROUPS:
            self._answer(requester, None, self._describing.list_groups(request))
        elif api == Api.DELETE_GROUPS:
            self._delete_groups(requester, request, now_ns)
        elif api in _OF_ONE_GROUP:
            name = group_in(request)
            if self._share is not None and self._share.has(name):
                self._share.handle(requester, api, request, now_ns)
            else:
                self._of_consumer_group(requester, api, name, request)
        else:
            raise InvalidRequestError(f"the API {api} is not one of groups")

    def _of_consumer_group(self, requester: Requester, api: int, name: str, request: dict[str, Any]) -> None:
        group = self._groups.get(name)
        if api == Api.FETCH_OFFSETS:
            self._answer(requester, name, self._describing.fetch_offsets(group, request))
        elif api == Api.ALTER_GROUP_OFFSETS:
            self._alter_offsets(requester, name, request)
        elif group is None:
            raise UnknownGroupError(f"there is no group {shown(name)}")
        elif api == Api.DESCRIBE_GROUP:
            self._answer(requester, name, self._describing.describe(group, request, self._now_ns))
        else:
            raise InvalidGroupError(f"{shown(name)} is a consumer group: records are acquired and acknowledged in share groups")

    def summary(self, name: str) -> dict[str, Any] | None:
        """The group's row in a list, whatever its kind; None: it is gone."""
        group = self._groups.get(name)
        if group is not None:
            return group.summary()
        return self._share.summary(name) if self._share is not None and self._share.has(name) else None

    def session_closed(self, session: SessionKey, now_ns: int) -> None:
        """The connection is gone: its dynamic members have CLOSED_GRACE_NS to come over another one."""
        self._now_ns = now_ns
        self._sessions.closed(SessionKey(*session), now_ns)
        if self._share is not None:
            self._share.session_closed(session, now_ns)

    def sessions_of(self, front: int) -> list[SessionKey]:
        """The sessions of a front (one that was restarted: its sessions are closed) that have members."""
        return self._sessions.of_front(front)

    def topics_changed(self, now_ns: int) -> None:
        """There are other topics, partitions or settings: groups whose subscriptions they concern are assigned anew, members are told."""
        self._now_ns = now_ns
        self._catalog_version += 1
        for group in self._groups.values():
            if not group.members:
                continue
            subscribed = group.subscribed(self._topics)
            if subscribed != group.signature:
                self._touch(group)
                group.is_dirty = True
            paused = membership.paused_of(subscribed, self._topics)
            for member in group.members.values():
                if paused != group.paused or member.settings.follows_catalog:
                    self._push(group, member)
            group.paused = paused
        self._expiry.topics_changed(now_ns)
        if self._share is not None:
            self._share.topics_changed(now_ns)

    # ---- heartbeats ------------------------------------------------------------------------------------------------------------------

    def _heartbeat(self, requester: Requester, request: dict[str, Any], now_ns: int) -> None:
        name = request.get("group")
        group = self._groups.get(name) if type(name) is str else None
        if group is not None:
            member_id = request.get("member_id")
            member = group.members.get(member_id) if type(member_id) is str else None
            if (
                member is not None
                and member.quiet_answer
                and member.session == requester[:2]
                and member.epoch == group.epoch == request.get("member_epoch")
                and not group.is_dirty
                and member.quiet_version == self._catalog_version
                and request.get("topics") is None
                and request.get("owned") is None
                and request.get("kind") != SHARE
            ):
                member.last_heartbeat_ns = now_ns
                self._answers.append((Answer(requester, 0, member.quiet_answer), ""))
                return
        self._full_heartbeat(requester, request, now_ns)

    def _full_heartbeat(self, requester: Requester, request: dict[str, Any], now_ns: int) -> None:
        name, kind, epoch, member_id = group_in(request), kind_in(request), epoch_in(request), member_in(request)
        is_share = self._share is not None and self._share.has(name)
        group = self._groups.get(name)
        if (kind == SHARE and group is not None) or (kind != SHARE and is_share):
            raise InvalidGroupError(f"{shown(name)} is a {'share' if is_share else 'consumer'} group already")
        if epoch == JOIN_EPOCH and group is None and not is_share:
            self._check_group_count(name)
        if kind == SHARE:
            if self._share is None:
                raise NotSupportedError("this appliance has no share groups; join as a consumer group")
            self._share.handle(requester, Api.GROUP_HEARTBEAT, request, now_ns)
            return
        if epoch < 0:
            self._leave(requester, group, member_id, epoch, now_ns)
            return
        if epoch == JOIN_EPOCH:
            said: frozenset[Partition] | None
            settings, said = membership.joining_in(request, self._limits)
            membership.check_assignor(self._assignors, group, member_id, settings)
            group, member = self._join(group, name, member_id, settings, now_ns)
        else:
            if group is None:
                raise UnknownMemberError(f"there is no group {shown(name)}")
            member = membership.known_member(group, request, member_id)
            said = membership.checked_heartbeat(member, epoch, request)
            membership.subscribe_anew(group, member, request)
        self._touch(group)
        self._sessions.heard(group.group_id, member, SessionKey(*requester[:2]), now_ns)
        if said is not None:
            member.reported = said
        self._waiting.append((requester, group, member, said))

    def _check_group_count(self, name: str) -> None:
        count = len(self._groups) + (0 if self._share is None else self._share.count())
        if count >= self._limits.groups_max:
            detail = f"there are {count} groups, as many as groups.max allows: {shown(name)} was not made"
            raise TailraceError(detail, ErrorCode.TOO_MANY_GROUPS)

    def _join(
        self, group: ConsumerGroup | None, name: str, member_id: str, settings: MemberSettings, now_ns: int
    ) -> tuple[ConsumerGroup, Member]:
        if group is not None:
            old = membership.place_of_instance(group, member_id, settings, self._sessions.started_ns, now_ns)
            member = group.members.get(member_id)
            if member is None and old is None and len(group.members) >= self._limits.members_max:
                raise membership.full(group)
        else:
            old = member = None
            group = self._new_group(name)
        if settings.assignor is not None:
            group.assignor = settings.assignor
        if member is not None and old is not None:  # it takes another instance id, and that one's place
            self._remove(group, member, "joined under another instance id")
            member = None
        if member is not None:
            membership.join_again(group, member, settings)
            return group, member
        member = Member(member_id, settings)
        if old is not None:
            logger.info("group=%s instance=%s member=%s replaces=%s", name, settings.instance_id, member_id, old.member_id)
            self._sessions.forget(old)
            group.replace(old, member)
        else:
            group.add(member)
        return group, member

    def _new_group(self, name: str) -> ConsumerGroup:
        group = ConsumerGroup(self._store.new_group_id(), name, self._wall_us() // 1_000)
        self._groups[name] = group
        self._names[group.group_id] = name
        self._touch(group)
        return group

    def _leave(self, requester: Requester, group: ConsumerGroup | None, member_id: str, epoch: int, now_ns: int) -> None:
        """A member that there is not has left already."""
        member = None if group is None else group.members.get(member_id)
        if group is not None and member is not None:
            self._touch(group)
            if epoch == AWAY_EPOCH:
                membership.go_away(group, member)
                member.last_heartbeat_ns = now_ns
            else:
                self._remove(group, member, "left")
        name = None if group is None else group.name
        self._answer(requester, name, orjson.dumps({"member_id": member_id, "member_epoch": epoch}))

    def _remove(self, group: ConsumerGroup, member: Member, reason: str) -> None:
        logger.info("group=%s member=%s client=%s removed=%s", group.name, member.member_id, member.settings.client_id, reason)
        self._touch(group)
        self._sessions.forget(member)
        group.remove(member, self._wall_us() // 1_000)

    def _expired(self, group_id: int, member: Member, now_ns: int) -> None:
        """A member's timer fires."""
        group = self._groups[self._names[group_id]]
        reason = membership.reason_to_remove(member, now_ns)
        if reason:
            self._remove(group, member, reason)
        else:
            self._sessions.watch(group_id, member)

    # ---- offsets ---------------------------------------------------------------------------------------------------------------------

    def _commit(self, requester: Requester, request: dict[str, Any]) -> None:
        name = group_in(request)
        if self._share is not None and self._share.has(name):
            raise InvalidGroupError(f"{shown(name)} is a share group: its members acknowledge records, they do not commit offsets")
        entries = entries_in(request)
        group = self._groups.get(name)
        member, epoch = None, -1
        if request.get("member_id") is not None:
            member_id, epoch = member_in(request), epoch_in(request)
            if group is None:
                raise UnknownMemberError(f"there is no group {shown(name)}")
            member = membership.known_member(group, request, member_id)
            if epoch > member.epoch:
                raise FencedMemberError(f"the epoch {epoch} is from before the member joined again: its epoch is {member.epoch}")
        self._keep_offsets(requester, group, name, entries, member, epoch)

    def _keep_offsets(
        self, requester: Requester, group: ConsumerGroup | None, name: str, entries: list[Any], member: Member | None, epoch: int
    ) -> None:
        """Commit what may be committed, and answer."""
        if group is None:
            self._check_group_count(name)
        owners = {} if group is None else group.owners
        commit = Commit(self._topics, self._limits, owners, member, epoch, self._wall_us() // 1_000)
        group_id = 0 if group is None else group.group_id
        rows = [row for entry in entries if (row := commit.row(group_id, entry)) is not None]
        if rows:
            if group is None:
                group = self._new_group(name)
                rows = [row._replace(group_id=group.group_id) for row in rows]
            self._changed[group.group_id] = name
            for row in rows:
                self._offsets.put(row)
        self._answer(requester, name, self._refusals(commit.refused))

    def _refusals(self, refused: list[list[Any]]) -> bytes:
        if not refused:
            return _NOTHING_REFUSED
        body = orjson.dumps({"refused": refused})
        if len(body) > self._answer_max:  # the codes say it too
            body = orjson.dumps({"refused": [[*refusal[:3], ""] for refusal in refused]})
        return body

    def _alter_offsets(self, requester: Requester, name: str, request: dict[str, Any]) -> None:
        """An operator sets or deletes offsets; whole or not at all while there are members."""
        group = self._groups.get(name)
        if group is not None and group.members:
            raise GroupNotEmptyError(f"the group {name} has {len(group.members)} members; its offsets were not changed")
        kept: list[Any] = []
        gone: list[tuple[str, int]] = []
        refused: list[list[Any]] = []
        for entry in entries_in(request):
            if isinstance(entry, list) and len(entry) >= 3 and entry[2] is None:
                topic, partition, *_ = entry_parts([*entry[:2], 0])
                found = self._topics.by_name(topic)
                if found is None:
                    refused.append([topic, partition, int(ErrorCode.UNKNOWN_TOPIC), f"there is no topic {shown(topic)}"])
                else:
                    gone.append((found.topic_id, partition))
            elif isinstance(entry, list) and 3 <= len(entry) <= 4:
                kept.append([*entry[:3], -1, entry[3] if len(entry) > 3 else ""])
            else:
                kept.append(entry)
        if group is None:
            self._check_group_count(name)
        commit = Commit(self._topics, self._limits, {}, None, -1, self._wall_us() // 1_000)
        rows = [row for entry in kept if (row := commit.row(0, entry)) is not None]
        if rows and group is None:
            group = self._new_group(name)
        if group is not None:
            self._changed[group.group_id] = name
            for row in rows:
                self._offsets.put(row._replace(group_id=group.group_id))
            for topic_id, partition in gone:
                self._offsets.delete(group.group_id, topic_id, partition)
        self._answer(requester, name, self._refusals(refused + commit.refused))

    # ---- groups that go --------------------------------------------------------------------------------------------------------------

    def _delete_groups(self, requester: Requester, request: dict[str, Any], now_ns: int) -> None:
        names = request.get("groups")
        if not isinstance(names, list) or len(names) > DELETED_AT_ONCE_MAX:
            raise InvalidRequestError(f"the request needs a list `groups` of at most {DELETED_AT_ONCE_MAX} names")
        results = []
        for name in names:
            code, message = 0, ""
            try:
                self._delete_group(group_in({"group": name}), now_ns)
            except TailraceError as error:
                code, message = int(error.code), error.detail
            results.append({"group": name if isinstance(name, str) else shown(name), "code": code, "message": message})
        self._answer(requester, None, orjson.dumps({"results": results}))

    def _delete_group(self, name: str, now_ns: int) -> None:
        if self._share is not None and self._share.has(name):
            self._share.delete(name, now_ns)
            return
        group = self._groups.get(name)
        if group is None:
            raise UnknownGroupError(f"there is no group {shown(name)}")
        if group.members:
            raise GroupNotEmptyError(f"the group {name} has {len(group.members)} members")
        self._drop(group)

    def _drop(self, group: ConsumerGroup) -> None:
        """An empty group, with its offsets."""
        self._changed[group.group_id] = group.name
        self._offsets.settle()
        self._store.delete_group(group.group_id)
        del self._groups[group.name], self._names[group.group_id]

    # ---- time ------------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> None:
        """Timers: members that are silent, offsets that are old. Before the commit."""
        self._now_ns = now_ns
        self._sessions.advance(now_ns)
        if self._expiry.is_due(now_ns):
            self._offsets.settle()
            for group_id in self._expiry.step(now_ns, self._wall_us() // 1_000):
                self._drop(self._groups[self._names[group_id]])
        if self._share is not None:
            self._share.step(now_ns)

    def next_deadline_ns(self) -> int | None:
        """When `step` next has something to do; None: never."""
        deadlines = [self._sessions.next_deadline_ns(), self._expiry.next_deadline_ns()]
        if self._share is not None:
            deadlines.append(self._share.next_deadline_ns())
        return min((one for one in deadlines if one is not None), default=None)

    # ---- the end of a step -----------------------------------------------------------------------------------------------------------

    def _touch(self, group: ConsumerGroup) -> None:
        self._changed[group.group_id] = group.name

    def settle(self) -> None:
        """Compute targets, answer the heartbeats that waited for them, write rows. The store's commit calls it. Raises StorageError, DiskFullError."""
        if not (self._changed or self._waiting):
            if self._share is not None:
                self._share.settle()
            return
        groups = [self._groups[name] for name in self._changed.values() if name in self._groups]
        for group in groups:
            if group.is_dirty:
                group.assign(self._topics, self._assignors)
                group.paused = membership.paused_of(group.signature, self._topics)
                for member in group.with_news():
                    self._push(group, member)
        waiting, self._waiting = self._waiting, []
        for requester, group, member, said in waiting:
            self._answer_heartbeat(requester, group, member, said)
        for group in groups:
            for member_id in group.next_owners():
                self._push(group, group.members[member_id])
            self._write(group)
        for requester, *_ in waiting:
            self._pushes.pop(SessionKey(*requester[:2]), None)  # it has its answer
        self._offsets.settle()
        if self._share is not None:
            self._share.settle()

    def _answer_heartbeat(self, requester: Requester, group: ConsumerGroup, member: Member, said: frozenset[Partition] | None) -> None:
        if group.members.get(member.member_id) is not member:  # removed behind its heartbeat, in the same step
            error = UnknownMemberError(f"the group {group.name} has no member {member.member_id} any more")
            self._answers.append((Answer(requester, int(error.code), encode_error(error.detail)), group.name))
            return
        group.reconcile(member, said, self._now_ns)
        self._sessions.watch(group.group_id, member)
        answer: dict[str, Any] = {
            "member_id": member.member_id, "member_epoch": member.epoch, "paused_topics": group.paused, "catalog_version": self._catalog_version,
        }  # fmt: skip
        is_quiet = member.reported == member.assigned.keys() and member.state != REVOKING
        is_settled = is_quiet and member.is_settled(group.epoch)
        member.quiet_answer, member.quiet_version = (orjson.dumps(answer), self._catalog_version) if is_settled else (b"", 0)
        if said is not None or not is_quiet:
            answer["assignment"] = by_topic(member.assigned)
            answer["topic_names"] = group.names_of(answer["assignment"], self._topics)
        self._answers.append((Answer(requester, 0, orjson.dumps(answer)), group.name))

    def _push(self, group: ConsumerGroup, member: Member) -> None:
        """Ask a member to send a heartbeat now."""
        if member.session is not None and member.closed_ns is None:
            body = orjson.dumps({"group": group.name, "member_id": member.member_id})
            self._pushes[member.session] = Push(*member.session, int(Api.GROUP_HEARTBEAT), body)

    def _write(self, group: ConsumerGroup) -> None:
        if group.touched:
            there = [group.members[one] for one in group.touched if one in group.members]
            gone = [(group.group_id, one) for one in group.touched if one not in group.members]
            if gone:
                self._store.delete_members(gone)
            if there:
                self._store.put_members([member.row(group.group_id) for member in there])
            group.touched.clear()
        if group.is_row_changed:
            self._store.put_groups([group.row()])
            group.is_row_changed = False

    def _answer(self, requester: Requester, group: str | None, body: bytes) -> None:
        self._answers.append((Answer(requester, 0, body), group))

    def _kept(self) -> None:
        self._changed = {}

    def take_answers(self) -> list[Answer]:
        """The answers of this step, each once. After the commit, or after `rolled_back`."""
        answers, self._answers = [answer for answer, _ in self._answers], []
        if self._share is not None:
            answers += self._share.take_answers()
        return answers

    def take_pushes(self) -> list[Push]:
        """The pushes of this step, each once; one at most for each session."""
        pushes, self._pushes = list(self._pushes.values()), {}
        if self._share is not None:
            pushes += self._share.take_pushes()
        return pushes

    def rolled_back(self, now_ns: int, error: TailraceError | None = None) -> None:
        """The store was rolled back: the groups that the step changed are again as the disk has them, and its answers about them say `error`. Raises
        StorageError when they cannot be read: the process is to end then.
        """
        if error is None:
            error = StorageError("groups.db could not keep what the request changed; nothing of it was kept")
        self._offsets.forget()
        self._expiry.rolled_back()
        for group_id, name in self._changed.items():
            self._reload(group_id, name, now_ns)
        body = encode_error(error.detail)
        changed = set(self._changed.values())
        for answer, about in self._answers:
            if answer.code == 0 and (about is None or about in changed):
                answer.code, answer.body = int(error.code), body
        self._answers += [(Answer(requester, int(error.code), body), "") for requester, *_ in self._waiting]
        self._waiting, self._pushes, self._changed = [], {}, {}
        if self._share is not None:
            self._share.rolled_back(now_ns, error)

    def _reload(self, group_id: int, name: str, now_ns: int) -> None:
        old = self._groups.get(name)
        known = {}
        if old is not None and old.group_id == group_id:
            known = old.members
            for member in known.values():
                self._sessions.forget(member)
            del self._groups[name], self._names[group_id]
        row = self._store.group(group_id)
        if row is None:
            return
        group = ConsumerGroup.of_rows(row, self._store.members(group_id), now_ns)
        group.is_dirty = bool(group.members) and group.subscribed(self._topics) != group.signature
        self._take_in(group)
        for member in group.members.values():
            before = known.get(member.member_id)
            if before is not None:
                self._sessions.resume(group_id, member, before)


_OF_ONE_GROUP = frozenset((Api.FETCH_OFFSETS, Api.DESCRIBE_GROUP, Api.ALTER_GROUP_OFFSETS, Api.SHARE_ACQUIRE, Api.SHARE_ACKNOWLEDGE))
