"""Plan of an installation: every file with its path, content and mode.

Owner: pure; `apply` writes the files and `host` runs the commands.
Invariants:
- The same arguments give the same files, so a second run has nothing to do.
- Files of an instance are the host's files and its own configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from appliance.install.instances import Instance

SHIPPED_PROGRAM = "/usr/bin/tailrace"
"""The program that the shipped units name."""
PACKAGED_PROGRAM = "/opt/tailrace/bin/tailrace"
"""The program of a package, which brings a virtual environment of its own."""
CONFIGURATION = "/etc/tailrace"
STATE = "/var/lib/tailrace"


class Layout(NamedTuple):
    """Directories of one way to install."""

    units: str
    sysusers: str
    tmpfiles: str
    sysctl: str
    limits: str
    bash: str
    zsh: str
    fish: str
    man: str
    programs: str


ADMINISTRATOR = Layout(
    units="/etc/systemd/system",
    sysusers="/etc/sysusers.d",
    tmpfiles="/etc/tmpfiles.d",
    sysctl="/etc/sysctl.d",
    limits="/etc/security/limits.d",
    bash="/usr/local/share/bash-completion/completions",
    zsh="/usr/local/share/zsh/site-functions",
    fish="/usr/local/share/fish/vendor_completions.d",
    man="/usr/local/share/man/man1",
    programs="/usr/local/bin",
)
"""Directories of what an administrator installs by hand: a package's files are left alone."""
PACKAGE = Layout(
    units="/usr/lib/systemd/system",
    sysusers="/usr/lib/sysusers.d",
    tmpfiles="/usr/lib/tmpfiles.d",
    sysctl="/usr/lib/sysctl.d",
    limits="/etc/security/limits.d",
    bash="/usr/share/bash-completion/completions",
    zsh="/usr/share/zsh/vendor-completions",
    fish="/usr/share/fish/vendor_completions.d",
    man="/usr/share/man/man1",
    programs="/usr/bin",
)
"""Directories of a distribution's package."""


class PlannedFile(NamedTuple):
    """A file with its content, or a symbolic link."""

    path: str
    content: str
    mode: int = 0o644
    is_configuration: bool = False
    """True for a file that belongs to the administrator once it exists."""
    link_to: str = ""
    """Target of a link; the content is empty then."""


class Documents(NamedTuple):
    """Texts that the command line makes of itself: name of the file -> text."""

    man_pages: Mapping[str, str]
    bash: str
    zsh: str
    fish: str


def plan_files(
    shipped: str, program: str, instance: Instance, documents: Documents, layout: Layout
) -> list[PlannedFile]:
    """Every file of an installation. `shipped` is the directory of the shipped unit files."""
    files = [
        *_units(shipped, program, layout),
        PlannedFile(f"{layout.sysusers}/tailrace.conf", _read(shipped, "sysusers.conf")),
        PlannedFile(f"{layout.tmpfiles}/tailrace.conf", _read(shipped, "tmpfiles.conf")),
        PlannedFile(f"{layout.sysctl}/60-tailrace.conf", _read(shipped, "sysctl.conf")),
        PlannedFile(f"{layout.limits}/tailrace.conf", _read(shipped, "limits.conf")),
        PlannedFile(f"{layout.bash}/tailrace", documents.bash),
        PlannedFile(f"{layout.zsh}/_tailrace", documents.zsh),
        PlannedFile(f"{layout.fish}/tailrace.fish", documents.fish),
        *(
            PlannedFile(f"{layout.man}/{name}", text)
            for name, text in sorted(documents.man_pages.items())
        ),
    ]
    link = f"{layout.programs}/tailrace"
    if link != program:
        files.append(PlannedFile(link, "", link_to=program))
    configuration = PlannedFile(instance.configuration, instance.text, 0o640, True)
    return [*files, configuration]


def _units(shipped: str, program: str, layout: Layout) -> list[PlannedFile]:
    """The shipped units, and templates of them for instances."""
    units = []
    for name in sorted(os.listdir(shipped)):
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("service", "timer", "socket"):
            continue
        text = _read(shipped, name).replace(SHIPPED_PROGRAM, program)
        units.append(PlannedFile(f"{layout.units}/{name}", text))
        if suffix != "socket":  # an instance has addresses of its own
            units.append(PlannedFile(f"{layout.units}/{stem}@.{suffix}", template_of(text)))
    return units


def template_of(text: str) -> str:
    """The unit of any instance, by that of the default one."""
    for pattern, replacement in (
        (r"/etc/tailrace/tailrace\.toml", "/etc/tailrace/%i.toml"),
        (r"/etc/default/tailrace\b", "/etc/default/tailrace-%i"),
        (r"^(StateDirectory|RuntimeDirectory)=tailrace$", r"\1=tailrace-%i"),
        (r"^(LoadCredential=[^:]+):tailrace\.", r"\1:tailrace-%i."),
        (r"^(Description=.*)$", r"\1 (%i)"),
        (r"^(After|Wants|Requires)=tailrace\.service$", r"\1=tailrace@%i.service"),
    ):
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def _read(directory: str, name: str) -> str:
    with open(os.path.join(directory, name), encoding="utf-8") as file:
        return file.read()
