"""Scans, queries and exports of an account that may not read the appliance's files go through the
front, and see what the rights of their user allow.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator

import pytest

from tailrace import NewTopic, Producer
from tests.kit.appliances.secured import admin_address, secured
from tests.kit.processes import HANG_LIMIT_S

NOBODY = 65534
READER = """
    import contextlib, io, json, os, sys
    import tailrace
    from appliance.cli.main import run
    own, address, directory = sys.argv[1:]

    def command(*arguments):
        out, error = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = run([*arguments, "--bootstrap", bootstrap])
        return [status, *(stream.buffer.getvalue().decode() for stream in (out, error))]

    def scanned(topic):
        try:
            return tailrace.scan(topic, bootstrap=bootstrap).read_all().num_rows
        except tailrace.TailraceError as error:
            return [type(error).__name__, str(error)]

    def everything(name, where):
        return {
            "scan": scanned(name),
            "sql": command("sql", "--json", f"select count(*) as n from {name}"),
            "export": command("export", name, "--to", where),
        }

    bootstrap = own
    everything("orders", f"{directory}/of-root")  # what is imported late, root alone may read
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    bootstrap = address
    topics = ("orders", "secret", "missing")
    print(json.dumps({topic: everything(topic, f"{directory}/{topic}") for topic in topics}))
"""


@pytest.fixture
def directory() -> Iterator[pathlib.Path]:
    """A directory of another account."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="tr-reader-"))
    os.chown(made, NOBODY, NOBODY)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_who_may_not_read_the_files_sees_what_its_rights_allow(
    tmp_path: pathlib.Path, directory: pathlib.Path
) -> None:
    with secured(directory) as users:
        users.admin.create_topics([NewTopic("orders"), NewTopic("secret")])
        own = admin_address(users.appliance)
        with Producer(own) as producer:
            for topic in ("orders", "secret"):
                producer.send(topic, b"v").result(HANG_LIMIT_S)
        context = users.add("reader", "read topic orders")
        os.chown(context.removeprefix("context:"), NOBODY, NOBODY)
        done = subprocess.run(
            [sys.executable, "-P", "-c", textwrap.dedent(READER), own, context, str(directory)],
            capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False, cwd="/",
            env={**os.environ, "PYTHONPATH": os.getcwd(), "HOME": str(directory)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    orders = found["orders"]
    assert orders["scan"] == 1
    assert orders["sql"][0] == 0
    assert json.loads(orders["sql"][1]) == [{"n": 1}]
    assert orders["export"][0] == 0, orders
    assert len(list((directory / "orders").rglob("*.parquet"))) == 1
    for kind, outcome in found["secret"].items():
        missing = json.loads(json.dumps(found["missing"][kind]).replace("missing", "secret"))
        assert outcome == missing, "a topic that one may not see looks like a missing one"
    assert found["secret"]["sql"][0] != 0
    assert found["secret"]["export"][0] != 0
    assert not (directory / "secret").exists()
