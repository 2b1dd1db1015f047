"""Sources of the appliance's settings: file, environment and flags, merged over the defaults.

Order, later ones win:
- defaults
- the TOML file (`--config`)
- environment (TAILRACE_RING_BYTES, TAILRACE_FLUSH_LINGER_MS)
- flags (`--set flush.linger_ms=5`)
Invariants: an unknown name is refused with the nearest known one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from appliance.config.settings import Settings, setting_names
from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import examples, whole_number

ENVIRONMENT_PREFIX = "TAILRACE_"
OTHER_VARIABLES = (
    "TAILRACE_BOOTSTRAP", "TAILRACE_CONTEXT", "TAILRACE_PURE", "TAILRACE_PROCESS",
    "TAILRACE_CRASH_POINT", "TAILRACE_BENCH_DIR", "TAILRACE_WRITE_DOCS",
)  # fmt: skip
"""Variables that name no setting and are accepted: those of clients, between processes, and of
Tailrace's developers.
"""


class Given(NamedTuple):
    """A setting that was given."""

    value: Any
    source: str
    """Origin: a file, an environment variable, or the command line."""


def load_settings(
    config_path: str | None, environment: Mapping[str, str], flags: list[tuple[str, Any]]
) -> Settings:
    """Merge file, environment and flags over the defaults. Raises InvalidSettingError, also when
    the file cannot be read.
    """
    return settings_of(gather_settings(config_path, environment, flags))


def gather_settings(
    config_path: str | None, environment: Mapping[str, str], flags: list[tuple[str, Any]]
) -> dict[str, Given]:
    """Setting -> its last given value, as it was written.

    Raises: InvalidSettingError for unknown names, and when the file cannot be read.
    """
    values: dict[str, Given] = {}
    if config_path is not None:
        for name, value in _flatten(_read_file(config_path)):
            values[_known(name, config_path)] = Given(value, config_path)
    by_variable = {variable_of(name): name for name in setting_names()}
    for variable, text in environment.items():
        if variable in by_variable:
            values[by_variable[variable]] = Given(text, variable)
        elif sentence := unknown_variable(variable):
            raise InvalidSettingError(sentence)
    for name, value in flags:
        values[_known(name, "--set")] = Given(value, "command line")
    return values


def settings_of(given: Mapping[str, Given]) -> Settings:
    """Apply given values over the defaults.

    Raises: InvalidSettingError.
    """
    names = setting_names()
    return Settings(
        **{
            names[name].name: _typed(name, names[name], found.value)
            for name, found in given.items()
        }
    )


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


def unknown_variable(variable: str) -> str:
    """The error for an environment variable that names no setting; "" if it is valid."""
    known = [variable_of(name) for name in setting_names()]
    if (
        not variable.startswith(ENVIRONMENT_PREFIX)
        or variable in OTHER_VARIABLES
        or variable in known
    ):
        return ""
    return (
        f"environment variable {variable} names no "
        f"setting{_hint(variable, [*known, *OTHER_VARIABLES[:2]])}"
    )


def _read_file(path: str) -> dict[str, Any]:
    import tomllib  # every start loads this module, few have a file

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidSettingError(
            f"cannot read the configuration {path}: {error.strerror}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSettingError(f"{path} is not valid TOML: {error}") from None


def _flatten(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    result = []
    for name, value in table.items():
        if isinstance(value, dict):
            result += _flatten(value, f"{prefix}{name}.")
        else:
            result.append((prefix + name, value))
    return result


def _hint(name: str, known: list[str]) -> str:
    import difflib  # only needed for a wrong name

    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def _known(name: str, where: str) -> str:
    names = setting_names()
    if name not in names:
        raise InvalidSettingError(f"{where}: unknown setting {name!r}{_hint(name, list(names))}")
    return name


def _typed(name: str, item: Any, value: Any) -> Any:
    """Convert `value`, from TOML or as text, to the field's type.

    Raises: InvalidSettingError.
    """
    if item.type == "int":
        number = whole_number(name, value)
        low, high = item.metadata["minimum"], item.metadata["maximum"]
        if number is None or not low <= number <= high:
            raise InvalidSettingError(
                f"{name} is {value!r}; it takes a whole number from {low} to {high}{examples(name)}"
            )
        return number
    if item.type == "bool":
        known = {"true": True, "false": False, True: True, False: False}
        if value not in known:
            raise InvalidSettingError(f"{name} is {value!r}; it takes true or false")
        return known[value]
    if item.type == "list[str]":
        items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(part, str) and part for part in items):
            raise InvalidSettingError(f"{name} is {value!r}; it takes a list of texts")
        return items
    if item.type == "str":
        if not isinstance(value, str):
            raise InvalidSettingError(f"{name} is {value!r}; it takes a text")
        return value
    if item.type == "int | str":  # busy_poll_us
        number = None if isinstance(value, bool) else whole_number(name, value)
        return value if number is None else number
    if isinstance(value, str) and value != "auto":  # cores
        try:
            return [int(part) for part in value.strip("[]").split(",")]
        except ValueError:
            raise InvalidSettingError(
                f'{name} is {value!r}; it takes "auto" or a list of core numbers such as [2, 3]'
            ) from None
    return value


def environment_settings() -> dict[str, str]:
    """The process's environment, for `load_settings`."""
    return dict(os.environ)
