"""The fields of settings classes: their definition, checks and documentation.

A settings class is a frozen dataclass. The metadata of each field has its documentation, and the
bounds of a number.

Invariants:
- An invalid setting raises InvalidSettingError that names it.
- For an unknown setting the error names the nearest known one.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any, NoReturn, TypeVar

from tailrace.client.config.kafka_names import setting_hint
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import examples, whole_number
from tailrace.core.validation import is_coroutine_function, not_awaited

Kind = TypeVar("Kind")
Client = TypeVar("Client")
GROUP_NAME_MAX = 249
ALIASES = {
    "bootstrap": "bootstrap_servers",
    "check_batches": "validate_batches",
    "max_unpacked_batch_bytes": "max_decompressed_batch_bytes",
    "retry_attempts_max": "max_retry_attempts",
}
"""Earlier and shorter names of settings -> their names."""


def number_field(default: int | None, doc: str, minimum: int = 0, maximum: int = 2**31 - 1) -> Any:
    """A dataclass field for a whole number from `minimum` to `maximum`."""
    return field(default=default, metadata={"doc": doc, "minimum": minimum, "maximum": maximum})


def documented(kind: type[Any]) -> Callable[[type[Client]], type[Client]]:
    """Decorator that appends the settings of class `kind` to a client's docstring."""

    def add(client: type[Client]) -> type[Client]:
        rows = [
            f"        {item.name} = {item.default!r}: {item.metadata['doc']}"
            for item in fields(kind)
        ]
        client.__doc__ = (
            f"{(client.__doc__ or '').rstrip()}\n\n    Settings:\n\n" + "\n".join(rows) + "\n    "
        )
        return client

    return add


def check_name(
    setting: str,
    name: object,
    longest: int = GROUP_NAME_MAX,
    code: ErrorCode | None = ErrorCode.INVALID_GROUP,
) -> None:
    """Check the name of a group, a member or a producer. `code`: of the error. Raises
    InvalidSettingError.
    """
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= longest
        or any(unicodedata.category(c) in ("Cc", "Cs") for c in name)
    ):
        shown = (
            f"a text of {len(name)} characters"
            if isinstance(name, str) and len(name) > longest
            else f"{name!r:.100}"
        )
        raise InvalidSettingError(
            f"{setting} is {shown}; give text of 1 to {longest} characters without "
            "control characters",
            code,
        )


def check_callables(settings: Any, *names: str) -> None:
    """Check that these settings are functions, and no coroutine functions, or None. Raises
    InvalidSettingError.
    """
    for name in names:
        given = getattr(settings, name)
        if given is not None and not callable(given):
            raise InvalidSettingError(f"{name} is of type {type(given).__name__}; give a function")
        if given is not None and is_coroutine_function(given):
            raise InvalidSettingError(not_awaited(name, given))


def check_kinds(settings: Any) -> None:
    """Check numbers by their bounds, text and booleans by type. Raises InvalidSettingError."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if "minimum" in item.metadata:
            low, high = item.metadata["minimum"], item.metadata["maximum"]
            is_number = (
                isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            )
            if not is_number and (value is not None or item.default is not None):
                raise InvalidSettingError(
                    f"{item.name} is {value!r}; give a whole number from {low} to "
                    f"{high}{examples(item.name)}"
                )
        elif isinstance(item.default, bool) and not isinstance(value, bool):
            raise InvalidSettingError(f"{item.name} is {value!r}; give True or False")
        elif item.name == "client_id" and not isinstance(value, str):
            raise InvalidSettingError(f"{item.name} is {value!r}; give text")


def merged(settings: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a dict of settings, as Kafka's clients take it, with keyword arguments.

    Names get underscores, and Kafka's names become ours. Raises InvalidSettingError for a setting
    that is given twice.
    """
    result: dict[str, Any] = {}
    for source in (settings or {}, given):
        for name, value in source.items():
            if not isinstance(name, str):
                raise InvalidSettingError(f"the name of a setting is {name!r}; give it as text")
            plain = name.replace(".", "_")
            plain = ALIASES.get(plain, plain)
            if plain in result:
                raise InvalidSettingError(f"{name} is given twice; give it once")
            result[plain] = value
    return result


def build(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Build the settings class `kind` from the result of `merged`.

    Numbers may be text, with a unit where the setting has one ("1h30m", "64MiB"). Booleans may be
    text. Raises InvalidSettingError for unknown names and invalid values, NotSupportedError for
    settings of a later version.
    """
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    given = with_context(given) if "context" in known else given
    return kind(
        **{
            name: _plain(known[name], value) if name in known else _refuse(name, known)
            for name, value in given.items()
        }
    )


def with_context(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with the address of their context, or of the one that TAILRACE_CONTEXT names.
    Raises InvalidSettingError.
    """
    context = given.get("context")
    if context is not None and not (isinstance(context, str) and context):
        raise InvalidSettingError(f"context is {context!r:.100}; give a name or the path of a file")
    if context and "bootstrap_servers" in given:
        raise InvalidSettingError(
            "context and bootstrap exclude each other: a context has an address; write "
            "context:NAME#ADDRESS as bootstrap for another one"
        )
    if context is None and "bootstrap_servers" not in given:
        context = os.environ.get("TAILRACE_CONTEXT")
    return {**given, "bootstrap_servers": f"context:{context}"} if context else given


def _plain(item: Field[Any], value: Any) -> Any:
    """Convert a number or boolean given as text, as in settings files. Others stay as they are."""
    if "minimum" in item.metadata:
        number = whole_number(item.name, value)
        return value if number is None else number
    if isinstance(item.default, bool) and isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    return value


def _refuse(name: str, known: Iterable[str]) -> NoReturn:
    hint = setting_hint(name)
    if not hint:
        import difflib  # imported only for a mistyped name

        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise InvalidSettingError(f"unknown setting {name!r}; {hint}")
