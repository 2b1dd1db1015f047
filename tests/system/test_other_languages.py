"""The example client in JavaScript, written from the protocol page, against a real appliance: what it sends is what ours reads, and back."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.partitioners import partition_for_key
from tailrace.private_appliance import EmbeddedAppliance

CLIENT = pathlib.Path(__file__).parents[2] / "examples/clients/javascript"
COUNT = 1_000


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
@pytest.mark.skipif(not (CLIENT / "node_modules").exists(), reason=f"its packages are not here: npm ci --prefix {CLIENT.name}")
def test_a_client_in_javascript_produces_fetches_and_chooses_partitions_as_ours(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 3, {"compression.type": "zstd"})])
    with Producer(appliance.address, compression_type="none") as producer:  # the example unpacks nothing
        handle = producer.send(topic, b"from Python", b"k0")
        assert handle.result(60).partition == partition_for_key(b"k0", 3)
    command = ["node", "example.mjs", appliance.address, topic, str(COUNT)]
    done = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["sent"], said["read"]) == (COUNT, COUNT + 1)
    assert said["partitions"] == {f"k{n}": [partition_for_key(b"k%d" % n, 3)] for n in range(7)}
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest", max_poll_records=10_000) as consumer:
        values: dict[bytes, list[int]] = {}
        while sum(map(len, values.values())) < COUNT:
            for record in consumer.poll(60_000):
                if (record.value or b"").startswith(b"value "):
                    values.setdefault(record.key or b"", []).append(int((record.value or b"").split()[1]))
    assert all(numbers == sorted(numbers) for numbers in values.values())
    assert sorted(n for numbers in values.values() for n in numbers) == list(range(COUNT))
