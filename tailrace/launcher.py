"""Starts the appliance's programs isolated, so that no module of the user's takes the place of one of ours.

    python -I tailrace/launcher.py workers.worker      # what `command("workers.worker")` makes; arguments of the program follow

Isolated (-I) is: no PYTHONPATH or other variable of Python's, no working directory, no user site. The server's packages (`appliance`, `shm`, `workers`,
`netfront`) lie in `tailrace_server/` beside this package where a wheel was installed, and beside this package itself in a checkout. That directory, then the
one that holds this package, are searched behind the standard library and before everything else: docs/adr/0018-what-is-installed.md.

Invariants: the processes of an appliance, and its command line, run the `tailrace` package that started them, also where another is installed.

Run as a script, this file is compiled at each start: keep it short, and free of imports.
"""

import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CLIENT_ALONE = "only Tailrace's client is installed here"
INSTALL_SERVER = "Install the appliance and its command line with it: pip install tailrace"
EXIT_CONFIG = 74
"""As `appliance.restart_policy` has it: the next start would fail alike."""


def server_root() -> str | None:
    """The directory in which the server's packages are; None: the client alone is installed."""
    installed = f"{_HOME}/tailrace_server"
    if os.path.isfile(f"{installed}/appliance/supervisor.py"):
        return installed
    # Beside an installed client there may be packages of such names that are the user's.
    is_checkout = all(os.path.isfile(f"{_HOME}/{name}") for name in ("pyproject.toml", "appliance/supervisor.py", "shm/layout.py"))
    return _HOME if is_checkout else None


def command(module: str, *arguments: str) -> list[str]:
    """What to execute for `module.main()` in a process of its own."""
    return [sys.executable, "-I", os.path.abspath(__file__), module, *arguments]


def command_line() -> None:
    """The program `tailrace`; ends the process."""
    if os.environ.get("PYTHONPATH") and not sys.flags.ignore_environment:
        run_isolated()
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of programs that this one was started from
    _run("appliance.cli.main", sys.argv[1:])


def run_isolated() -> None:
    """The program `tailrace` in an interpreter that has seen nothing of the user's yet; does not return."""
    os.execv(sys.executable, command("appliance.cli.main", *sys.argv[1:]))


def _run(module: str, arguments: list[str]) -> None:
    root = server_root()
    if root is None:
        sys.exit(f"tailrace: {CLIENT_ALONE}. {INSTALL_SERVER}")
    at = next((index for index, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
    sys.path[at:at] = dict.fromkeys([root, _HOME])
    sys.argv = ["tailrace", *arguments]
    if module.startswith("appliance."):
        _refuse_another_version()
    try:
        status = __import__(module, fromlist=["main"]).main()
    except ModuleNotFoundError as error:
        if error.name is None or os.path.exists(os.path.join(root, error.name.partition(".")[0])):
            raise
        sys.stderr.write(
            f"tailrace: the package {error.name} is not where the appliance's processes look: in {sys.prefix} and in {_HOME}, never in "
            "PYTHONPATH; install tailrace with its dependencies, best in a virtual environment: pip install tailrace\n"
        )
        sys.exit(EXIT_CONFIG)
    except ImportError as error:
        if error.name != "tailrace.kernel":  # a compiled kernel that cannot be used: another start would not mend that
            raise
        sys.stderr.write(f"tailrace: {error}\n")
        sys.exit(EXIT_CONFIG)
    sys.exit(status)


def _refuse_another_version() -> None:
    """Both distributions hold this package: the one that was installed last has put its own there."""
    server, client = (str(__import__(name).__version__) for name in ("appliance", "tailrace"))
    if server != client:
        sys.stderr.write(
            f"tailrace: the server is version {server}, the client {client}: tailrace-client was installed over tailrace; run: "
            "pip uninstall -y tailrace-client && pip install --force-reinstall --no-deps tailrace\n"
        )
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2:])
