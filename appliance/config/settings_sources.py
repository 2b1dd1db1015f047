"""Sources of the appliance's settings: files, environment and flags, merged over the defaults.

Order, later ones win:
- defaults
- the TOML file (`--config`, else /etc/tailrace/tailrace.toml if it exists)
- the drop-ins beside it (conf.d/*.toml, by name)
- environment (TAILRACE_RING_BYTES, TAILRACE_FLUSH_LINGER_MS)
- flags (`--set flush.linger_ms=5`)
- what `tailrace config set` has stored in the catalog (`appliance.config.live_settings`)
Invariants:
- An unknown name is refused with the name that was probably meant.
- All that is wrong is reported at once, each with its file and line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from appliance.config.setting_definition import Definition
from appliance.config.settings import TOPIC_PREFIX, Settings, definitions, value_of
from appliance.config.topology import CORES_MAX, Topology, flat
from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import examples, whole_number

if TYPE_CHECKING:
    import argparse

    from appliance.config.files.toml_file import TomlFile

ENVIRONMENT_PREFIX = "TAILRACE_"
OTHER_VARIABLES = (
    "TAILRACE_BOOTSTRAP", "TAILRACE_CONTEXT", "TAILRACE_PURE", "TAILRACE_PROCESS",
    "TAILRACE_CRASH_POINT", "TAILRACE_BENCH_DIR", "TAILRACE_WRITE_DOCS",
)  # fmt: skip
"""Variables that name no setting and are accepted: those of clients, between processes, and of
Tailrace's developers.
"""
COMMAND_LINE = "command line"
DEFAULT_SOURCE = "default"
DYNAMIC_SOURCE = "config set"


class Sources(NamedTuple):
    """Places where settings are given, apart from the catalog."""

    config_path: str | None
    environment: Mapping[str, str]
    flags: list[tuple[str, Any]]


class Given(NamedTuple):
    """A setting that was given."""

    value: Any
    source: str
    """Origin: a file, an environment variable, or the command line."""
    file: TomlFile | None = None

    def place(self, name: str) -> str:
        """Origin with the line, for an error; "" for the command line, which shows itself."""
        if self.file is not None:
            line = self.file.line_of(name)
            return f"{self.source}:{line}" if line else self.source
        return "" if self.source == COMMAND_LINE else self.source


class Problem(NamedTuple):
    """Something wrong with the configuration."""

    sentence: str
    place: str = ""
    """Origin, with the line if it is known."""
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}" if self.place else self.sentence


class SettingsError(InvalidSettingError):
    """All that is wrong with a configuration."""

    def __init__(self, problems: list[Problem]) -> None:
        lines = [str(problem) for problem in problems]
        count = f"the configuration has {len(lines)} errors:\n  " if len(lines) > 1 else ""
        super().__init__(count + "\n  ".join(lines))
        self.problems = problems


def load_settings(
    config_path: str | None, environment: Mapping[str, str], flags: list[tuple[str, Any]]
) -> Settings:
    """Merge files, environment and flags over the defaults. Raises SettingsError, also when a file
    cannot be read. The relations between settings are not checked.
    """
    problems: list[Problem] = []
    settings = settings_of(gather_settings(config_path, environment, flags, problems), problems)
    if problems:
        raise SettingsError(problems)
    return settings


def checked_settings(
    config_path: str | None, environment: Mapping[str, str], flags: list[tuple[str, Any]],
    topology: Topology,
) -> tuple[Settings, dict[str, Given]]:  # fmt: skip
    """Load the settings and check them together, for a host of this topology.

    Raises: SettingsError with all that is wrong.
    """
    problems: list[Problem] = []
    try:
        given = gather_settings(config_path, environment, flags, problems)
        settings = settings_of(given, problems)
        problems += related_problems(settings, given, topology, {p.setting for p in problems})
        if not problems:
            problems += problems_of_size(settings, given)
    except (ValueError, TypeError, ArithmeticError) as error:
        # of a library that reads a value: it must not end an appliance that reads its file again
        sentence = f"a value cannot be read: {error}"
        raise SettingsError([*problems, Problem(sentence, config_path or "")]) from error
    if problems:
        raise SettingsError(problems)
    return settings, given


def problems_of_size(settings: Settings, given: Mapping[str, Given]) -> list[Problem]:
    """Lack of room for these settings in the memory that the processes share."""
    from appliance.config.document_size import excess_of_configuration

    excess = excess_of_configuration(settings, {name: g.source for name, g in given.items()})
    if excess is None:
        return []
    longest = given.get(excess.longest)
    place = longest.place(excess.longest) if longest is not None else ""
    return [Problem(str(excess), place, excess.longest)]


def related_problems(
    settings: Settings, given: Mapping[str, Given], topology: Topology, wrong: set[str]
) -> list[Problem]:
    """Conflicts between settings, apart from those that `wrong` ones are in."""
    from appliance.config.relations import conflicts

    problems = []
    for conflict in conflicts(settings, topology):
        if wrong.isdisjoint(conflict.names):
            blamed = next((name for name in conflict.names if name in given), "")
            place = given[blamed].place(blamed) if blamed else ""
            problems.append(Problem(conflict.sentence, place, blamed))
    return problems


def gather_settings(
    config_path: str | None,
    environment: Mapping[str, str],
    flags: list[tuple[str, Any]],
    problems: list[Problem],
) -> dict[str, Given]:
    """Setting -> its last given value, as it was written. What is wrong is added to `problems`:
    unknown names, and files that cannot be read.
    """
    values: dict[str, Given] = {}
    if config_path is not None:
        _gather_files(config_path, values, problems)
    by_variable = {variable_of(name): name for name in definitions()}
    for variable, text in environment.items():
        if variable in by_variable:
            values[by_variable[variable]] = Given(text, variable)
        elif sentence := unknown_variable(variable):
            problems.append(Problem(sentence, setting=variable))
    for name, value in flags:
        if name in definitions():
            values[name] = Given(value, COMMAND_LINE)
        else:
            problems.append(Problem(f"--set: {unknown_setting(name)}", setting=name))
    return values


def conflicts_of(values: Mapping[str, Any]) -> list[str]:
    """Faults of these values together, over the defaults. Cores are not checked: they
    cannot change while the appliance runs.
    """
    known = definitions()
    problems: list[Problem] = []
    given = {n: Given(v, DEFAULT_SOURCE) for n, v in values.items() if not known[n].is_secret}
    settings = settings_of(given, problems)
    wrong = {problem.setting for problem in problems}
    every_core = flat(range(CORES_MAX))
    problems += related_problems(settings, given, every_core, wrong | {"cores"})
    return [problem.sentence for problem in problems]


def _gather_files(config_path: str, values: dict[str, Given], problems: list[Problem]) -> None:
    from appliance.config.files.locations import drop_ins  # few starts have a file
    from appliance.config.files.toml_file import FileProblem, read

    paths = [config_path]
    try:
        paths += drop_ins(config_path)
    except FileProblem as error:
        problems.append(Problem(f"{error.path} {error.sentence}", setting=error.path))
    for path in paths:
        try:
            file = read(path)
        except FileProblem as error:
            place = f"{path}:{error.line}" if error.line else path
            problems.append(Problem(error.sentence, place, path))
            continue
        for name, value in file.values:
            found = Given(value, path, file)
            if name in definitions():
                values[name] = found
            else:
                problems.append(Problem(unknown_setting(name), found.place(name), name))


def settings_of(given: Mapping[str, Given], problems: list[Problem]) -> Settings:
    """Apply given values over the defaults. A value that is wrong is added to `problems`, and the
    default stays.
    """
    fields: dict[str, Any] = {}
    for name, found in given.items():
        definition = definitions()[name]
        try:
            value = typed(definition, found.value)
        except InvalidSettingError as error:
            problems.append(Problem(error.detail, found.place(name), name))
            continue
        if definition.field_name == "topic_defaults":
            fields.setdefault("topic_defaults", {})[name.removeprefix(TOPIC_PREFIX)] = value
        else:
            fields[definition.field_name] = value
    return Settings(**fields)


def origins(settings: Settings, given: Mapping[str, Given]) -> list[dict[str, Any]]:
    """Every setting with its value (unless it is a secret), and its origin."""
    return [
        {
            "name": name,
            "value": definition.shown(value_of(settings, definition)),
            "source": given[name].source if name in given else DEFAULT_SOURCE,
        }
        for name, definition in definitions().items()
    ]


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


def unknown_setting(name: str) -> str:
    """The error for a name that is no setting."""
    from appliance.config.files.suggestions import advice_for  # only needed for a wrong name

    advice = advice_for(name, definitions())
    return (
        f"unknown setting {name[:100]!r}; {advice or 'tailrace config default prints all settings'}"
    )


def unknown_variable(variable: str) -> str:
    """The error for an environment variable that names no setting; "" if it is valid."""
    if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
        return ""
    known = [variable_of(name) for name in definitions()]
    if variable in known:
        return ""
    from appliance.config.files.near_names import nearest

    near = nearest(variable, [*known, *OTHER_VARIABLES[:2]])
    return (
        f"environment variable {variable} names no setting; "
        f"{f'did you mean {near}?' if near else 'tailrace config default prints all settings'}"
    )


def typed(definition: Definition, value: Any) -> Any:
    """Convert `value`, from TOML or as text, to the setting's type.

    Raises: InvalidSettingError. A secret's value is not repeated.
    """
    name, kind = definition.name, definition.kind
    _refuse_unusable_text(name, value)
    if definition.field_name == "topic_defaults":
        return _typed_topic_default(name, value)
    shown = repr(definition.shown(value))
    if kind == "int":
        number = whole_number(name, value)
        low, high = definition.minimum, definition.maximum
        if number is None or not low <= number <= high:
            raise InvalidSettingError(
                f"{name} is {shown}; it takes a whole number from {low} to {high}{examples(name)}"
            )
        return number
    if kind == "bool":
        known = {"true": True, "false": False, True: True, False: False}
        if not isinstance(value, (str, bool)) or value not in known:
            raise InvalidSettingError(f"{name} is {shown}; it takes true or false")
        return known[value]
    if kind == "list[str]":
        items = _list_of_text(value) if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(part, str) and part for part in items):
            raise InvalidSettingError(f"{name} is {shown}; it takes a list of texts")
        return items
    if kind == "str":
        if isinstance(value, bool) and str(value).lower() in definition.choices:
            return str(value).lower()  # TOML's true and false of a setting that has a third value
        if not isinstance(value, str):
            raise InvalidSettingError(f"{name} is {shown}; it takes a text")
        if definition.choices and value not in definition.choices:
            raise InvalidSettingError(f"{name} is {shown}; it takes {definition.range_text}")
        return value
    if kind == "int | str":  # busy_poll_us
        number = None if isinstance(value, bool) else whole_number(name, value)
        return value if number is None else number
    if isinstance(value, str) and value != "auto":  # cores
        try:
            return [int(part) for part in value.strip("[]").split(",")]
        except ValueError:
            raise InvalidSettingError(
                f'{name} is {shown}; it takes "auto" or a list of core numbers such as [2, 3]'
            ) from None
    return value


def _refuse_unusable_text(name: str, value: Any) -> None:
    """Raise InvalidSettingError for text that is no path and fits no document: with NUL, or with
    bytes of the environment or a flag that are not UTF-8. The value is not repeated.
    """
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            continue
        if "\0" in text:
            raise InvalidSettingError(f"{name} has a NUL character; write it without")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidSettingError(
                f"{name} has bytes that are not UTF-8; write it in UTF-8, and rename a path that "
                "is not"
            ) from None


def _list_of_text(text: str) -> Any:
    """Read a list in a flag or the environment: `a, b`, nothing, or as the configuration file has
    it.
    """
    if not text.strip():
        return []
    if text.lstrip().startswith("["):
        import tomllib  # a start without such a flag does without

        try:
            return tomllib.loads(f"items = {text}")["items"]
        except tomllib.TOMLDecodeError:
            text = text.strip().strip("[]")
    return [part.strip() for part in text.split(",")]


def _typed_topic_default(name: str, value: Any) -> Any:
    from appliance.config.topic_config import parse  # most appliances have no such defaults

    try:
        return parse(name.removeprefix(TOPIC_PREFIX), value)
    except InvalidSettingError as error:
        raise InvalidSettingError(error.detail.replace("topic setting ", TOPIC_PREFIX, 1)) from None


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    """The flags of `tailrace serve`, which documents them."""
    import argparse  # only the supervisor parses them

    parser = argparse.ArgumentParser(prog="tailrace serve", allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--data-dir")
    parser.add_argument("--listen", action="append", default=[])
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def given_flags(flags: argparse.Namespace) -> list[tuple[str, Any]]:
    """(setting, value) of all flags; later ones win.

    Raises: InvalidSettingError.
    """
    given: list[tuple[str, Any]] = []
    for item in flags.set:
        name, separator, value = item.partition("=")
        if not separator:
            raise InvalidSettingError(f"--set {item!r} has no value; write --set name=value")
        from appliance.config.passwords_in_urls import has_password

        if has_password(value):
            raise InvalidSettingError(
                f"--set {name}=... has a password in its URL, which every account of this host "
                "would see in the list of processes: write the setting in the configuration file"
            )
        given.append((name, value))
    _refuse_a_setting_given_twice(flags, {name for name, _ in given})
    if flags.data_dir:
        if "," in flags.data_dir and not os.path.isdir(flags.data_dir):
            raise InvalidSettingError(
                f"--data-dir {flags.data_dir!r} is one directory, which is not there; for several "
                f"write --set data_dirs={flags.data_dir}"
            )
        given.append(("data_dirs", [flags.data_dir]))
    if flags.listen:
        given.append(("listen", flags.listen))
    return given


def _refuse_a_setting_given_twice(flags: argparse.Namespace, names: set[str]) -> None:
    """One of the two would have no effect: a directory of `data_dirs` would be missing silently."""
    for option, value, name in (
        ("--data-dir", flags.data_dir, "data_dirs"), ("--listen", flags.listen, "listen"),
    ):  # fmt: skip
        if value and name in names:
            raise InvalidSettingError(
                f"{option} and --set {name} both set {name}: give one of them; for several values "
                f"write --set {name}=A,B"
            )


def environment_settings() -> dict[str, str]:
    """The process's environment, for `load_settings`."""
    return dict(os.environ)
