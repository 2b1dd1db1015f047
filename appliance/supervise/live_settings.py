"""Settings in force: those of the start, as reloads and the catalog have changed them since.

Owner: the supervisor. It publishes them in the block "settings", for every process. The catalog's
settings ("overrides") come from the controller's block.

Invariants:
- A configuration with an error changes nothing.
- A setting that needs a restart keeps its value of the start; a reload reports that it differs.
- Settings of the catalog win over files, environment and flags.
- What is in force satisfies the relations between settings.
- Whatever is published fits its block. Settings of the catalog that have no room are left out, the
  longest first, and logged; a reload that leaves too little room is refused.
- Settings of the catalog that are not in force are published with the reason, and never as the
  origin of a value.

Crash: nothing is kept. The next start reads the sources again, and the catalog has the overrides.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from appliance.config.document_size import config_row, document_bytes
from appliance.config.setting_definition import Definition
from appliance.config.settings import Settings, definitions, value_of
from appliance.config.settings_sources import (
    DEFAULT_SOURCE,
    DYNAMIC_SOURCE,
    Given,
    Problem,
    SettingsError,
    Sources,
    checked_settings,
    related_problems,
    settings_of,
)
from appliance.config.topology import Topology
from shm.tables.settings_block import SettingsBlock

logger = logging.getLogger("appliance.supervise.supervisor")

_TOO_LARGE = (
    "the configuration is too large beside what `tailrace config set` and `quota set` have "
    "changed; shorten its lists, or remove those changes with `tailrace config unset`"
)


_REASON_MAX = 200
_NOT_IN_FORCE_MAX = 20
"""Settings of the catalog that are named with a reason; the log has all."""


class HangUps:
    """SIGHUP: the wish for a reload, or the sign that the terminal of a foreground appliance is
    gone, which then stops it.
    """

    def __init__(self) -> None:
        # `nohup` and service managers leave SIGHUP ignored: then it never means the terminal.
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._had_terminal = not ignored and _has_terminal()
        self._is_pending = False

    def watch(self) -> None:
        """Take the signal from now on. Main thread only."""
        signal.signal(signal.SIGHUP, self._note)

    def _note(self, _number: int, _frame: object) -> None:
        self._is_pending = True

    def take(self) -> bool:
        """True, once for a signal that has come since the last call."""
        pending, self._is_pending = self._is_pending, False
        return pending

    def is_terminal_gone(self) -> bool:
        """True if this process had a terminal when it was started, and has none now."""
        return self._had_terminal and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class LiveSettings:
    """The settings of one run."""

    def __init__(
        self, sources: Sources, settings: Settings, given: Mapping[str, Given], topology: Topology
    ) -> None:
        """`given`: what the sources gave at the start. `topology`: that of the start."""
        self.settings = settings
        """In force."""
        self._sources = sources
        self._topology = topology
        self._at_start = settings
        self._given_at_start = dict(given)
        self._configured, self._sources_of = settings, dict(given)
        """The newest configuration without an error."""
        self._base = settings
        """Settings that would be in force without the catalog."""
        self._overrides: dict[str, Any] = {}
        self._overrides_version = 0
        self._reload: dict[str, Any] = {
            "number": 0, "requested": 0, "errors": [], "changed": [], "restart": [],
            "overridden": [], "time_us": 0,
        }  # fmt: skip
        self._left_out: frozenset[str] = frozenset()
        """Settings of the catalog that have no room."""
        self._block: SettingsBlock
        self._controllers: SettingsBlock
        self._for_children: Callable[[Settings], dict[str, Any]]

    def open(
        self,
        block: SettingsBlock,
        controllers: SettingsBlock,
        for_children: Callable[[Settings], dict[str, Any]],
    ) -> None:
        """Publish the settings of the start in `block`. `controllers`: the block with the
        catalog's. `for_children`: returns what the processes get. Raises SettingsError if there is
        no room.
        """
        self._block, self._controllers, self._for_children = block, controllers, for_children
        if not block.fits(self._document()):
            raise SettingsError([Problem(_TOO_LARGE)])
        self._publish()

    @property
    def version(self) -> int:
        """Version of the block that has these settings."""
        return self._block.version

    def reload(self) -> list[str]:
        """Read the sources again and apply what may change. Returns the errors; then nothing has
        changed.
        """
        report = {**self._reload, "number": self._reload["number"] + 1, "changed": []}
        report["time_us"] = time.time_ns() // 1000
        report |= {"restart": self._waiting(), "overridden": []}
        before = (
            self.settings, self._base, self._configured, self._sources_of, self._left_out,
        )  # fmt: skip
        try:
            self._configured, self._sources_of = checked_settings(*self._sources, self._topology)
            report |= {"errors": [], "restart": self._waiting()}
            report |= {"overridden": self._overridden(before[2])}
            report |= {"changed": self._merge_with_room(report)}
        except SettingsError as error:
            (
                self.settings, self._base, self._configured, self._sources_of, self._left_out,
            ) = before  # fmt: skip
            report |= {"restart": self._waiting(), "overridden": []}
            # A text without end must not keep the report from its readers.
            report["errors"] = [str(problem)[:1000] for problem in error.problems[:50]]
        self._reload = report
        self._publish()
        return list(report["errors"])

    def republish(self) -> None:
        """Publish what the processes get of these settings, for its other parts have changed."""
        self._publish()

    def log_reload(self) -> None:
        """Log the outcome of the last reload."""
        report = self._reload
        for error in report["errors"]:
            logger.error("setting_wrong error=%r", error)
        if report["errors"]:
            logger.error("settings_not_reloaded errors=%d", len(report["errors"]))
            return
        logger.info("settings_reloaded changed=%s", ",".join(report["changed"]) or "none")
        if report["restart"]:
            logger.warning(
                "restart_needed settings=%s advice='they take effect with the next start'",
                ",".join(report["restart"]),
            )
        if report["overridden"]:
            logger.warning(
                "settings_overridden settings=%s by='config set' advice='the configuration has "
                "other values; to use them: tailrace config unset %s'",
                ",".join(report["overridden"]), " ".join(report["overridden"]),
            )  # fmt: skip

    def take_overrides(self) -> bool:
        """Apply what the controller has published since. Returns True if it asks for a reload."""
        if self._controllers.version == self._overrides_version:
            return False
        version, document = self._controllers.read()
        self._overrides_version = version
        if document["values"] != self._overrides:
            self._overrides, self._left_out = document["values"], frozenset()
            changed = self._merge(refuse=False)
            logger.info("settings_changed by='config set' changed=%s", ",".join(changed) or "none")
        requested = bool(document["reload"] > self._reload["requested"])
        self._reload["requested"] = document["reload"]
        if not requested:
            self._publish()
        return requested

    # ---- room ------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Publish what is in force. What has no room is left out; nothing that a file or the
        catalog has ends the supervisor here.
        """
        while not self._block.fits(document := self._document()):
            errors = self._reload["errors"]
            if len(errors) > 1:
                self._reload["errors"] = errors[: len(errors) // 2]
            elif names := self._overrides.keys() - self._left_out:
                sizes = {name: document_bytes({name: self._overrides[name]}) for name in names}
                self._leave_out(max(sorted(sizes), key=sizes.__getitem__))
            else:  # a configuration fits by itself, without what waits for a restart
                for row in document["configs"]:
                    row.pop("after_restart", None)
                break
        self._block.publish(document)

    def _leave_out(self, name: str) -> None:
        """Do without a setting of the catalog."""
        self._left_out |= {name}
        logger.error(
            "override_not_applied setting=%s error='no room for it beside the configuration' "
            "advice='shorten it or the configuration: tailrace config unset %s'",
            name, name,
        )  # fmt: skip
        self._merge(refuse=False)

    def _merge_with_room(self, report: Mapping[str, Any]) -> list[str]:
        """Merge a new configuration with all settings of the catalog, else without those that have
        had no room before. Returns the names of changed settings. Raises SettingsError.
        """
        settings = self.settings
        for left_out in dict.fromkeys([frozenset[str](), self._left_out]):
            self.settings, self._left_out = settings, left_out
            changed = self._merge(refuse=True)
            if self._block.fits(self._document({**report, "changed": changed})):
                return changed
        raise SettingsError([Problem(_TOO_LARGE)])

    # ---- merging ---------------------------------------------------------------------------------

    def _merge(self, *, refuse: bool) -> list[str]:
        """Put into force what may change: of the newest configuration, then of the catalog. Returns
        the names of changed settings.

        Raises: SettingsError if they do not go together and `refuse`; else those of the catalog
        that do not are left out.
        """
        live = {d.field_name: getattr(self._configured, d.field_name) for d in _live()}
        base = replace(self._at_start, **live)
        overrides = self._known_overrides()
        merged = self._overlaid(base, overrides)
        problems = related_problems(merged, self._origins_of(overrides), self._topology, set())
        if problems and refuse:
            raise SettingsError(problems)
        if problems:
            for problem in problems:
                logger.error("override_not_applied error=%r", str(problem))
            merged = self.settings
        else:
            self._base = base
        known = definitions().values()
        changed = [d.name for d in known if value_of(merged, d) != value_of(self.settings, d)]
        self.settings = merged
        return changed

    def _known_overrides(self) -> dict[str, Any]:
        """The catalog's settings, without those that this version does not know or cannot change
        while it runs.
        """
        found = {}
        for name, value in self._overrides.items():
            if name in self._left_out:
                continue
            definition = definitions().get(name)
            if definition is None or not definition.is_live:
                logger.warning("override_ignored setting=%s", name)
            else:
                found[name] = value
        return found

    def _not_in_force(self) -> dict[str, str]:
        """Settings of the catalog whose values are not used -> the reason."""
        reasons = {name: self._reason_of(name, value) for name, value in self._overrides.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def _reason_of(self, name: str, value: Any) -> str:
        """The reason why a setting of the catalog is not in force; "": it is."""
        definition = definitions().get(name)
        if definition is None:
            return "this version has no such setting"
        if not definition.is_live:
            return "this version does not change it while it runs"
        if name in self._left_out:
            return "it has no room beside the configuration"
        problems: list[Problem] = []
        alone = settings_of({name: Given(value, DYNAMIC_SOURCE)}, problems)
        if problems:
            return f"it is refused: {problems[0]}"[:_REASON_MAX]
        if value_of(alone, definition) != value_of(self.settings, definition):
            return "it does not go with the other settings"
        return ""

    @staticmethod
    def _overlaid(base: Settings, overrides: Mapping[str, Any]) -> Settings:
        problems: list[Problem] = []
        given = {name: Given(value, DYNAMIC_SOURCE) for name, value in overrides.items()}
        alone = settings_of(given, problems)
        for problem in problems:
            logger.error("override_not_applied error=%r", str(problem))
        wrong = {problem.setting for problem in problems}
        changes: dict[str, Any] = {
            "topic_defaults": {**base.topic_defaults, **alone.topic_defaults}
        }
        for name in given.keys() - wrong:
            field_name = definitions()[name].field_name
            if field_name != "topic_defaults":
                changes[field_name] = getattr(alone, field_name)
        return replace(base, **changes)

    def _overridden(self, before: Settings) -> list[str]:
        """Settings that the new configuration changes, without effect: the catalog has them."""
        known = definitions()
        return [
            name
            for name in self._known_overrides()
            if value_of(self._configured, known[name]) != value_of(before, known[name])
        ]

    def _waiting(self) -> list[str]:
        """Settings that differ from the configured ones until the next start."""
        return [
            definition.name
            for definition in definitions().values()
            if not definition.is_live
            and value_of(self._configured, definition) != value_of(self._at_start, definition)
        ]

    # ---- the document ----------------------------------------------------------------------------

    def _document(self, report: dict[str, Any] | None = None) -> dict[str, Any]:
        """Content of the block. `configs`: see `_row`."""
        waiting = set(self._waiting())
        left_out = self._not_in_force()
        used = {name: v for name, v in self._overrides.items() if name not in left_out}
        origins = self._origins_of(used)
        return {
            "settings": self._for_children(self.settings),
            "overrides_version": self._overrides_version,
            "reload": self._reload if report is None else report,
            "left_out": [
                {"name": name, "reason": reason}
                for name, reason in sorted(left_out.items())[:_NOT_IN_FORCE_MAX]
            ],
            "configs": [
                self._row(definition, origins.get(definition.name), definition.name in waiting)
                for definition in definitions().values()
            ],
        }

    def _row(self, definition: Definition, given: Given | None, is_waiting: bool) -> dict[str, Any]:
        """A setting as DESCRIBE_CONFIGS says it."""
        file = given.file if given is not None else None
        row = config_row(
            definition,
            value_of(self.settings, definition),
            given.source if given is not None else DEFAULT_SOURCE,
            file.line_of(definition.name) if file is not None else 0,
        )
        if row["source"] == DYNAMIC_SOURCE:
            row["without"] = definition.shown(value_of(self._base, definition))
        if is_waiting:
            row["after_restart"] = definition.shown(value_of(self._configured, definition))
        return row

    def _origins_of(self, overrides: Mapping[str, Any]) -> dict[str, Given]:
        """Setting -> the source of the value in force."""
        live = {definition.name for definition in definitions().values() if definition.is_live}
        found = {n: given for n, given in self._given_at_start.items() if n not in live}
        found |= {n: given for n, given in self._sources_of.items() if n in live}
        return found | {name: Given(value, DYNAMIC_SOURCE) for name, value in overrides.items()}


def _live() -> list[Definition]:
    """The settings of `Settings` that may change while it runs, one a field."""
    by_field = {d.field_name: d for d in definitions().values() if d.is_live}
    return [by_field[item.name] for item in fields(Settings) if item.name in by_field]
