"""The documents are true: generated parts are what the code says, snippets run, named tests exist, links lead somewhere.

After a change that is meant, `TAILRACE_WRITE_DOCS=1 pytest tests/test_docs.py` writes the generated parts anew.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
import zmq

from appliance.settings import setting_names
from appliance.topic_settings import LATER, TOPIC_SETTINGS
from tailrace import Admin, NewTopic
from tailrace.private_appliance import EmbeddedAppliance
from tailrace.protocol import requests
from tailrace.protocol.errors import ERROR_TABLE
from tailrace.protocol.wire import Api, encode_request
from tests.kit.batches import make_batch

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def check_part(path: pathlib.Path, name: str, wanted: str) -> None:
    """The part of a document between its marks is `wanted`."""
    text = path.read_text()
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    found, mark, after = rest.partition(end)
    assert mark, f"{path} has no part {name}"
    if os.environ.get("TAILRACE_WRITE_DOCS"):
        path.write_text(before + start + wanted + end + after)
        return
    assert found == wanted, f"part {name} of {path.name} is not what the code says; see this module's docstring"


def test_the_error_table() -> None:
    rows = [f"| {int(c)} | {c.name} | {'yes' if r.retriable else 'no'} | {r.meaning} | {r.advice} |\n" for c, r in ERROR_TABLE.items()]
    check_part(
        ROOT / "docs/protocol.md", "errors", "| number | name | retriable | meaning | what to do |\n|---|---|---|---|---|\n" + "".join(rows)
    )


def test_the_settings_tables() -> None:
    rows = []
    for name, item in setting_names().items():
        default = item.default if item.default_factory.__class__.__name__ == "_MISSING_TYPE" else item.default_factory()
        rows.append(f"| `{name}` | `{default}` | {item.metadata['doc']} |\n")
    check_part(ROOT / "docs/operations.md", "settings", "| setting | default | |\n|---|---|---|\n" + "".join(rows))
    rows = [f"| `{s.name}` | `{s.default}` | {s.doc} |\n" for s in TOPIC_SETTINGS.values()]
    later = f"\nNot in this version, and refused rather than ignored: {', '.join(f'`{name}`' for name in LATER)}.\n"
    check_part(ROOT / "docs/operations.md", "topic settings", "| setting | default | |\n|---|---|---|\n" + "".join(rows) + later)


def dump(title: str, frames: Sequence[bytes], masks: Sequence[Sequence[tuple[int, int]]], shown: int = 3) -> str:
    """Frames as hexadecimal, 16 bytes a line; masked ranges as dots."""
    lines = [f"{title}\n"]
    for number, frame in enumerate(frames):
        lines.append(f"  frame {number + 1}, {len(frame)} bytes\n" if number < shown else f"  frame {number + 1}: the batch\n")
        if number >= shown:
            continue
        hidden = {index for start, end in (masks[number] if number < len(masks) else ()) for index in range(start, end)}
        for at in range(0, len(frame), 16):
            cells = [".." if at + i in hidden else f"{byte:02x}" for i, byte in enumerate(frame[at : at + 16])]
            lines.append(f"    {at:04x}  {' '.join(cells)}\n")
    return "".join(lines)


GENERATION = (32, 36)
TOPIC_ID = (0, 16)


def test_the_hex_dumps_are_those_of_real_exchanges(appliance: EmbeddedAppliance) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("hexdump")])
        info = admin.topic_info(["hexdump"])["hexdump"]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.setsockopt(zmq.RCVTIMEO, 10_000)
    client.connect(appliance.address)

    def exchange(api: int, correlation_id: int, body: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        request = [bytes(frame) for frame in encode_request(api, 1, correlation_id, body)]
        client.send_multipart(request)
        return request, client.recv_multipart()

    parts = []
    versions = {str(int(api)): [1, 1] for api in Api}
    request, response = exchange(Api.HANDSHAKE, 1, [requests.encode_json({"versions": versions, "client_id": "dump"})])
    parts.append(dump("HANDSHAKE request", request, []))
    # The answer's JSON holds numbers of varying length: only its header is shown.
    parts.append(dump("HANDSHAKE response (its JSON is left out)", response[:1], [[(20, 24), GENERATION]]))
    parts.append(dump("PING request", exchange(Api.PING, 2, [])[0], []))
    batch = bytes(make_batch(2, seed=info.seeds[0], schema_id=info.schema_id))
    body = [requests.encode_produce(requests.ProduceRequest(info.topic_id, 0, requests.ACKS_ALL, 30_000)), batch]
    request, response = exchange(Api.PRODUCE, 3, body)
    parts.append(dump("PRODUCE request, acks=all", request, [[], [TOPIC_ID]], shown=2))
    parts.append(dump("PRODUCE response", response, [[GENERATION], [(8, 16)]]))
    fetch = requests.FetchRequest(500, 1, 1 << 20, 0, [requests.FetchEntry(info.topic_id, 0, -1, 0, 1 << 20)])
    request, response = exchange(Api.FETCH, 4, [requests.encode_fetch(fetch)])
    parts.append(dump("FETCH request", request, [[], [(24, 40)]]))
    parts.append(dump("FETCH response", response, [[GENERATION], [(8, 24)]], shown=2))
    request, response = exchange(999, 5, [])
    parts.append(dump("A request with an unknown API number", request, []))
    parts.append(dump("its answer", response, [[GENERATION], []]))
    client.close()
    check_part(ROOT / "docs/protocol.md", "exchanges", "```\n" + "\n".join(parts) + "```\n")


def test_the_tests_that_the_guarantees_name_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/guarantees.md").read_text()))
    defined = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))))
    assert named
    assert named <= defined


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", [ROOT / "README.md"], ids=lambda path: path.name)
def test_python_snippets_run(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert snippets
    for number, snippet in enumerate(snippets):
        if snippet.startswith("spark"):
            continue  # runs in tests/spark_bridge, in a session of its own
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", snippet], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, f"snippet {number + 1} of {path.name}:\n{done.stderr}"


def test_files_named_in_the_map_exist() -> None:
    for name in re.findall(
        r"`((?:tailrace|shm|workers|netfront|appliance|spark_bridge|bench|tests|systemd)/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text()
    ):
        assert (ROOT / name).exists(), f"CONTRIBUTING.md names {name}"
