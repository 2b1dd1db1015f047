"""Secrets of an appliance with users, planted by a seed: none is in anything that it writes,
prints, answers or shows of its processes, but in the files that are there for them.
"""

from __future__ import annotations

import base64
import http.client
import pathlib
import random
import string
import tarfile

import orjson
import psutil
import pytest

from tailrace import Admin, Producer
from tailrace.core.errors import NotAuthenticatedError, NotAuthorizedError
from tests.kit.appliances.secured import Users, new_keys, secured
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S, children, wait_until
from tests.kit.seeds import block_name, fixed_blocks, new_blocks

KEPT = {"server.key", "own.context", "admin.context", "console.token"}
"""Files of the data directory that are there for a secret."""
LETTERS = string.ascii_letters + string.digits
"""None that an encoding of text would write in another way."""


def post(address: str, path: str, headers: dict[str, str]) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=HANG_LIMIT_S)
    connection.request("POST", path, b"{}", {"Content-Type": "application/json", **headers})
    body = connection.getresponse().read()
    connection.close()
    return body


def basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def console_of(users: Users) -> str:
    log = pathlib.Path(users.appliance.log_path)
    wait_until(lambda: "console address=http://" in log.read_text(), "the console listens")
    return log.read_text().split("console address=http://")[1].split()[0].strip("/")


@pytest.mark.parametrize(
    "block",
    [*fixed_blocks(1, 1), pytest.param(new_blocks(1, 1)[0], marks=pytest.mark.long)],
    ids=block_name,
)
def test_no_secret_of_users_is_in_anything_but_its_file(
    tmp_path: pathlib.Path, block: range
) -> None:
    rng = random.Random(block[0])
    planted = {}

    def plant(what: str) -> str:
        planted[what] = "".join(rng.choices(LETTERS, k=24))
        return planted[what]

    settings = {
        "audit.enabled": "true", "audit.data": "*", "http.listen": "127.0.0.1:0",
        "log_level": "debug", "kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true",
    }  # fmt: skip
    written: list[bytes] = []
    bundle = tmp_path / "bundle.tar.gz"
    with secured(tmp_path, **settings) as users:
        directory = pathlib.Path(users.appliance.data_dir)
        admin = f"context:{directory}/admin.context#{users.appliance.address}"
        out = str(tmp_path / "shop.context")

        def do(*arguments: str, stdin: str = "", status: int | None = 0) -> bytes:
            done = run(None, *arguments, "--bootstrap", admin, stdin=stdin.encode(), status=status)
            written.extend([done.stdout, done.stderr])
            return done.stdout

        first, second = plant("password"), plant("changed password")
        do("user", "add", "shop", "--role", "admin", "--password-stdin", stdin=first)
        do("user", "passwd", "shop", "--password-stdin", stdin=second)
        do("user", "rotate", "shop", "--out", out)
        planted["secret key of a user"] = orjson.loads(pathlib.Path(out).read_bytes())["secret_key"]
        for name in ("admin.context", "own.context"):
            planted[name] = orjson.loads((directory / name).read_bytes())["secret_key"]
        pair = orjson.loads((directory / "server.key").read_bytes())["content"]
        planted["server.key"] = pair["secret"]
        planted["token of a scraper"] = (
            run(None, "token", "add", "prometheus", "--data-dir", str(directory), "--json")
            .stdout.decode().split('"token":')[1].split('"')[1]
        )  # fmt: skip
        console = console_of(users)
        for name, password in (
            ("shop", plant("wrong password")), ("nobody", plant("password of nobody")),
            ("shop", second),
        ):  # fmt: skip
            post(console, "/api/login", basic(name, password))
        post(console, "/api/login", {"Authorization": f"Bearer {plant('wrong token')}"})
        post(console, f"/api/sql?token={plant('token in an address')}", {})
        planted["console.token"] = (directory / "console.token").read_text().strip()
        public, secret = new_keys()
        planted["unknown key"] = secret
        with (
            Admin(users.context("stranger", public, secret), connect_timeout_ms=60_000) as stranger,
            pytest.raises((NotAuthenticatedError, NotAuthorizedError)),
        ):
            stranger.list_topics()
        with Producer(f"context:{out}#{users.appliance.address}") as producer:
            producer.send("orders", b"v").result(HANG_LIMIT_S)
            written.append(repr(producer).encode())
        for command in (
            ("status", "--json"), ("user", "list", "--json"), ("user", "list", "shop"),
            ("config", "show", "--running"), ("acl", "list"), ("quota", "list"),
            ("doctor", "--bundle", str(bundle)),
        ):  # fmt: skip
            do(*command, status=None)
        with Admin(admin) as asked:
            written.append(repr([asked.list_users(), asked.config_state()]).encode())
        for pid in [users.appliance.pid, *children(users.appliance).values()]:
            process = psutil.Process(pid)
            written += [" ".join(process.cmdline()).encode(), repr(process.environ()).encode()]

        def audit() -> bytes:
            return b"".join(path.read_bytes() for path in (directory / "audit").glob("*.jsonl"))

        wait_until(lambda: b"no user has the key" in audit(), "the stranger's line is written")
        written.append(pathlib.Path(users.appliance.log_path).read_bytes())
        written += [
            path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file() and path.name not in KEPT
        ]
        kept = b"".join((directory / name).read_bytes() for name in KEPT)
    with tarfile.open(bundle) as archive:
        members = [archive.extractfile(name) for name in archive.getnames()]
        written += [member.read() for member in members if member is not None]
    everything = b"\n".join(written)
    for seen in (
        b"no user has the key",
        b"shop",
        b"console_login_failed",
        b"ALTER_USERS",
        b"prometheus",
    ):
        assert seen in everything, "what is looked through has what was done"
    found = {
        what
        for what, text in planted.items()
        for form in (text.encode(), base64.b64encode(text.encode()), text.encode().hex().encode())
        if form in everything
    }
    assert not found
    assert planted["admin.context"].encode() in kept
