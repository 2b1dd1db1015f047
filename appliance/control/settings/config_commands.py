"""Requests about the appliance's settings: DESCRIBE_CONFIGS, ALTER_CONFIGS, RELOAD_CONFIG, and
ALTER_QUOTAS, whose rules are the setting `quotas`.

Owner: the controller. Changed settings are in the catalog (table `overrides`); it publishes them to
the supervisor, which puts them into force (`appliance.supervise.live_settings`).

Invariants:
- A change is on the disk before it is published.
- A change is answered when every process that serves applies it, at the latest after APPLY_NS; the
  answer names those that do not yet.

Bounds: REQUESTS_MAX requests wait.

Crash: a successor publishes what the catalog has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from appliance.catalog.catalog import Catalog
from appliance.control.request_fields import Requester
from shm.memory.layout import FLUSHERS_MAX, FRONTS_MAX, WORKERS_MAX, ProcessWord, Role
from shm.queues.doorbell import Doorbell
from shm.runtime.agent_runner import process_name
from shm.tables.control import Control
from shm.tables.settings_block import SettingsBlock
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, InvalidSettingError, TailraceError
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_error, encode_reply

logger = logging.getLogger(__name__)

CONFIG_APIS = (Api.DESCRIBE_CONFIGS, Api.ALTER_CONFIGS, Api.RELOAD_CONFIG, Api.ALTER_QUOTAS)
APPLY_NS = 5_000_000_000
REQUESTS_MAX = 32
NAMES_MAX = 1_000
VALUE_SHOWN_MAX = 100
_LARGEST_RELOAD = (1 << 63) - 1
_FOLLOWERS = (
    (Role.CONTROLLER, 1), (Role.CONSOLE, 1), (Role.GROUPS, 1), (Role.SCHEDULER, 1),
    (Role.FRONT, FRONTS_MAX), (Role.FLUSHER, FLUSHERS_MAX), (Role.WORKER, WORKERS_MAX),
    (Role.CLEANER, FLUSHERS_MAX),
)  # fmt: skip
"""Processes that follow the settings, and how many there may be."""


class _Waiting(NamedTuple):
    """A request that is answered when its change is applied."""

    requester: Requester
    deadline_ns: int
    overrides_version: int
    """Version of the block of overrides that has the change."""
    reload: int
    """Number of the reload that it asked for, 0: none."""


class ConfigCommands:
    """The controller's part of the settings."""

    def __init__(
        self,
        catalog: Catalog,
        in_force: SettingsBlock,
        overrides: SettingsBlock,
        control: Control,
        supervisor: Doorbell,
        answer: Callable[[Requester, ErrorCode, bytes], None],
        answer_max: int,
    ) -> None:
        """`in_force`: the supervisor's block. `overrides`: the controller's own. `answer`: sends a
        response. Raises StorageError.
        """
        self._catalog = catalog
        self._in_force = in_force
        self._overrides = overrides
        self._control = control
        self._supervisor = supervisor
        self._answer = answer
        self._answer_max = answer_max
        self._waiting: list[_Waiting] = []
        self._values = catalog.settings.overrides()
        self._reload = int(overrides.read()[1].get("reload", 0))
        self._awaited_version = 0
        """Version of the overrides that must be in force before any process gets the catalog."""
        if self._values or overrides.version:
            self._awaited_version = self._publish()

    @property
    def is_waiting(self) -> bool:
        """True if a request waits for processes."""
        return bool(self._waiting)

    def are_in_force(self) -> bool:
        """True once the supervisor has taken the catalog's settings of this controller's start."""
        if not self._awaited_version:
            return True
        if self._in_force.read()[1].get("overrides_version", 0) < self._awaited_version:
            return False
        self._awaited_version = 0
        return True

    # ---- requests --------------------------------------------------------------------------------

    def take(
        self, requester: Requester, api: int, request: dict[str, Any], now_ns: int
    ) -> dict[str, Any] | None:
        """Handle a request; None: it is answered later. Raises TailraceError."""
        if api == Api.DESCRIBE_CONFIGS:
            return self._describe(request)
        if len(self._waiting) >= REQUESTS_MAX:
            raise TailraceError(
                f"{REQUESTS_MAX} changes of settings wait; try again later", ErrorCode.NOT_READY
            )
        if api == Api.RELOAD_CONFIG:
            self._reload += 1
            version = self._publish()
            self._wait_for(requester, now_ns, version, self._reload)
            return None
        if api == Api.ALTER_QUOTAS:
            from appliance.control.settings.quota_changes import changed_quotas  # a change is rare

            request = {
                "set": {"quotas": changed_quotas(self._quotas_in_force(), request)},
                "validate_only": request.get("validate_only", False),
            }
        return self._alter(requester, request, now_ns)

    def _quotas_in_force(self) -> list[str]:
        """The rules after every change that is decided, of the catalog or of the configuration."""
        if "quotas" in self._values:
            return list(self._values["quotas"])
        rows = self._in_force.read()[1].get("configs", [])
        return next((list(row["value"]) for row in rows if row["name"] == "quotas"), [])

    def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        """`names`: of the settings; null: all."""
        names = request.get("names")
        if names is not None and (
            not isinstance(names, list)
            or len(names) > NAMES_MAX
            or not all(isinstance(name, str) for name in names)
        ):
            raise InvalidRequestError(f"`names` must be a list of at most {NAMES_MAX} texts")
        version, document = self._in_force.read()
        rows = document.get("configs", [])
        if names is not None:
            by_name = {row["name"]: row for row in rows}
            for name in names:
                if name not in by_name:
                    raise InvalidSettingError(_unknown(name))
            rows = [by_name[name] for name in names]
        return {
            "version": version,
            "configs": rows,
            "reload": document.get("reload"),
            "left_out": document.get("left_out", []),
            "not_applied": list(self._behind(version)),
        }

    def _alter(
        self, requester: Requester, request: dict[str, Any], now_ns: int
    ) -> dict[str, Any] | None:
        """`set`: name -> value; `unset`: names; `validate_only`."""
        given, removed = request.get("set", {}), request.get("unset", [])
        if (
            not isinstance(given, dict)
            or not isinstance(removed, list)
            or not all(isinstance(name, str) for name in removed)
            or not 0 < len(given) + len(removed) <= NAMES_MAX
        ):
            raise InvalidRequestError(
                "the request needs `set`, an object of names and values, or `unset`, a list of "
                "names"
            )
        values = {n: value for n, value in self._values.items() if n not in removed}
        values |= self._checked(given, removed)
        self._check_together(values, removed)
        self._check_size(values)
        if request.get("validate_only"):
            return {"version": self._in_force.version, "not_applied": []}
        self._catalog.settings.set_overrides(values)
        before, self._values = self._values, values

        def kept() -> None:
            logger.info(
                "overrides_changed set=%s unset=%s", ",".join(given) or "none",
                ",".join(removed) or "none",
            )  # fmt: skip
            self._wait_for(requester, now_ns, self._publish(), 0)

        def failed(error: TailraceError) -> None:
            self._values = before
            self._answer(requester, error.code, encode_error(error.detail))

        self._catalog.afterwards(kept, failed)
        return None

    @staticmethod
    def _checked(given: Mapping[str, Any], removed: list[str]) -> dict[str, Any]:
        """The values, typed. Raises InvalidSettingError with all that is wrong."""
        from appliance.config.settings import definitions  # a change is rare
        from appliance.config.settings_sources import typed

        known, problems, values = definitions(), [], {}
        for name in removed:
            if name not in known:
                problems.append(_unknown(name))
        for name, value in given.items():
            definition = known.get(name)
            if definition is None:
                problems.append(_unknown(name))
            elif definition.is_secret:
                problems.append(f"{name} is a secret: give it in a file that others cannot read")
            elif not definition.is_live:
                problems.append(
                    f"{name} needs a restart: give it in the configuration file, and restart"
                )
            else:
                try:
                    values[name] = typed(definition, value)
                except InvalidSettingError as error:
                    problems.append(error.detail)
        if problems:
            raise InvalidSettingError("; ".join(problems))
        return values

    def _check_together(self, values: Mapping[str, Any], removed: list[str]) -> None:
        """Raises InvalidSettingError if the settings in force, with these, do not go together."""
        from appliance.config.settings_sources import conflicts_of  # a change is rare

        rows = self._in_force.read()[1].get("configs", [])
        rest = {
            row["name"]: row["without"] if row["name"] in removed else row["value"]
            for row in rows
            if row["source"] != "default" and (row["name"] not in removed or "without" in row)
        }
        problems = conflicts_of({**rest, **values})
        if problems:
            raise InvalidSettingError("; ".join(problems))

    def _check_size(self, values: dict[str, Any]) -> None:
        """Raises InvalidSettingError if the supervisor could not publish the settings with these:
        once they are in the catalog it is too late.
        """
        from appliance.config.document_size import excess_with_overrides  # a change is rare

        if not self._overrides.fits({"values": values, "reload": _LARGEST_RELOAD}):
            raise InvalidSettingError(
                "the settings of `config set` are too large together; shorten them, or give the "
                "longest in the configuration file"
            )
        excess = excess_with_overrides(self._in_force.read()[1], values, self._values)
        if excess is not None:
            raise InvalidSettingError(
                f"with this change {excess}, in `config set` or in the configuration file"
            )

    # ---- publication -----------------------------------------------------------------------------

    def _publish(self) -> int:
        version = self._overrides.publish({"values": self._values, "reload": self._reload})
        self._supervisor.ring()
        return version

    def _wait_for(self, requester: Requester, now_ns: int, version: int, reload: int) -> None:
        self._waiting.append(_Waiting(requester, now_ns + APPLY_NS, version, reload))

    def answer_applied(self, now_ns: int) -> int:
        """Answer the requests whose changes are applied, or that have waited long enough. Returns
        their number.
        """
        if not self._waiting:
            return 0
        version, document = self._in_force.read()
        behind = list(self._behind(version))
        count = 0
        for waiting in list(self._waiting):
            taken = document.get("overrides_version", 0) >= waiting.overrides_version
            report = document.get("reload", {})
            if waiting.reload and report.get("requested", 0) < waiting.reload:
                taken = False
            if (not taken or behind) and now_ns < waiting.deadline_ns:
                continue
            self._waiting.remove(waiting)
            missing = behind if taken else [process_name(Role.SUPERVISOR, 0)]
            body: dict[str, Any] = {"version": version, "not_applied": missing}
            if waiting.reload:
                body["reload"] = report
            self._answer(waiting.requester, *encode_reply(ErrorCode.OK, body, self._answer_max))
            count += 1
        return count

    def _behind(self, version: int) -> Iterator[str]:
        """Names of serving processes that do not apply this version yet."""
        for role, most in _FOLLOWERS:
            for index in range(most):
                slot = self._control.process(role, index)
                generation = slot.load(ProcessWord.GENERATION)
                if not generation:
                    if role is not Role.WORKER:
                        break
                    continue
                serves = slot.load(ProcessWord.READY_GENERATION) == generation
                applied = self._in_force.applied(role, index).load()
                if slot.is_live() and serves and applied < version:
                    yield process_name(role, index)


def _unknown(name: str) -> str:
    from appliance.config.settings_sources import unknown_setting  # only needed for a wrong name

    return unknown_setting(name)
