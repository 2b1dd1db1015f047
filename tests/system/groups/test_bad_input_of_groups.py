"""Bad input of groups, over the wire and through the SDK: each is refused with a sentence, and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidGroupError, InvalidRequestError, InvalidSettingError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol.frame import Api
from tests.kit.peers.raw_client import RawClient
from tests.kit.peers.raw_members import RawMember, committed, insist

RECORDS = 5


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of two partitions; the first has some records."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic, 2)])
        for _ in range(RECORDS):
            producer.send(topic, b"x", partition=0)
        producer.flush(60)
    return topic


@pytest.fixture
def client(appliance: EmbeddedAppliance) -> Iterator[RawClient]:
    with RawClient(appliance.address) as made:
        insist(made, Api.DELETE_GROUPS, {"groups": []})  # the process of groups runs
        yield made


@pytest.mark.parametrize(
    "name", ["x" * 10_000, "x" * 250, "", "line\nbreak", "nul\0", "\x7f", "bell\x07"]
)
def test_a_group_with_a_name_that_is_none_is_refused_by_every_request(
    appliance: EmbeddedAppliance, client: RawClient, filled: str, name: str
) -> None:
    member = {"member_id": "m1", "member_epoch": 0, "topics": [filled], "owned": {}}
    offsets = [[filled, 0, 1, -1, ""]]
    for api, request in (
        (Api.GROUP_HEARTBEAT, member),
        (Api.GROUP_HEARTBEAT, {**member, "kind": "share"}),
        (Api.COMMIT_OFFSETS, {"offsets": offsets}),
        (Api.FETCH_OFFSETS, {"partitions": None}),
        (Api.DESCRIBE_GROUP, {"part": "members"}),
        (Api.ALTER_GROUP_OFFSETS, {"offsets": [[filled, 0, 1, ""]]}),
        (Api.SHARE_ACQUIRE, {"member_id": "m1", "member_epoch": 1, "max_records": 1}),
    ):
        code, answer = client.ask(api, {**request, "group": name})
        assert code is ErrorCode.INVALID_GROUP, (api, answer)
        assert len(answer["message"]) < 500
    (result,) = insist(client, Api.DELETE_GROUPS, {"groups": [name]})["results"]
    assert result["code"] == ErrorCode.INVALID_GROUP
    assert not [
        one
        for one in insist(client, Api.LIST_GROUPS, {"after": ""})["groups"]
        if one["group"] == name
    ]
    refusals = (InvalidGroupError, InvalidSettingError, InvalidRequestError)
    with (
        pytest.raises(refusals) as caught,
        Consumer(filled, bootstrap=appliance.address, group_id=name) as consumer,
    ):
        consumer.poll(60_000)
    assert len(str(caught.value)) < 500
    with (
        pytest.raises(refusals),
        ShareConsumer(filled, bootstrap=appliance.address, group_id=name) as share,
    ):
        share.poll(60_000)
    with pytest.raises(refusals), Admin(appliance.address) as admin:
        admin.describe_groups(name)


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (["{}", 0, RECORDS + 1, -1, ""], ErrorCode.OFFSET_OUT_OF_RANGE),
        (["{}", 0, 1 << 61, -1, ""], ErrorCode.OFFSET_OUT_OF_RANGE),
        (["{}", 1, 1, -1, ""], ErrorCode.OFFSET_OUT_OF_RANGE),
        (["{}", 0, -1, -1, ""], ErrorCode.OFFSET_OUT_OF_RANGE),
        (["{}", 2, 0, -1, ""], ErrorCode.PARTITION_OUT_OF_RANGE),
        (["{}", -1, 0, -1, ""], ErrorCode.PARTITION_OUT_OF_RANGE),
        (["{}-not-there", 0, 0, -1, ""], ErrorCode.UNKNOWN_TOPIC),
        (["{}", 0, 1, -1, "ü" * 2_049], ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_commit_that_cannot_be_is_refused_and_what_came_with_it_is_kept(
    client: RawClient, filled: str, entry: list[Any], code: ErrorCode
) -> None:
    entry = [entry[0].format(filled), *entry[1:]]
    member = RawMember(client, filled, [filled])
    member.settle(2)
    for number, who in enumerate(
        ({"member_id": member.member_id, "member_epoch": member.epoch}, {})
    ):
        group = filled if who else f"{filled}-outside"
        request = {"group": group, **who, "offsets": [entry, [filled, 0, 2 + number, -1, ""]]}
        (refused,) = insist(client, Api.COMMIT_OFFSETS, request)["refused"]
        assert refused[:3] == [*entry[:2], code]
        assert 0 < len(refused[3]) < 500
        assert committed(client, group) == {(filled, 0): 2 + number}
    request = {"group": f"{filled}-new", "offsets": [entry]}
    assert len(insist(client, Api.COMMIT_OFFSETS, request)["refused"]) == 1
    assert (
        client.ask(Api.DESCRIBE_GROUP, {"group": f"{filled}-new", "part": "members"})[0]
        is ErrorCode.UNKNOWN_GROUP
    )


def test_a_member_of_the_past_is_fenced_and_the_present_one_goes_on(
    client: RawClient, filled: str
) -> None:
    first = RawMember(client, filled, [filled])
    first.settle(2)
    past = first.epoch
    for _ in range(2):
        second = RawMember(client, filled, [filled])
        second.heartbeat()
        first.settle(1)
        second.settle(1)
        if second.epoch == past + 1:
            insist(
                client,
                Api.GROUP_HEARTBEAT,
                {"group": filled, "member_id": second.member_id, "member_epoch": -1},
            )
            first.settle(2)
    assert past < first.epoch - 1, "the epoch just before is taken: an answer may have been lost"
    about = {"group": filled, "member_id": first.member_id}
    for epoch in (past, first.epoch + 1, 1 << 40):
        code, answer = client.ask(
            Api.GROUP_HEARTBEAT, {**about, "member_epoch": epoch, "owned": {}}
        )
        assert code is ErrorCode.FENCED_MEMBER, answer
        assert str(first.epoch) in answer["message"]
    ((_, theirs),) = [(topic, partitions[0]) for topic, partitions in second.owned.items()]
    offsets = [[filled, theirs, 0, -1, ""]]
    (refused,) = insist(
        client, Api.COMMIT_OFFSETS, {**about, "member_epoch": past, "offsets": offsets}
    )["refused"]
    assert refused[2] == ErrorCode.FENCED_MEMBER
    (refused,) = insist(
        client, Api.COMMIT_OFFSETS, {**about, "member_epoch": first.epoch, "offsets": offsets}
    )["refused"]
    assert refused[2] == ErrorCode.PARTITION_NOT_OWNED
    assert (
        client.ask(
            Api.COMMIT_OFFSETS, {**about, "member_epoch": first.epoch + 1, "offsets": offsets}
        )[0]
        is ErrorCode.FENCED_MEMBER
    )
    nobody = {"group": filled, "member_id": "0" * 32, "member_epoch": 1}
    assert client.ask(Api.GROUP_HEARTBEAT, nobody)[0] is ErrorCode.UNKNOWN_MEMBER
    assert (
        client.ask(Api.COMMIT_OFFSETS, {**nobody, "offsets": offsets})[0]
        is ErrorCode.UNKNOWN_MEMBER
    )
    assert committed(client, filled) == {}
    assert first.heartbeat() is second.heartbeat() is ErrorCode.OK
    assert first.count == second.count == 1


def test_the_second_of_two_members_with_one_instance_id_is_refused(
    client: RawClient, filled: str
) -> None:
    first = RawMember(client, filled, [filled], instance_id="pod-0")
    first.settle(2)
    second = RawMember(client, filled, [filled], instance_id="pod-0")
    assert second.heartbeat() is ErrorCode.INSTANCE_ID_IN_USE
    assert first.heartbeat() is ErrorCode.OK
    assert first.count == 2
    assert (
        insist(client, Api.DESCRIBE_GROUP, {"group": filled, "part": "members"})["group"]["members"]
        == 1
    )
