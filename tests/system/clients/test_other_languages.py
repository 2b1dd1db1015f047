"""The example clients, written from the protocol page, against a real appliance: what they send is
what ours reads, and back.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.client.records.partitioners import partition_for_key
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S, kill_and_wait_for_successor, wait_until

CLIENT = pathlib.Path(__file__).parents[3] / "examples/clients/javascript"
TRANSACTIONAL = (
    pathlib.Path(__file__).parents[3] / "examples/clients/python/transactional_producer.py"
)
GROUP_MEMBER = pathlib.Path(__file__).parents[3] / "examples/clients/python/group_member.py"
COUNT = 1_000


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
@pytest.mark.skipif(
    not (CLIENT / "node_modules").exists(),
    reason=f"its packages are not here: npm ci --prefix {CLIENT.name}",
)
def test_a_client_in_javascript_produces_fetches_and_chooses_partitions_as_ours(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 3, {"compression.type": "zstd"})])
    with Producer(
        appliance.address, compression_type="none"
    ) as producer:  # the example unpacks nothing
        handle = producer.send(topic, b"from Python", b"k0")
        assert handle.result(60).partition == partition_for_key(b"k0", 3)
    command = ["node", "example.mjs", appliance.address, topic, str(COUNT)]
    done = subprocess.run(
        command, cwd=CLIENT, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["sent"], said["read"]) == (COUNT, COUNT + 1)
    assert said["partitions"] == {f"k{n}": [partition_for_key(b"k%d" % n, 3)] for n in range(7)}
    with Consumer(
        topic, bootstrap=appliance.address, auto_offset_reset="earliest", max_poll_records=10_000
    ) as consumer:
        values: dict[bytes, list[int]] = {}
        while sum(map(len, values.values())) < COUNT:
            for record in consumer.poll(60_000):
                if (record.value or b"").startswith(b"value "):
                    values.setdefault(record.key or b"", []).append(
                        int((record.value or b"").split()[1])
                    )
    assert all(numbers == sorted(numbers) for numbers in values.values())
    assert sorted(n for numbers in values.values() for n in numbers) == list(range(COUNT))


def test_members_of_a_group_that_know_the_protocol_page_alone_share_hand_over_and_commit(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    """Two of them, and a consumer of ours that takes their places."""
    assert "import tailrace" not in GROUP_MEMBER.read_text().replace("imports tailrace", "")
    outputs = [tmp_path / "first", tmp_path / "second"]
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address) as producer,
        ExitStack() as stack,
    ):
        admin.create_topics([NewTopic(topic, 4)])

        def send(first: int, last: int) -> None:
            for number in range(first, last):
                producer.send(topic, b"%d" % number, partition=number % 4)
            producer.flush(60)

        def start(output: pathlib.Path) -> subprocess.Popen[bytes]:
            file = stack.enter_context(output.open("wb"))
            command = [sys.executable, "-I", str(GROUP_MEMBER), appliance.address, topic, topic]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE)
            stack.callback(process.kill)
            return process

        def printed() -> Counter[int]:
            return Counter(
                int(line.split()[2][2:-1])
                for output in outputs
                if output.exists()
                for line in output.read_text().splitlines()
            )

        def owned() -> list[int]:
            described = (
                admin.describe_groups(topic)[topic]
                if topic in admin.list_groups()
                else {"members": []}
            )
            return sorted(len(one["owned"].get(topic, [])) for one in described["members"])

        send(0, 400)
        processes = [start(outputs[0])]
        wait_until(lambda: len(printed()) == 400, "the first reads everything")
        processes.append(start(outputs[1]))
        wait_until(lambda: owned() == [2, 2], "they share the partitions")
        send(400, 800)
        wait_until(lambda: len(printed()) == 800, "both read on")
        assert set(printed().values()) == {1}, "a hand-over repeats nothing"
        assert outputs[1].read_text(), "the second has its share"
        for process in processes:
            process.terminate()
        for process in processes:
            assert (
                process.wait(HANG_LIMIT_S),
                process.stderr.read() if process.stderr else b"",
            ) == (0, b"")
            if process.stderr:
                process.stderr.close()
        assert admin.list_groups()[topic]["members"] == 0, "they have left"
        assert {
            key.partition: int(found or 0) for key, found in admin.list_group_offsets(topic).items()
        } == dict.fromkeys(range(4), 200)
        with Consumer(
            topic, bootstrap=appliance.address, group_id=topic, auto_offset_reset="earliest"
        ) as consumer:
            send(800, 801)
            assert [record.value for record in consumer.poll(60_000)] == [b"800"]
            assert consumer.position(TopicPartition(topic, 0)) == 201


def test_a_transactional_producer_that_knows_the_protocol_page_alone_commits_aborts_and_is_fenced(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    assert "import tailrace" not in TRANSACTIONAL.read_text().replace("imports tailrace", "")
    with Admin(appliance.address) as admin, ExitStack() as stack:
        admin.create_topics([NewTopic(topic, 3), NewTopic(f"{topic}-in")])
        with Producer(appliance.address) as other:
            for _ in range(3):
                other.send(f"{topic}-in", b"read")

        def start() -> subprocess.Popen[str]:
            command = [sys.executable, "-I", str(TRANSACTIONAL), appliance.address, topic, topic]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def decided(process: subprocess.Popen[str], line: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            print(line, file=process.stdin, flush=True)
            return str(json.loads(process.stdout.readline())["outcome"])

        first = start()
        assert decided(first, "a b c") == "commit"
        kill_and_wait_for_successor(appliance, "tr-worker-0")
        assert decided(first, "!x y") == "abort"
        kill_and_wait_for_successor(appliance, "tr-groups-0")
        assert decided(first, f"d @{topic}-in/2") == "commit"
        second = start()
        assert decided(second, "e") == "commit"
        _, error = first.communicate("f\n", HANG_LIMIT_S)
        assert "error 54" in error, "the second has fenced the first"
        _, error = second.communicate("", HANG_LIMIT_S)
        assert (second.returncode, error) == (0, "")
        offsets = {
            key.topic: int(found or 0) for key, found in admin.list_group_offsets(topic).items()
        }
        assert offsets == {f"{topic}-in": 2}
        with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
            found = consumer.consume(5, timeout=HANG_LIMIT_S) + consumer.poll(timeout_ms=200)
    assert sorted(record.value or b"" for record in found) == [b"a", b"b", b"c", b"d", b"e"]
