"""Contents of `pip install`, which works beside modules of the user's that have our names."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import appliance as server
import tailrace
from appliance.supervise.processes.restart_policy import ExitCode
from tailrace import kernel, launcher
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.kernel.build import NotCompiledError, compile_kernel
from tests.kit.hosts.installed import ROOT, build_wheel, install, requirements, top_level_names
from tests.kit.processes import HANG_LIMIT_S

pytestmark = pytest.mark.long  # wheels are built and installed: a minute
SERVER_PACKAGES = {"appliance", "netfront", "shm", "workers"}
OF_THE_SERVER = (
    "tailrace_server",
    "spark_bridge",
    "pyspark_tailrace",
    "click",
    "rich",
    "posix_ipc",
    "prometheus_client",
    "psutil",
    "pyspark",
)
BREAKS = "raise SystemExit(__file__ + ' was imported in place of the one that was meant')\n"


class Installed(NamedTuple):
    wheel: pathlib.Path
    programs: pathlib.Path


def _installed(project: pathlib.Path, to: pathlib.Path) -> Installed:
    wheel = build_wheel(project, to)
    return Installed(wheel, install(wheel, to / "venv"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return _installed(ROOT, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return _installed(ROOT / "client", tmp_path_factory.mktemp("client"))


@pytest.fixture
def hostile(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory of the user's: packages with our names, modules with those of the standard
    library and of our dependencies. Each breaks who imports it.
    """
    directory = tmp_path / "project"
    for name in (*SERVER_PACKAGES, "spark_bridge", "bench", "zmq"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text(BREAKS)
    for name in (
        "logging",
        "json",
        "select",
        "argparse",
        "tempfile",
        "click",
        "orjson",
        "psutil",
        "sqlite3",
    ):
        (directory / f"{name}.py").write_text(BREAKS)
    return directory


def environment_of(hostile: pathlib.Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(hostile), "PYTHONDONTWRITEBYTECODE": "1", **more}


def run(
    program: pathlib.Path,
    *arguments: str,
    cwd: pathlib.Path,
    environment: dict[str, str],
    stdin: str = "",
) -> str:
    """Its standard output."""
    done = subprocess.run(
        [program, *arguments],
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installing_adds_names_of_our_own_only(whole: Installed, client: Installed) -> None:
    assert top_level_names(whole.wheel) == {
        "tailrace",
        "tailrace_server",
        "spark_bridge",
        "pyspark_tailrace.py",
    }
    assert top_level_names(client.wheel) == {"tailrace"}


def test_the_packages_ask_for_what_the_table_of_dependencies_says(
    whole: Installed, client: Installed
) -> None:
    table = (ROOT / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]*) \|", table, re.MULTILINE)
    of = {
        kind: {name for name, kinds in rows if kind in kinds.split(", ")}
        for kind in ("client", "server", "spark", "demo", "load", "otel")
    }
    assert requirements(client.wheel) == of["client"]
    assert requirements(whole.wheel) == of["client"] | of["server"]
    assert requirements(whole.wheel, "spark") == of["spark"]
    assert requirements(whole.wheel, "demo") - {"tailrace"} == of["demo"]
    assert requirements(whole.wheel, "load") == of["load"]
    assert requirements(whole.wheel, "otel") == requirements(client.wheel, "otel") == of["otel"]


def test_wheels_hold_the_compiled_kernel_where_it_can_be_compiled_and_need_no_compiler_then(
    whole: Installed, client: Installed
) -> None:
    is_compiled = (
        bool(importlib.util.find_spec("Cython") and shutil.which("cc"))
        and os.environ.get("TAILRACE_PURE") != "1"
    )
    for installed in (whole, client):
        assert ("-linux_" in installed.wheel.name) is is_compiled, (
            "a wheel with compiled code is for one platform"
        )
        assert installed.wheel.name.endswith("-py3-none-any.whl") is not is_compiled
        environment = {"PATH": "/nowhere"}
        said = run(
            installed.programs / "python",
            "-m",
            "tailrace.kernel",
            cwd=installed.programs,
            environment=environment,
        )
        assert said.startswith(
            "tailrace: kernel: "
            f"{f'compiled, {kernel.stamp()}' if is_compiled else 'Python, because none is compiled here'}"  # noqa: E501
        )
        pure = run(
            installed.programs / "python",
            "-m",
            "tailrace.kernel",
            cwd=installed.programs,
            environment={**environment, "TAILRACE_PURE": "1"},
        )
        assert pure.startswith("tailrace: kernel: Python, because TAILRACE_PURE=1")


@pytest.mark.parametrize(
    ("prepared", "reason"),
    [({"CC": "/bin/false"}, "the C compiler failed with exit status 1"),
    ({"PATH": "/nowhere", "CC": "nowhere"}, "there is no C compiler"),
     ({"TAILRACE_PURE": "1"}, "TAILRACE_PURE=1 is set")],
)  # fmt: skip
def test_a_build_goes_on_without_a_compiler_and_says_so_in_one_line(
    tmp_path: pathlib.Path, prepared: dict[str, str], reason: str
) -> None:
    if importlib.util.find_spec("Cython") is None and "TAILRACE_PURE" not in prepared:
        reason = "Cython is not installed here"
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-d", str(tmp_path), "-t", "wheel"]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **prepared},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=True,
    )
    (line,) = [line for line in (built.stdout + built.stderr).splitlines() if "kernel" in line]
    assert line.startswith(f"tailrace: the kernel is not compiled: {reason}")
    assert [path.name for path in tmp_path.glob("*.whl")] == [
        f"tailrace-{tailrace.__version__}-py3-none-any.whl"
    ]


def test_a_tree_that_cannot_be_written_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("Cython") is None or shutil.which("cc") is None:
        pytest.skip("nothing can be compiled here")
    monkeypatch.delenv("TAILRACE_PURE", raising=False)
    with pytest.raises(NotCompiledError, match=r"^/proc/self(/\S+)? cannot be written"):
        compile_kernel(ROOT, pathlib.Path("/proc/self"))


def test_server_and_client_have_one_version() -> None:
    assert server.__version__ == tailrace.__version__


@pytest.fixture
def served(whole: Installed, hostile: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[str]:
    """The address of an installed appliance that was started in the user's directory."""
    process = subprocess.Popen(
        [whole.programs / "tailrace", "serve", "--data-dir", str(tmp_path / "data"), "--listen",
        "tcp://127.0.0.1:0", "--set", "http.listen=127.0.0.1:0"],
        cwd=hostile, env=environment_of(hostile), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if " ready " in line:
            break
    else:
        pytest.fail("".join(lines))
    yield line.split("address=")[1].split()[0]
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(HANG_LIMIT_S) == 0, rest
    assert "ended_badly" not in "".join(lines) + rest


def test_an_installed_appliance_and_its_command_line_take_nothing_of_the_users(
    whole: Installed, served: str, hostile: pathlib.Path
) -> None:
    environment = environment_of(hostile, TAILRACE_BOOTSTRAP=served)
    program = whole.programs / "tailrace"
    run(program, "topic", "create", "orders", cwd=hostile, environment=environment)
    run(program, "produce", "orders", cwd=hostile, environment=environment, stdin="one\ntwo\n")
    assert (
        run(program, "consume", "orders", "--from-beginning", cwd=hostile, environment=environment)
        == "one\ntwo\n"
    )
    state = json.loads(run(program, "status", "--json", cwd=hostile, environment=environment))
    assert [p["name"] for p in state["processes"] if not p["live"] or p["restarts"]] == []


def test_python_m_tailrace_is_the_command_line(whole: Installed, hostile: pathlib.Path) -> None:
    said = run(
        whole.programs / "python",
        "-m",
        "tailrace",
        "--version",
        cwd=hostile,
        environment=environment_of(hostile),
    )
    assert said == f"tailrace, version {tailrace.__version__}\n"


def test_a_client_of_another_version_over_the_server_and_a_missing_dependency_are_refused(
    whole: Installed, tmp_path: pathlib.Path
) -> None:
    (site,) = whole.programs.parent.glob("lib/python*/site-packages")
    shutil.copytree(site / "tailrace", tmp_path / "tailrace")
    os.symlink(site / "tailrace_server", tmp_path / "tailrace_server")
    python, command = (
        str(whole.programs / "python"),
        ["-I", str(tmp_path / "tailrace" / "launcher.py"), "appliance.supervise.supervisor"],
    )
    missing = subprocess.run(
        [python, "-S", *command], capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert missing.returncode == ExitCode.CONFIG, missing.stderr
    assert re.fullmatch(
        r"tailrace: the package \w+ is missing in .* pip install tailrace\n", missing.stderr
    )
    packages = tmp_path / "tailrace" / "__init__.py"
    packages.write_text(
        packages.read_text().replace(
            f'__version__ = "{tailrace.__version__}"', '__version__ = "9.9"'
        )
    )
    mixed = subprocess.run(
        [python, *command], capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert mixed.returncode == ExitCode.CONFIG, mixed.stderr
    assert (
        "the client 9.9: tailrace-client was installed over tailrace; run: pip uninstall"
        in mixed.stderr
    )


def test_an_embedded_appliance_takes_nothing_of_the_programs_directory_nor_its_path(
    whole: Installed, hostile: pathlib.Path
) -> None:
    program = f"""
import importlib.util, os
import tailrace
from tailrace.launcher import server_root
assert "site-packages" in tailrace.__file__ and server_root().endswith("site-packages/tailrace_server")
assert importlib.util.find_spec("workers") is None and importlib.util.find_spec("appliance") is None, "found by the user's programs"
os.environ["PYTHONPATH"] = {str(hostile)!r}
with tailrace.embedded() as appliance:
    with tailrace.Producer(appliance.address) as producer:
        producer.send("orders", b"one").result(60)
    with tailrace.Consumer("orders", bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        print(consumer.poll(20_000)[0].value)
"""  # noqa: E501
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -P: what the program itself imports from its directory follows Python's rules.
    assert (
        run(whole.programs / "python", "-P", "-c", program, cwd=hostile, environment=environment)
        == "b'one'\n"
    )


def test_an_embedded_appliance_starts_in_a_program_that_has_a_json_and_a_logging_of_its_own(
    whole: Installed, tmp_path: pathlib.Path
) -> None:
    for name in ("json", "logging"):
        (tmp_path / f"{name}.py").write_text(BREAKS)
    program = "import tailrace\nwith tailrace.embedded() as running:\n    print(running.address)\n"
    out = run(
        whole.programs / "python",
        "-c",
        program,
        cwd=tmp_path,
        environment={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert out.startswith("tcp://127.0.0.1:")


def test_a_programs_own_workers_and_shm_are_left_to_it(
    whole: Installed, tmp_path: pathlib.Path
) -> None:
    for name in SERVER_PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("whose = 'the user'\n")
    program = """
import appliance, netfront, shm, workers
import tailrace
with tailrace.embedded() as running, tailrace.Producer(running.address) as producer:
    producer.send("orders", b"one").result(60)
print({module.whose for module in (appliance, netfront, shm, workers)})
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert (
        run(whole.programs / "python", "-c", program, cwd=tmp_path, environment=environment)
        == "{'the user'}\n"
    )


def test_the_client_alone_works_and_says_what_it_cannot_do(
    client: Installed, appliance: EmbeddedAppliance, tmp_path: pathlib.Path
) -> None:
    program = f"""
import importlib.util, tailrace
for name in {sorted({*SERVER_PACKAGES, *OF_THE_SERVER})}:
    assert importlib.util.find_spec(name) is None, name
with tailrace.Admin({appliance.address!r}) as admin, tailrace.Producer({appliance.address!r}) as producer:
    admin.create_topics([tailrace.NewTopic("client-alone")])
    producer.send("client-alone", b"one", key=b"k").result(60)
with tailrace.Consumer("client-alone", bootstrap={appliance.address!r}, auto_offset_reset="earliest") as consumer:
    print(consumer.poll(20_000)[0].value)
try:
    tailrace.embedded().start()
except tailrace.NotSupportedError as error:
    print(error)
"""  # noqa: E501
    says = f"{launcher.CLIENT_ALONE}. {launcher.INSTALL_SERVER}"
    # Beside it, packages of the user's with the server's names.
    for name in SERVER_PACKAGES:
        (tmp_path / name).mkdir()
    (tmp_path / "appliance" / "supervisor.py").write_text(BREAKS)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = run(
        client.programs / "python", "-P", "-c", program, cwd=tmp_path, environment=environment
    )
    assert out.splitlines() == ["b'one'", f"{says}. [NOT_SUPPORTED]"]
    for around in (environment, environment_of(tmp_path)):
        done = subprocess.run(
            [client.programs / "tailrace", "serve"],
            cwd=tmp_path,
            env=around,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"tailrace: {says}\n")
