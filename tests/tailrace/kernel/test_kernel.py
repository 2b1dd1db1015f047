"""The compiled kernel against its reference, byte for byte; and which of them is chosen, or
refused.
"""

from __future__ import annotations

import gc
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailrace
from appliance.supervise.processes.restart_policy import ExitCode
from tailrace import kernel, launcher
from tailrace.core.records import Record
from tailrace.format.record_batch.batch_header import HEADER_BYTES
from tailrace.format.schema import DEFAULT_SCHEMA, HEADER_TYPE
from tailrace.kernel import reference
from tailrace.kernel.reference_arrow import default_rows, null_headers
from tests.kit.processes import HANG_LIMIT_S

NOT_COMPILED = "no kernel is compiled here (make kernel)"
compiled_only = pytest.mark.skipif(kernel.compiled_file() is None, reason=NOT_COMPILED)
STAMP = st.integers(-(2**63), 2**63 - 1)
CELL = st.none() | st.binary(max_size=20)
NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
HEADERS = st.none() | st.lists(st.tuples(NAME, CELL), max_size=3)
RECORD = st.tuples(CELL, CELL, STAMP, HEADERS)
PLAIN_RECORD = st.tuples(CELL, CELL, STAMP, st.none())
RECORDS = st.lists(RECORD, min_size=1, max_size=40) | st.lists(
    PLAIN_RECORD, min_size=1, max_size=40
)
ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def native() -> ModuleType:
    module = kernel.load_compiled()
    assert module is not None
    return module


class Bytes(bytes):
    pass


def filled(module: ModuleType, records: list[tuple[Any, ...]], data_max: int | None = None) -> Any:
    rows = module.RecordBuffer() if data_max is None else module.RecordBuffer(data_max)
    for number, record in enumerate(records):
        assert rows.add(*record) == number
    return rows


def state(rows: Any) -> tuple[Any, ...]:
    return len(rows), rows.keys(), rows.values(), list(rows.stamps_us()), rows.ends_without_key()


# ---- one truth -----------------------------------------------------------------------------------


@compiled_only
@given(RECORDS, st.sampled_from([0, HEADER_BYTES]))
def test_a_buffer_of_records_makes_the_references_message(
    native: ModuleType, records: list[tuple[Any, ...]], gap: int
) -> None:
    ours, truth = filled(native, records), filled(reference, records)
    assert state(ours) == state(truth)
    assert ours.message(gap) == truth.message(gap)
    frame = ours.frame()
    frame.validate(full=True)
    assert frame.equals(truth.frame())
    # What an Arrow library makes of it again, compressed too, does not tell them apart.
    for compression in (None, "lz4"):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        sinks = [pa.BufferOutputStream(), pa.BufferOutputStream()]
        for sink, rows in zip(sinks, (frame, truth.frame()), strict=True):
            with pa.ipc.new_stream(sink, DEFAULT_SCHEMA, options=options) as writer:
                writer.write_batch(rows)
        assert sinks[0].getvalue().equals(sinks[1].getvalue())
    ours.clear()
    truth.clear()
    assert state(ours) == state(truth) == (0, [], [], [], False)
    assert ours.add(b"again", None, 1) == truth.add(b"again", None, 1) == 0
    assert ours.message() == truth.message()


@compiled_only
@given(RECORDS, st.data())
def test_picked_rows_are_the_references(
    native: ModuleType, records: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=60))
    ours, truth = (
        filled(native, records).picked(chosen),
        filled(reference, records).picked(iter(chosen)),
    )
    assert state(ours) == state(truth)
    assert ours.message() == truth.message()


@pytest.mark.parametrize("name", ["native", "reference"])
def test_a_row_that_is_not_there_and_bytes_beyond_arrows_offsets_are_refused(name: str) -> None:
    module = reference if name == "reference" else kernel.load_compiled()
    if module is None:
        pytest.skip(NOT_COMPILED)
    for row in (-1, 2):
        with pytest.raises(IndexError, match=f"there are rows 0 to 1, not {row}"):
            filled(module, [(b"k", b"v", 1, None)] * 2).picked([row])
    rows = filled(module, [(b"k", b"12345", 1, None)], data_max=9)
    steps: list[Callable[[], Any]] = [lambda: rows.add(b"k", b"12345", 1, None)] * 2 + [
        rows.message
    ]
    with pytest.raises(
        OverflowError, match="have more than 9 bytes"
    ):  # the reference looks when it encodes
        [step() for step in steps]


@compiled_only
@given(RECORDS, RECORD)
def test_a_record_that_is_refused_leaves_nothing(
    native: ModuleType, records: list[tuple[Any, ...]], record: tuple[Any, ...]
) -> None:
    rows = filled(native, records, data_max=900)
    before, message = state(rows), rows.message()
    for bad in (
        (b"x" * 901, b"", 1),
        (b"", b"x" * 901, 1),
        (b"k", 7, 1),
        ("text", b"v", 1),
        (b"k", b"v", 2**63),
        (b"k", b"v", 1, [("h", 7)]),
    ):
        with pytest.raises((OverflowError, TypeError)):
            rows.add(*bad)
        assert (state(rows), rows.message()) == (before, message)
    rows.add(*record)
    assert rows.message() == filled(reference, [*records, record]).message()


@compiled_only
@given(st.lists(st.binary(min_size=1, max_size=3000), min_size=50, max_size=400))
def test_buffers_that_grow_keep_what_they_hold(native: ModuleType, values: list[bytes]) -> None:
    records = [
        (value[:3], value * 9, len(value), [("n", value)] if len(value) % 5 == 0 else None)
        for value in values
    ]
    assert filled(native, records).message() == filled(reference, records).message()


@compiled_only
@given(st.lists(st.tuples(st.integers(0, 3), RECORDS | st.none()), max_size=12))
def test_what_a_buffer_held_before_is_in_none_that_gets_its_memory(
    native: ModuleType, steps: list[tuple[int, list[tuple[Any, ...]] | None]]
) -> None:
    """Some are filled side by side; each gives its memory to whichever begins next."""
    buffers, records = [native.RecordBuffer() for _ in range(4)], [[] for _ in range(4)]  # type: ignore[var-annotated]
    for which, more in steps:
        if more is None:
            buffers[which].clear()
            records[which] = []
        else:
            for record in more:
                buffers[which].add(*record)
            records[which] += more
        for ours, truth in zip(buffers, records, strict=True):
            assert state(ours) == state(filled(reference, truth))
            assert not truth or ours.message() == filled(reference, truth).message()


@compiled_only
@given(st.binary(max_size=40))
def test_keys_have_kafkas_hash_in_both(native: ModuleType, key: bytes) -> None:
    assert native.murmur2(key) == native.murmur2(Bytes(key)) == reference.murmur2(key)
    for wrong in (None, "text", 7):
        with pytest.raises(TypeError):
            native.murmur2(wrong)


def columns(records: list[tuple[Any, ...]], start: int) -> tuple[Any, ...]:
    batch = default_rows(
        [r[2] for r in records],
        [r[0] for r in records],
        [r[1] for r in records],
        [r[3] for r in records],
    )
    batch = batch.slice(start)
    return (
        batch.column(0).view(pa.int64()).to_numpy(),
        batch.column(1),
        batch.column(2),
        batch.column(3),
    )


@compiled_only
@given(RECORDS, st.data())
def test_records_are_made_as_the_reference_makes_them(
    native: ModuleType, records: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(records) - 1))
    arguments = (Record, "topic", 3, 2**40, 1, *columns(records, start))
    ours = native.records(*arguments)
    assert ours == reference.records(*arguments)
    assert {type(record) for record in ours} <= {Record}
    assert [tuple(map(type, record)) for record in ours] == [
        tuple(map(type, record)) for record in reference.records(*arguments)
    ]
    assert len({id(record.headers) for record in ours}) == len(ours), (
        "a user may change the list of one"
    )


@compiled_only
@given(RECORDS, st.lists(st.integers(-1, 12), min_size=1, max_size=8), st.integers(1, 7))
def test_records_that_are_taken_in_parts_are_those_taken_at_once(
    native: ModuleType, records: list[tuple[Any, ...]], counts: list[int], piece_rows: int
) -> None:
    arguments = (Record, "topic", 3, 2**40, 1, *columns(records, 0))
    whole = native.records(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "PIECE_ROWS", piece_rows)
        for module in (native, reference):
            rows = module.RecordRows(*arguments)
            found: list[Record] = []
            for count in [*counts, len(whole)]:
                before = len(found)
                rows.take(found, count)
                assert len(found) - before == max(0, min(count, len(whole) - before))
                assert (len(rows), rows.next_offset) == (
                    len(whole) - len(found),
                    2**40 + len(found),
                )
            assert found == whole


@compiled_only
@given(RECORDS, st.data(), st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 7))
def test_records_with_offsets_of_their_own_are_made_alike(
    native: ModuleType, records: list[tuple[Any, ...]], data: st.DataObject, counts: list[int],
    piece_rows: int,
) -> None:  # fmt: skip
    steps = data.draw(st.lists(st.integers(1, 2**40), min_size=len(records), max_size=len(records)))
    offsets = np.cumsum(np.array(steps, np.int64))
    arguments = (Record, "topic", 3, int(offsets[0]), 1, *columns(records, 0), offsets)
    plain = native.records(*arguments[:-1])
    expected = [
        record._replace(offset=offset)
        for record, offset in zip(plain, offsets.tolist(), strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "PIECE_ROWS", piece_rows)
        for module in (native, reference):
            rows = module.RecordRows(*arguments)
            found: list[Record] = []
            for count in [*counts, len(expected)]:
                rows.take(found, count)
                at = len(found)
                following = offsets[at] if at < len(offsets) else offsets[-1] + 1
                assert rows.next_offset == following
            assert found == expected
            assert {type(record.offset) for record in found} == {int}
            with pytest.raises(ValueError, match="different lengths"):
                module.RecordRows(*arguments[:-1], offsets[:-1])


@compiled_only
def test_the_collector_has_no_records_to_look_at_and_is_left_as_it_was(native: ModuleType) -> None:
    arguments = (
        Record,
        "t",
        0,
        0,
        0,
        *columns([(b"k", b"v", 1, None), (b"k", b"v", 1, [("a", b"b")])], 0),
    )
    for is_enabled in (True, False):
        (gc.enable if is_enabled else gc.disable)()
        try:
            found = native.records(*arguments)
            assert gc.isenabled() is is_enabled
        finally:
            gc.enable()
        assert [gc.is_tracked(record) for record in found] == [False, False]
        assert not gc.is_tracked(found[0].headers)
        assert gc.is_tracked(found), "the list is the caller's"


@compiled_only
def test_columns_that_contradict_themselves_raise_and_crash_nothing(native: ModuleType) -> None:
    good = pa.array([b"one", b"two"], pa.binary())
    none = null_headers(2)
    stamps = np.zeros(2, np.int64)

    offsets = np.array([0, 3, 6], np.int32)
    changing = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(offsets), good.buffers()[2]]
    )
    for wild in ((0, 3, 2**30), (-8, 3, 6), (0, 5, 3), (0, -1, 6), (7, 7, 7)):
        offsets[:] = wild
        for pair in ((changing, good), (good, changing)):
            with pytest.raises(ValueError, match="offsets exceed the data"):
                native.records(Record, "t", 0, 0, 0, stamps, *pair, none)
    for wrong in (
        (good.slice(1), good, none),
        (good, good, null_headers(3)),
        (good, pa.array([b"one"], pa.binary()), none),
    ):
        with pytest.raises(ValueError, match="different lengths"):
            native.records(Record, "t", 0, 0, 0, stamps, *wrong)
    for no_record in (list, type("WithAttributes", (Record,), {}), "Record"):
        with pytest.raises(TypeError, match="without attributes of its own"):
            native.records(no_record, "t", 0, 0, 0, stamps, good, good, none)
    lists = pa.array([[{"key": "a", "value": b"b"}], None], HEADER_TYPE)
    offsets = np.array([0, 1, 1], np.int32)
    lists = pa.Array.from_buffers(
        HEADER_TYPE,
        2,
        [lists.buffers()[0], pa.py_buffer(offsets)],
        children=[lists.values],
        null_count=1,
    )
    assert native.records(Record, "t", 0, 0, 0, stamps, good, good, lists)[0].headers == [
        ("a", b"b")
    ]
    offsets[1:] = 9
    with pytest.raises(ValueError, match="offsets exceed the data"):
        native.records(Record, "t", 0, 0, 0, stamps, good, good, lists)
    offsets = np.array([0, 3, 6], np.int32)
    keys = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(offsets), good.buffers()[2]])
    offsets[2] = 9
    rows = native.RecordRows(Record, "t", 0, 5, 0, stamps, keys, good, none)
    found: list[Record] = []
    for _ in range(2):
        with pytest.raises(ValueError, match="offsets exceed the data"):
            rows.take(found, 2)
        assert [record.offset for record in found] == [5], "what came before it is there, once"
        assert (rows.next_offset, len(rows)) == (6, 1)
    assert gc.isenabled()


# ---- which one -----------------------------------------------------------------------------------


def said(root: pathlib.Path, wish: str) -> subprocess.CompletedProcess[str]:
    runtime = {**os.environ, "TAILRACE_PURE": wish, "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "tailrace.kernel"],
        env=runtime,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
    )


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the package."""
    shutil.copytree(
        ROOT / "tailrace", tmp_path / "tailrace", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def without_compiled(tree: pathlib.Path) -> pathlib.Path:
    for path in (tree / "tailrace" / "kernel").glob("_native.*.so"):
        path.unlink()
    return tree / "tailrace" / "kernel" / kernel.compiled_name()


def test_without_a_compiled_kernel_the_reference_is_used_unless_that_is_forbidden(
    tree: pathlib.Path,
) -> None:
    without_compiled(tree)
    assert said(tree, "").stdout.startswith(
        "tailrace: kernel: Python, because none is compiled here; several times slower"
    )
    assert said(tree, "1").stdout.startswith("tailrace: kernel: Python, because TAILRACE_PURE=1")
    refused = said(tree, "0")
    assert refused.returncode
    assert "TAILRACE_PURE=0, but there is no compiled kernel in" in refused.stderr
    assert "run `make kernel`" in refused.stderr
    assert "TAILRACE_PURE is 'yes'; set it to 1" in said(tree, "yes").stderr


@compiled_only
def test_the_compiled_kernel_is_used_unless_python_is_asked_for(tree: pathlib.Path) -> None:
    for wish in ("", "0"):
        assert said(tree, wish).stdout == f"tailrace: kernel: compiled, {kernel.stamp()}\n"
    assert said(tree, "1").stdout.startswith("tailrace: kernel: Python, because TAILRACE_PURE=1")


@pytest.mark.parametrize(
    "module", ["appliance.cli.main", "appliance.supervise.supervisor", "workers.append.worker"]
)
def test_a_program_that_cannot_use_its_kernel_says_so_in_a_sentence(module: str) -> None:
    code = f"from tailrace import launcher; launcher._run({module!r}, ['doctor'])"
    runtime = {**os.environ, "TAILRACE_PURE": "yes", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=runtime,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert ended.returncode == launcher.EXIT_CONFIG
    assert (
        ended.stderr
        == "tailrace: TAILRACE_PURE is 'yes'; set it to 1 (use Python) or 0 (require the compiled "
        "kernel), or leave it unset\n"
    )


def refuses(tree: pathlib.Path, sentence: str) -> None:
    for wish in ("", "0"):
        refused = said(tree, wish)
        assert refused.returncode, refused.stdout
        assert sentence in refused.stderr
        assert (
            "run `make kernel` in a checkout, else install tailrace again; or set TAILRACE_PURE=1"
            in refused.stderr
        )
    assert said(tree, "1").returncode == 0


@compiled_only
def test_a_compiled_kernel_of_another_version_or_source_is_refused(tree: pathlib.Path) -> None:
    package = tree / "tailrace" / "__init__.py"
    sources = sorted((tree / "tailrace" / "kernel").rglob("*.p[xy][ix]"))
    assert len(sources) > 20
    for source in (sources[0], sources[1], sources[-1]):  # `_native.pyx`, and parts of it
        text = source.read_text()
        source.write_text(text + "# changed\n")
        refuses(
            tree, f"was built from {kernel.stamp()}, but this is tailrace {tailrace.__version__}-"
        )
        source.write_text(text)
    for source in sources:
        source.unlink()
    assert said(tree, "0").returncode == 0, "without its source the version counts"
    package.write_text(
        package.read_text().replace(
            f'__version__ = "{tailrace.__version__}"', '__version__ = "9.9"'
        )
    )
    refuses(tree, f"was built from {kernel.stamp()}, but this is tailrace 9.9")


def test_a_half_built_kernel_is_refused(tree: pathlib.Path) -> None:
    file = without_compiled(tree)
    whole = kernel.compiled_file()
    pieces = [b"", b"\x7fELF", b"#!/bin/sh\n" * 100]
    if whole is not None:
        data = whole.read_bytes()
        pieces += [data[: len(data) // 2], data[:-1], bytes(len(data))]
    for piece in pieces:
        file.write_bytes(piece)
        refuses(tree, f"the compiled kernel {file} cannot be loaded")


def test_a_kernel_that_is_refused_ends_a_program_with_its_sentence_and_is_not_tried_again(
    tree: pathlib.Path,
) -> None:
    for name in ("appliance", "netfront", "shm", "workers"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = without_compiled(tree)
    file.write_bytes(b"half")
    shutil.copy(ROOT / "pyproject.toml", tree)
    command = [
        sys.executable,
        "-P",
        str(tree / "tailrace" / "launcher.py"),
        "appliance.cli.main",
        "doctor",
    ]
    runtime = {**os.environ, "TAILRACE_PURE": "", "PYTHONPATH": str(tree)}
    ended = subprocess.run(
        command, env=runtime, cwd="/", capture_output=True, text=True, timeout=HANG_LIMIT_S
    )
    assert (ended.returncode, ended.stdout) == (ExitCode.CONFIG, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        f"tailrace: the compiled kernel {file} cannot be loaded (the file is truncated): run "
        "`make kernel`"
    )


def test_columns_of_as_many_partitions_as_fill_at_once_are_used_again_and_no_more_than_8_mib() -> (
    None
):
    """Memory that the C library has given out, in a process of its own: 64 small batches that were
    filled and cleared keep theirs, 600 not all.
    """
    program = """if True:
        import ctypes, sys
        from tailrace import kernel
        library = ctypes.CDLL(None)
        if not kernel.IS_COMPILED or not hasattr(library, "mallinfo2"):
            sys.exit(print("none"))
        class Given(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "a", "b", "c", "mapped", "d", "e", "used", "f", "g")]
        library.mallinfo2.restype = Given
        def given():
            found = library.mallinfo2()
            return found.used + found.mapped
        def filled_and_cleared(count, rows):
            buffers = [kernel.RecordBuffer() for _ in range(count)]
            for buffer in buffers:
                for _ in range(rows):
                    buffer.add(b"key", bytes(100), 1)
            full = given()
            for buffer in buffers:
                buffer.clear()
            return full, given()
        filled_and_cleared(1, 1)
        before = given()
        full, after = filled_and_cleared(64, 200)
        again, _ = filled_and_cleared(64, 200)
        _, many = filled_and_cleared(600, 200)
        print(full - before, after - before, again - before, many - before)
    """  # noqa: E501
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_LIMIT_S,
    ).stdout.split()
    if answer == ["none"]:
        pytest.skip("the kernel in Python, or a C library that does not count")
    full, after, again, many = map(int, answer)
    assert after > 0.8 * full
    assert again < 1.1 * full
    assert many < 9 << 20
