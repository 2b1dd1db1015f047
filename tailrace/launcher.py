"""Starts the appliance's programs isolated, so that users' modules cannot shadow ours.

    # command("workers.append.worker"), then arguments of the program
    python -I tailrace/launcher.py workers.append.worker

Isolated (-I) means no PYTHONPATH or other variables of Python, no working directory and no user
site. The server's packages (`appliance`, `shm`, `workers`, `netfront`) are in `tailrace_server/`
beside this package in an installed wheel, and directly beside this package in a checkout. That
directory, then the one of this package, are searched after the standard library and before
everything else. See docs/adr/0018-what-is-installed.md.

Invariants:
- The processes of an appliance, and its command line, run the `tailrace` package that started them,
  even if another one is installed.

This file is compiled at each start when run as a script. Keep it short and free of slow imports.
"""

import gc
import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CLIENT_ALONE = "only Tailrace's client is installed here"
INSTALL_SERVER = "Install the appliance and its command line with it: pip install tailrace"
EXIT_CONFIG = 74
"""The exit code of `appliance.supervise.processes.restart_policy` for a
failure that a restart would repeat.
"""


def server_root() -> str | None:
    """The directory of the server's packages; None if only the client is installed."""
    installed = f"{_HOME}/tailrace_server"
    if os.path.isfile(f"{installed}/appliance/supervise/supervisor.py"):
        return installed
    # Packages of the same names beside an installed client may be the user's.
    is_checkout = all(
        os.path.isfile(f"{_HOME}/{name}")
        for name in ("pyproject.toml", "appliance/supervise/supervisor.py", "shm/memory/layout.py")
    )
    return _HOME if is_checkout else None


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module.main()` in a new process."""
    return [sys.executable, "-I", os.path.abspath(__file__), module, *arguments]


def command_line() -> None:
    """Run the program `tailrace` and end the process."""
    if os.environ.get("PYTHONPATH") and not sys.flags.ignore_environment:
        run_isolated()
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of the script that started this
    _run("appliance.cli.main", sys.argv[1:])


def run_isolated() -> None:
    """Replace this process by the program `tailrace` in an
    isolated interpreter. Does not return.
    """
    os.execv(sys.executable, command("appliance.cli.main", *sys.argv[1:]))


def _run(module: str, arguments: list[str]) -> None:
    root = server_root()
    if root is None:
        sys.exit(f"tailrace: {CLIENT_ALONE}. {INSTALL_SERVER}")
    at = next(
        (index for index, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path)
    )
    sys.path[at:at] = dict.fromkeys([root, _HOME])
    sys.argv = ["tailrace", *arguments]
    if module.startswith("appliance."):
        _refuse_another_version()
    try:
        gc.disable()  # imports make little garbage; collecting takes a twentieth of their time
        program = __import__(module, fromlist=["main"])
        gc.enable()
        status = program.main()
    except ModuleNotFoundError as error:
        if error.name is None or os.path.exists(os.path.join(root, error.name.partition(".")[0])):
            raise
        sys.stderr.write(
            f"tailrace: the package {error.name} is missing in {sys.prefix} and {_HOME}; "
            "PYTHONPATH is not searched. Install tailrace with its dependencies, best in a "
            "virtual environment: pip install tailrace\n"
        )
        sys.exit(EXIT_CONFIG)
    except ImportError as error:
        if error.name != "tailrace.kernel":
            raise
        # A compiled kernel that cannot be loaded: a restart would fail alike.
        sys.stderr.write(f"tailrace: {error}\n")
        sys.exit(EXIT_CONFIG)
    sys.exit(status)


def _refuse_another_version() -> None:
    """Exit if server and client differ in version. Both distributions contain this package, and the
    one installed last has overwritten it.
    """
    server, client = (str(__import__(name).__version__) for name in ("appliance", "tailrace"))
    if server != client:
        sys.stderr.write(
            f"tailrace: the server is version {server}, the client {client}: tailrace-client was "
            "installed over tailrace; run: "
            "pip uninstall -y tailrace-client && pip install --force-reinstall --no-deps tailrace\n"
        )
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2:])
