"""Configuration files: bad ones are refused with a place and a sentence, drop-ins have an order,
and names that are no settings get the right suggestion.
"""

from __future__ import annotations

import os
import pathlib
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.config.files import toml_file
from appliance.config.files.default_file import default_file, in_toml
from appliance.config.files.locations import drop_ins, instance_path
from appliance.config.files.near_names import edits, nearest
from appliance.config.files.suggestions import KAFKA_NAMES, advice_for
from appliance.config.files.toml_file import SIZE_MAX_BYTES, FileProblem, TomlFile, read
from appliance.config.settings import definitions
from appliance.config.settings_sources import (
    Problem,
    SettingsError,
    checked_settings,
    gather_settings,
    load_settings,
)
from appliance.config.topic_settings import TOPIC_SETTINGS
from appliance.config.topology import flat

TWO_CORES = flat({0, 1})


def write(path: pathlib.Path, text: str | bytes) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(SettingsError) as caught:
        checked_settings(str(path), {}, [], TWO_CORES)
    return caught.value.detail


# ---- lines ---------------------------------------------------------------------------------------


def test_every_error_of_all_sources_is_reported_at_once_with_its_place(
    tmp_path: pathlib.Path,
) -> None:
    file = write(
        tmp_path / "tailrace.toml",
        'ring_byte = 3\n\n# remark\nlisten = [\n  "tcp://127.0.0.1:1",\n]\n[flush]\n'
        'linger_ms = "x"\n'
        "[group.session]\ntimeout.max.ms = 200\n",
    )
    part = write(tmp_path / "conf.d" / "10-more.toml", "fronts = 99\nlog_level = 'loud'\n")
    with pytest.raises(SettingsError) as caught:
        checked_settings(
            str(file), {"TAILRACE_SLOTS": "many"}, [("lane_bytes", "5000000")], TWO_CORES
        )
    places = [(problem.setting, problem.place) for problem in caught.value.problems]
    assert places == [
        ("ring_byte", f"{file}:1"),
        ("flush.linger_ms", f"{file}:8"),
        ("fronts", f"{part}:1"),
        ("log_level", f"{part}:2"),
        ("slots", "TAILRACE_SLOTS"),
        ("lane_bytes", ""),
        ("group.session.timeout.max.ms", f"{file}:10"),
    ]
    assert caught.value.detail.startswith("the configuration has 7 errors:\n")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1\nb.c = 2\n", {"a": 1, "b.c": 2}),
        ('a = """\n[x]\nb = 1\n"""\nc = 1', {"a": 1, "c": 5}),
        (
            "[t]\n# r\nx = [\n 1,\n 2]\n[t.u]\ny.z = {p = 1,\tq = 2}",
            {"t.x": 3, "t.u.y.z.p": 7, "t.u.y.z.q": 7},
        ),
        ("[[list]]\nx = 1\n", {"list.x": 2}),
        ("\r\na = 1\r\n", {"a": 2}),
        ("a = '#'\n#\nb = 1 # [c]\n", {"a": 1, "b": 3}),
    ],
)
def test_lines_of_keys(text: str, lines: dict[str, int]) -> None:
    assert TomlFile("f", text).lines == lines


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from("abcdef"), st.text(max_size=40), max_size=6))
def test_lines_are_right_whatever_the_texts_are(values: dict[str, str]) -> None:
    text, expected = "", {}
    for number, (name, value) in enumerate(values.items()):
        expected[name] = 2 * number + 2
        text += f"# [{number}]\n{name} = {in_toml(value)}\n"
    assert TomlFile("f", text).lines == expected


def test_a_long_value_costs_no_time_for_its_line(tmp_path: pathlib.Path) -> None:
    lines = TomlFile("f", "a = [\n" + "1,\n" * 100_000 + "]\nb = 1\n").lines
    assert lines == {}  # no line is better than a minute


# ---- files that are none -------------------------------------------------------------------------


def test_a_path_that_is_no_readable_file_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    directory, fifo, link = tmp_path / "d", tmp_path / "fifo", tmp_path / "link"
    directory.mkdir()
    os.mkfifo(fifo)
    link.symlink_to(tmp_path / "gone")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "is a directory; give a file" in refusal(directory)
    assert "is a pipe, which cannot be read again" in refusal(fifo)
    assert f"it is a link to {tmp_path / 'gone'}, which is missing" in refusal(link)
    assert "cannot be read: Too many levels of symbolic links" in refusal(loop)
    assert "cannot be read: No such file" in refusal(tmp_path / "none")


def test_a_file_that_is_too_large_or_no_text_is_refused(tmp_path: pathlib.Path) -> None:
    large = write(tmp_path / "large", "# x\n" * (10 * SIZE_MAX_BYTES // 4))
    assert f"a configuration has at most {SIZE_MAX_BYTES}" in refusal(large)
    latin = write(tmp_path / "latin", b"slots = 100\n# gr\xfc\xdfe\n")
    assert f"{latin}:2: is not valid TOML: byte 0xfc is not UTF-8" in refusal(latin)
    deep = write(tmp_path / "deep", "cores = " + "[" * 100_000)
    assert "is not valid TOML: it is nested too deeply" in refusal(deep)
    long = write(tmp_path / "long", f"slots = {'9' * 5_000}\n")
    assert "has a number with too many digits" in refusal(long)


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("slots = 1\na = = b\n", 2, "is not valid TOML, column 5"),
        ("slots = 16\n[a]\nslots = [1,\n", 3, "where the file ends"),
        ("slots = 16\nfronts = 1\nslots = 17\n", 3, "slots is given twice, on line 1 too"),
        ("[flush]\nlinger_ms = 1\n[log]\n[flush]\nx = 1", 4, "flush is given twice, on line 1 too"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_line(
    text: str, line: int, sentence: str, tmp_path: pathlib.Path
) -> None:
    file = write(tmp_path / "f", text)
    found = refusal(file)
    assert found.startswith(f"{file}:{line}: ")
    assert sentence in found


def test_a_file_that_is_being_written_is_read_when_it_is_complete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "f", "slots = 100\n")
    original, left = toml_file._read_once, [1]

    def read_and_write(path: str) -> tuple[os.stat_result, bytes]:
        found = original(path)
        if left and left.pop() is not None:
            write(file, "slots = 1000\n")
        return found

    monkeypatch.setattr(toml_file, "_read_once", read_and_write)
    assert dict(read(str(file)).values) == {"slots": 1000}

    def always(path: str) -> tuple[os.stat_result, bytes]:
        found = original(path)
        write(file, found[1] + b"#")
        return found

    monkeypatch.setattr(toml_file, "_read_once", always)
    with pytest.raises(FileProblem, match="is being written"):
        read(str(file))


# ---- drop-ins and instances ----------------------------------------------------------------------


def test_drop_ins_win_in_the_order_of_their_names(tmp_path: pathlib.Path) -> None:
    file = write(tmp_path / "tailrace.toml", "slots = 100\nfronts = 2\nring_bytes = '1MiB'\n")
    write(tmp_path / "conf.d" / "10-a.toml", "slots = 200\nlane_bytes = '256KiB'\n")
    write(tmp_path / "conf.d" / "9-b.toml", "slots = 300\n")
    write(tmp_path / "conf.d" / ".hidden.toml", "slots = 400\n")
    write(tmp_path / "conf.d" / "editor.toml~", "slots = 500\n")
    write(tmp_path / "gone.toml", "fronts = 3\n")
    (tmp_path / "conf.d" / "a-link.toml").symlink_to(tmp_path / "gone.toml")
    (tmp_path / "conf.d" / "b-null.toml").symlink_to("/dev/null")
    assert [os.path.basename(path) for path in drop_ins(str(file))] == [
        "10-a.toml", "9-b.toml", "a-link.toml", "b-null.toml",
    ]  # fmt: skip
    found = load_settings(str(file), {}, [])
    assert (found.slots, found.fronts, found.ring_bytes) == (300, 3, 1 << 20)
    found = load_settings(str(file), {"TAILRACE_SLOTS": "600"}, [("fronts", "4")])
    assert (found.slots, found.fronts) == (600, 4)


def test_a_drop_in_that_is_wrong_is_named(tmp_path: pathlib.Path) -> None:
    file = write(tmp_path / "tailrace.toml", "")
    (tmp_path / "conf.d" / "x.toml").mkdir(parents=True)
    assert f"{tmp_path}/conf.d/x.toml: is a directory" in refusal(file)
    other = write(tmp_path / "other" / "tailrace.toml", "")
    write(tmp_path / "other" / "conf.d", "")
    assert "conf.d is not a directory; drop-ins are files in it" in refusal(other)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x", "x" * 70, "a\nb"])
def test_an_instance_that_would_leave_the_directory_is_refused(name: str) -> None:
    with pytest.raises(FileProblem, match="is no name of an instance"):
        instance_path(name)


def test_an_instance_has_a_file_of_its_name() -> None:
    assert instance_path("blue-2") == "/etc/tailrace/blue-2.toml"


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("retention.ms", "retention.ms is a setting of topics"),
        ("retention.ms", "or topic.retention.ms for the default of all"),
        ("delay.enabled", "delay.enabled is a setting of topics"),
        ("ring.bytes", "write ring_bytes"),
        ("Ring_Bytes", "write ring_bytes"),
        ("linger_ms", "did you mean flush.linger_ms?"),
        ("flush.linger", "did you mean flush.linger_ms?"),
        ("flsh.linger_ms", "did you mean flush.linger_ms?"),
        ("kafka.sasl.oauthbearer.clock.skew.second", "kafka.sasl.oauthbearer.clock.skew.seconds?"),
        ("producer.id.max", "did you mean producer.ids.max?"),
        ("producer.id.smax", "did you mean producer.ids.max?"),
        ("group.max", "did you mean groups.max?"),
        ("group.smax", "did you mean groups.max?"),
        ("group.session.timeout.mx.ms", "did you mean group.session.timeout.max.ms?"),
        ("log.dirs", "Kafka's log.dirs is data_dirs here"),
        ("log.retention.hours", "Kafka's log.retention.hours is topic.retention.ms here"),
        ("topic.retention", "did you mean topic.retention.ms?"),
        ("acks", "acks is a setting of clients"),
        ("zookeeper.connect", ""),
        ("x" * 100_000, ""),
    ],
)
def test_an_unknown_name_gets_the_right_suggestion(name: str, advice: str) -> None:
    found = advice_for(name, definitions())
    assert advice in found
    assert bool(advice) == bool(found)


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [("", "ab", 2), ("listen", "listen", 0), ("lsiten", "listen", 1), ("listn", "listen", 1),
     ("lissten", "listen", 1), ("kitten", "sitting", 3), ("ca", "abc", 3)],
)  # fmt: skip
def test_edits_are_exact_up_to_the_most_that_counts(a: str, b: str, count: int) -> None:
    for most in range(5):
        for one, other in ((a, b), (b, a)):
            found = edits(one, other, most)
            assert found == count if count <= most else found > most


def slips(name: str) -> set[str]:
    """The name with one letter left out, doubled, or swapped with the next one."""
    found = set()
    for i in range(len(name)):
        found |= {
            name[:i] + name[i + 1 :],
            name[:i] + name[i] + name[i:],
            name[:i] + name[i : i + 2][::-1] + name[i + 2 :],
        }
    return found - {name, ""}


def test_a_slip_in_a_name_gets_the_name() -> None:
    names = list(definitions())
    wrong = {
        slip: advice
        for name in names
        for slip in slips(name)
        if slip not in names
        for advice in [advice_for(slip, names)]
        if advice not in (f"did you mean {name}?", f"write {name}")
    }
    assert not wrong


def test_a_slip_in_the_name_of_a_topics_setting_gets_the_name() -> None:
    wrong = {
        slip: near
        for name in TOPIC_SETTINGS
        for slip in slips(name)
        if slip not in TOPIC_SETTINGS
        for near in [nearest(slip, TOPIC_SETTINGS, 0.5)]
        if near != name
    }
    assert not wrong


def test_every_suggestion_names_a_setting() -> None:
    assert set(KAFKA_NAMES.values()) <= set(definitions())


def test_no_name_is_the_section_of_another() -> None:
    names = sorted(definitions())
    assert not [(a, b) for a in names for b in names if b.startswith(f"{a}.")]


# ---- the file of an installation -----------------------------------------------------------------


def test_the_default_file_changes_nothing_and_each_of_its_lines_is_right() -> None:
    text = default_file()
    assert tomllib.loads(text) == {}
    lines = [line[2:] for line in text.splitlines() if line.startswith("# ") and " = " in line]
    names = [line for line in lines if line.partition(" = ")[0] in definitions()]
    assert [line.partition(" = ")[0] for line in names] == list(definitions())
    problems: list[Problem] = []
    file = TomlFile("default", "\n".join(names))
    assert load_settings(None, {}, file.values) == load_settings(
        None, {}, [(n, d.default) for n, d in definitions().items()]
    )
    assert not problems


def test_the_default_file_of_an_installation_sets_what_it_asks_for(tmp_path: pathlib.Path) -> None:
    chosen = {"data_dirs": ["/var/lib/t\"a'\\b\n"], "http.listen": "", "zygote": False}
    file = write(tmp_path / "f.toml", default_file(chosen))
    problems: list[Problem] = []
    found = gather_settings(str(file), {}, [], problems)
    assert {name: given.value for name, given in found.items()} == chosen
    assert not problems
    with pytest.raises(KeyError, match="no settings: nonsense"):
        default_file({"nonsense": 1})
