"""The controller commits once for what comes together, and what it could not keep nobody is told
of.
"""

from __future__ import annotations

import pathlib
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack

import orjson
import pytest

from shm.memory.layout import Role
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.protocol.frame import Api
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import children, commits_of, stopped


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    yield running
    assert running.stop() == 0


def test_requests_that_come_together_are_one_transaction(own: EmbeddedAppliance) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(own.address)) for _ in range(20)]
        assert clients[0].ask(Api.CREATE_TOPICS, {"topics": [{"name": "t"}]})[0] is ErrorCode.OK
        before = commits_of(own, Role.CONTROLLER)
        pid = children(own)["tr-controller-0"]
        with stopped(pid):
            asked = []
            for number, client in enumerate(clients):
                asked += [(client, client.send(Api.INIT_PRODUCER_ID, b"{}")) for _ in range(2)]
                lease = {
                    "lease": f"l{number}",
                    "topic": "t",
                    "partition": 0,
                    "offset": 0,
                    "ttl_ms": 60_000,
                }
                asked.append((client, client.send(Api.LEASE_OFFSETS, orjson.dumps(lease))))
            for client in (
                clients * 2
            ):  # what came before is with the controller when the second is answered
                assert client.answer(client.send(Api.PING))[0] is ErrorCode.OK
        answers = [client.answer(number) for client, number in asked]
        assert {code for code, _ in answers} == {ErrorCode.OK}
        producers = [
            orjson.loads(body[0])["producer_id"] for _, body in answers if b"producer_id" in body[0]
        ]
        assert len(set(producers)) == len(producers) == 40
        assert commits_of(own, Role.CONTROLLER) == before + 1


def test_topics_made_together_cost_few_transactions(own: EmbeddedAppliance) -> None:
    before = commits_of(own, Role.CONTROLLER)
    with RawClient(own.address) as client:
        topics = [{"name": f"t{number}", "partitions": 2} for number in range(64)]
        code, answer = client.ask(Api.CREATE_TOPICS, {"topics": topics})
        assert (code, {result["code"] for result in answer["results"]}) == (ErrorCode.OK, {0})
        code, answer = client.ask(
            Api.DELETE_TOPICS, {"topics": [{"name": topic["name"]} for topic in topics]}
        )
        assert (code, {result["code"] for result in answer["results"]}) == (ErrorCode.OK, {0})
    assert commits_of(own, Role.CONTROLLER) - before < 4 * 64, (
        "one for each decision, and one for each end, would be as many"
    )


def test_a_catalog_that_another_program_holds_refuses_everything_of_a_step_and_goes_on_afterwards(
    own: EmbeddedAppliance,
) -> None:
    holder = sqlite3.connect(f"{own.data_dir}/coordinator.db", isolation_level=None)
    try:
        with RawClient(own.address) as client:
            holder.execute("BEGIN IMMEDIATE")
            asked = [client.send(Api.INIT_PRODUCER_ID, b"{}") for _ in range(10)]
            made = client.send(
                Api.CREATE_TOPICS,
                orjson.dumps({"topics": [{"name": f"t{number}"} for number in range(30)]}),
            )
            for number in asked:
                code, body = client.answer(number)
                assert code is ErrorCode.STORAGE_ERROR
                assert "locked" in orjson.loads(body[0])["message"]
            code, body = client.answer(made)
            assert {result["code"] for result in orjson.loads(body[0])["results"]} == {
                ErrorCode.STORAGE_ERROR
            }
            holder.execute("ROLLBACK")
            assert client.ask(Api.INIT_PRODUCER_ID, {})[0] is ErrorCode.OK
            code, answer = client.ask(
                Api.CREATE_TOPICS, {"topics": [{"name": f"t{number}"} for number in range(30)]}
            )
            assert {result["code"] for result in answer["results"]} == {0}
    finally:
        holder.close()
