"""Build of the compiled kernel (`_native.pyx` and its parts in `native/`).

It runs for a wheel, for an editable install, and as a program in place (`python
tailrace/kernel/build.py`). Without Cython, a C compiler or Python's headers it prints one line and
the build continues with the Python functions (docs/adr/0021). With TAILRACE_PURE=1 nothing is
compiled. In place, a current kernel stays, and an outdated one that cannot be rebuilt is removed,
because it would be rejected.

Invariants:
- The compiled file appears under its final name whole or not at all.
- It has the stamp that `tailrace.kernel` compares.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from typing import Any

Hook: Any
try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface as Hook
except ImportError:  # as a program, only Cython is needed
    Hook = object

ROOT = pathlib.Path(__file__).parents[2]
KERNEL = pathlib.Path("tailrace", "kernel")
NAME: str = "_native" + sysconfig.get_config_var("EXT_SUFFIX")
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fwrapv", "-DNDEBUG", "-w")
TIMEOUT_S = 600


class NotCompiledError(Exception):
    """The reason why there is no compiled kernel, as a clause."""


def stamp_of(root: pathlib.Path) -> str:
    """The stamp of the sources, as in `tailrace.kernel.stamp`."""
    version = re.search(
        r'^__version__ = "([^"]+)"', (root / "tailrace" / "__init__.py").read_text(), re.MULTILINE
    )
    if version is None:
        raise NotCompiledError("tailrace/__init__.py has no __version__")
    checksum = 0
    parts = sorted((root / KERNEL / "native").glob("*.pxi"))
    for source in [root / KERNEL / "_native.pyx", *parts]:
        checksum = zlib.crc32(source.read_bytes(), checksum)
    return f"{version[1]}-{checksum:08x}"


def _run(command: list[str], label: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiledError(f"{label} cannot be run: {error}") from None
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise NotCompiledError(f"{label} failed with exit status {done.returncode}")


def compile_kernel(root: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Compile the kernel into `directory` and return its path. Raises NotCompiledError."""
    if not os.access(directory, os.W_OK):
        raise NotCompiledError(f"{directory} cannot be written")
    if os.environ.get("TAILRACE_PURE") == "1":
        raise NotCompiledError("TAILRACE_PURE=1 is set")
    if importlib.util.find_spec("Cython") is None:
        raise NotCompiledError("Cython is not installed here")
    try:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    except ValueError as error:
        raise NotCompiledError(f"CC or CFLAGS cannot be split into words: {error}") from None
    if not compiler or shutil.which(compiler[0]) is None:
        compiler = ["cc"]
    if shutil.which(compiler[0]) is None:
        raise NotCompiledError("there is no C compiler (apt-get install gcc)")
    headers = sysconfig.get_paths()["include"]
    if not pathlib.Path(headers, "Python.h").exists():
        raise NotCompiledError(
            f"Python's headers are not in {headers} (apt-get install python3-dev)"
        )
    command = [*compiler, *flags, f'-DTAILRACE_KERNEL_STAMP="{stamp_of(root)}"', f"-I{headers}"]
    try:
        with tempfile.TemporaryDirectory(prefix="tailrace-kernel-") as scratch:
            return _compiled(
                root / KERNEL / "_native.pyx", command, pathlib.Path(scratch), directory
            )
    except OSError as error:  # a full disk, or no directory for temporary files
        raise NotCompiledError(
            f"{error.filename or 'a file'} cannot be written: {error.strerror}"
        ) from None


def _compiled(
    source: pathlib.Path, command: list[str], scratch: pathlib.Path, directory: pathlib.Path
) -> pathlib.Path:
    made = scratch / NAME
    _run(
        [sys.executable, "-m", "cython", "-3", str(source), "-o", str(scratch / "_native.c")],
        "Cython",
    )
    _run([*command, str(scratch / "_native.c"), "-o", str(made)], "the C compiler")
    final, beside = directory / NAME, directory / f".{os.getpid()}.{NAME}"
    try:
        shutil.copyfile(made, beside)
        os.replace(beside, final)
    finally:
        beside.unlink(missing_ok=True)
    return final


def compile_in_place(root: pathlib.Path) -> str:
    """Compile in place and return a message for the user. Raises NotCompiledError."""
    file = root / KERNEL / NAME
    try:
        is_current = stamp_of(root).encode() + b"\0" in file.read_bytes()
    except OSError:
        is_current = False
    if is_current:
        return f"{KERNEL / NAME} is up to date"
    try:
        compile_kernel(root, root / KERNEL)
    except NotCompiledError:
        if os.access(file, os.F_OK) and os.access(file.parent, os.W_OK):
            file.unlink()
        raise
    return f"compiled {KERNEL / NAME}"


class CompiledKernel(Hook):  # type: ignore[misc]
    """hatchling's hook: adds the compiled kernel to the wheel, or to
    the tree for an editable install.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = pathlib.Path(self.root)
        if self.target_name != "wheel":
            return
        try:
            if version == "editable":
                compile_in_place(root)
                return
            try:
                self._scratch = tempfile.mkdtemp(prefix="tailrace-wheel-")
            except OSError as error:
                raise NotCompiledError(
                    f"no directory for temporary files: {error.strerror}"
                ) from None
            made = compile_kernel(root, pathlib.Path(self._scratch))
        except NotCompiledError as error:
            self.app.display_warning(_without(error))
            return
        build_data["force_include"][str(made)] = str(KERNEL / NAME)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        scratch = getattr(self, "_scratch", None)
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _without(error: NotCompiledError) -> str:
    return (
        f"tailrace: the kernel is not compiled: {error}. The same functions in Python are "
        "used; see CONTRIBUTING.md, The kernel"
    )


if __name__ == "__main__":
    try:
        print(f"tailrace: {compile_in_place(ROOT)}")
    except NotCompiledError as error:
        print(_without(error))
