"""Completion, as a shell asks for it: the protocol by hand, and a real bash with the script that
`tailrace completion` prints.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest
from click.testing import CliRunner

from appliance.cli.main import tailrace
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import TAILRACE
from tests.kit.processes import HANG_LIMIT_S, wait_until


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    """Nothing of who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    return {**kept, "XDG_CONFIG_HOME": str(tmp_path / "config")}


def complete(environment: dict[str, str], line: str, shell: str = "bash") -> list[str]:
    """Candidates for the last word of `line`; nothing may be said on standard error, where it would
    spoil the line that is being typed.
    """
    words = line.split(" ")
    asked = {
        "_TAILRACE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
    }
    done = subprocess.run(
        [TAILRACE],
        env={**environment, **asked},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.split("\n") if line]


def test_topics_complete_in_every_shell_and_nothing_where_no_appliance_answers(
    appliance: EmbeddedAppliance, topic: str, environment: dict[str, str]
) -> None:
    names = [f"{topic}-a", f"{topic}-b"]
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name) for name in [*names, f"x-{topic}"]])
    here = {**environment, "TAILRACE_BOOTSTRAP": appliance.address}
    offers(here, f"tailrace consume {topic}", [f"plain,{name}" for name in names])
    offers(here, f"tailrace topic describe --json {topic}-b", [f"plain,{topic}-b"])
    offers(
        environment,
        f"tailrace perf produce --bootstrap {appliance.address} --topic {topic}-a",
        [f"plain,{topic}-a"],
    )
    offers(
        here,
        f"tailrace produce {topic}",
        [part for name in names for part in ("plain", name, "_")],
        "zsh",
    )
    offers(here, f"tailrace delay list {topic}", [f"plain,{name}" for name in names], "fish")
    assert complete(environment, "tailrace consume --bootstrap tcp://127.0.0.1:1 ") == []
    assert complete(environment, "tailrace topic delete --bootstrap nonsense ") == []


def test_commands_options_and_contexts_complete_without_an_appliance(
    environment: dict[str, str],
) -> None:
    assert complete(environment, "tailrace co") == [
        "plain,consume",
        "plain,context",
        "plain,config",
        "plain,console",
        "plain,completion",
    ]
    assert complete(environment, "tailrace topic de") == [
        "plain,delete",
        "plain,delete-records",
        "plain,describe",
    ]
    assert complete(environment, "tailrace produce --every") == ["plain,--every"]
    CliRunner().invoke(
        tailrace, ["context", "add", "prod", "--bootstrap", "tcp://127.0.0.1:1"], env=environment
    )
    assert complete(environment, "tailrace context use p") == ["plain,prod"]
    file = pathlib.Path(environment["XDG_CONFIG_HOME"]) / "tailrace" / "contexts.json"
    file.write_text("{")
    assert complete(environment, "tailrace context use ") == []
    assert complete(environment, "tailrace topic describe ") == []


def offers(
    environment: dict[str, str], line: str, requested: list[str], shell: str = "bash"
) -> None:
    """Again when the machine is too busy for an answer in time: a shell, too, is asked again."""
    wait_until(
        lambda: complete(environment, line, shell) == requested,
        f"{line} in {shell} offers {requested}",
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_for_that_shell(shell: str, tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(tailrace, ["completion", shell])
    assert done.exit_code == 0
    assert f"_TAILRACE_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(done.stdout)
        subprocess.run([shell, "-n", str(script)], check=True, timeout=HANG_LIMIT_S)


def test_a_real_bash_completes_with_it(
    appliance: EmbeddedAppliance, topic: str, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic))
    script = tmp_path / "script"
    script.write_text(CliRunner().invoke(tailrace, ["completion", "bash"]).stdout)
    typed = (
        f"source {script}; COMP_WORDS=(tailrace consume {topic[:6]}); COMP_CWORD=2; "
        f'_tailrace_completion {TAILRACE}; echo "${{COMPREPLY[@]}}"'
    )
    here = {**environment, "TAILRACE_BOOTSTRAP": appliance.address}

    def completed() -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", typed],
            env=here,
            capture_output=True,
            text=True,
            timeout=HANG_LIMIT_S,
            check=True,
        )
        return done.stdout.split()

    wait_until(lambda: completed() == [topic], "bash has the topic")
