"""Builds a distribution and installs it beside its declared dependencies alone, without a
network.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.kit.processes import HANG_LIMIT_S

ROOT = pathlib.Path(__file__).parents[3]


def build_wheel(project: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """The wheel of the project in this directory, made from its source distribution, as what is
    published is.
    """
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-d", str(to), "-t"]
    subprocess.run(
        [*command, "sdist"], cwd=project, check=True, capture_output=True, timeout=HANG_LIMIT_S
    )
    (packed,) = to.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", str(packed), "-C", str(to)], check=True, timeout=HANG_LIMIT_S)
    subprocess.run(
        [*command, "wheel"],
        cwd=to / packed.name.removesuffix(".tar.gz"),
        check=True,
        capture_output=True,
        timeout=HANG_LIMIT_S,
    )  # it compiles
    (wheel,) = to.glob("*.whl")
    return wheel


def top_level_names(wheel: pathlib.Path) -> set[str]:
    """Names that the wheel puts into site-packages, without what describes it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" not in name}


def requirements(wheel: pathlib.Path, extra: str = "") -> set[str]:
    """Names of the packages that it asks for; with `extra`, those that this adds."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        headers = (
            HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
        )
    return _names(headers, extra) - (_names(headers, "") if extra else set())


def _names(required: Iterable[str], extra: str) -> set[str]:
    found = [Requirement(text) for text in required]
    return {
        canonicalize_name(r.name)
        for r in found
        if r.marker is None or r.marker.evaluate({"extra": extra})
    }


@functools.cache
def _with_their_own(name: str) -> frozenset[str]:
    """A package and what it needs, whole."""
    needed = _names(importlib.metadata.requires(name) or [], "")
    return frozenset({name}).union(*(_with_their_own(other) for other in needed))


def install(wheel: pathlib.Path, at: pathlib.Path) -> pathlib.Path:
    """A virtual environment with the wheel and links to the packages that it asks for, and to no
    other; returns its bin directory.
    """
    venv.create(at, symlinks=True)
    (site,) = at.glob("lib/python*/site-packages")
    for name in frozenset().union(*(_with_their_own(name) for name in requirements(wheel))):
        distribution = importlib.metadata.distribution(name)
        for top in {
            file.parts[0]
            for file in distribution.files or []
            if file.parts[0] not in ("..", "__pycache__")
        }:
            os.symlink(str(distribution.locate_file(top)), site / top)
    python = str(at / "bin" / "python")
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
    ]
    # Byte code is made when it is first used, of what is used.
    subprocess.run(
        [*command, "--no-compile", str(wheel)],
        check=True,
        capture_output=True,
        timeout=HANG_LIMIT_S,
    )
    return at / "bin"
