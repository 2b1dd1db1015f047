"""The kernel: functions that run for each record and each batch, compiled or in Python.

`reference.py` is the specification. `_native.pyx` and its parts in `native/` do the same, byte for
byte, several times as fast. Only this module knows which one is used. `TAILRACE_PURE=1` selects the
reference; `TAILRACE_PURE=0` requires the compiled kernel.

Invariants:
- A compiled kernel from another source or version than this package's is never used.
- For one that exists but cannot be used, the import raises KernelError (an ImportError) that says
  what to do.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import struct
import zlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tailrace
from tailrace.kernel import reference
from tailrace.kernel.reference import RECORD_OVERHEAD_BYTES

if TYPE_CHECKING:
    import pathlib

__all__ = [
    "IS_COMPILED",
    "KIND",
    "RECORD_OVERHEAD_BYTES",
    "BatchShape",
    "ChunkedRows",
    "FastPathPartition",
    "FastPathSender",
    "GatheredCells",
    "KeyNumbers",
    "KeyOffsets",
    "LoopSender",
    "ObjectBuffer",
    "OpenBatch",
    "OpenQueue",
    "PartitionCache",
    "RecordBuffer",
    "RecordRows",
    "batches_from_kafka",
    "compiled",
    "encoded_batch",
    "fast_append",
    "fast_send",
    "fetched_rows",
    "is_valid_batch",
    "keep_message",
    "lay_message",
    "murmur2",
    "new_alarm",
    "new_lock",
    "plain_batch_to_kafka",
    "read_produce",
    "records_to_kafka",
    "rows_by_partition",
    "stamp_batch",
]
VARIABLE = "TAILRACE_PURE"
_HERE = os.path.dirname(os.path.abspath(__file__))
_PARTS = os.path.join(_HERE, "native")
_REMEDY = (
    "run `make kernel` in a checkout, else install tailrace again; or set TAILRACE_PURE=1 "
    "to use the same functions in Python"
)


class KernelError(ImportError):
    """The compiled kernel cannot be used. The message says what to do."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, name="tailrace.kernel")


def stamp() -> str:
    """The stamp that a compiled kernel must have: package version and checksum of the sources.

    `tailrace/kernel/build.py` computes the same.
    """
    sources = [
        os.path.join(directory, name)
        for directory, kind in ((_HERE, ".pyx"), (_PARTS, ".pxi"))
        if os.path.isdir(directory)
        for name in sorted(os.listdir(directory))
        if name.endswith(kind)
    ]
    if not sources:
        return tailrace.__version__
    checksum = 0
    for source in sources:
        with open(source, "rb") as file:
            checksum = zlib.crc32(file.read(), checksum)
    return f"{tailrace.__version__}-{checksum:08x}"


def compiled_name() -> str:
    """The file name of a compiled kernel for this interpreter."""
    return f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def compiled_file() -> pathlib.Path | None:
    """The path of the compiled kernel for this interpreter, None if there is none."""
    # Imported here, because it costs every process half a MB and 5 ms at start.
    import pathlib

    path = _compiled_path()
    return None if path is None else pathlib.Path(path)


def _compiled_path() -> str | None:
    found = [
        os.path.join(_HERE, f"_native{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES
    ]
    return next((path for path in found if os.path.exists(path)), None)


def _is_whole(path: str) -> bool:
    """True if a shared library (ELF, 64 bits) is as long as its header says.

    Its last part is the section table.
    """
    with open(path, "rb") as file:
        head, size = file.read(64), file.seek(0, os.SEEK_END)
    if len(head) < 64:
        return False
    (sections_at,) = struct.unpack_from("<Q", head, 40)
    section_bytes, section_count = struct.unpack_from("<HH", head, 58)
    return bool(size >= sections_at + section_bytes * section_count)


def load_compiled() -> ModuleType | None:
    """Load the compiled kernel, None if there is none. Raises KernelError."""
    path = _compiled_path()
    if path is None:
        return None
    try:
        if not _is_whole(path):  # loading it would end the process with SIGBUS
            raise ImportError("the file is truncated")
        module = importlib.import_module("tailrace.kernel._native")
    except (ImportError, OSError) as error:
        raise KernelError(
            f"the compiled kernel {path} cannot be loaded ({error}): {_REMEDY}"
        ) from None
    made_from, requested = str(module.STAMP), stamp()
    if made_from != requested and not made_from.startswith(f"{requested}-"):
        raise KernelError(
            f"the compiled kernel {path} was built from {made_from}, but this is tailrace "
            f"{requested}: {_REMEDY}"
        )
    return module


def _chosen() -> tuple[ModuleType | None, str]:
    """(the compiled kernel, or None for the reference; the choice and its reason)."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise KernelError(
            f"{VARIABLE} is {wish[:40]!r}; set it to 1 (use Python) or 0 (require the compiled "
            "kernel), or leave it unset"
        )
    if wish == "1":
        return None, f"Python, because {VARIABLE}=1"
    module = load_compiled()
    if module is not None:
        return module, f"compiled, {module.STAMP}"
    if wish == "0":
        raise KernelError(
            f"{VARIABLE}=0, but there is no compiled kernel in {_HERE}: run `make kernel` in a "
            "checkout, else install a wheel for this Python"
        )
    return None, "Python, because none is compiled here"


_native, KIND = _chosen()
IS_COMPILED = _native is not None
"""True if the compiled kernel is used. For reports only; no behaviour depends on it."""


compiled: Any = _native
"""The compiled module, None without one. Classes in `shm` and `netfront` take hot methods from it;
their reference is there (see `shm.memory.atomic_word`).
"""


def is_wished() -> bool:
    """True if TAILRACE_PURE=1 selects the reference."""
    return os.environ.get(VARIABLE) == "1"


ObjectBuffer = reference.RecordBuffer
"""Buffer of records whose values are not bytes: rows of typed topics."""
ChunkedRows = reference.ChunkedRows
"""Rows whose records are made in Python: those of typed topics."""

if TYPE_CHECKING or _native is None:
    from tailrace.kernel.reference import (
        FastPathSender,
        LoopSender,
        OpenBatch,
        OpenQueue,
        PartitionCache,
        RecordBuffer,
        RecordRows,
        fast_send,
        murmur2,
        new_alarm,
        new_lock,
    )
    from tailrace.kernel.reference_codec import (
        BatchShape,
        FastPathPartition,
        encoded_batch,
        fast_append,
        fetched_rows,
        is_valid_batch,
        read_produce,
        stamp_batch,
    )
    from tailrace.kernel.reference_frames import keep_message, lay_message
    from tailrace.kernel.reference_gather import GatheredCells, rows_by_partition
    from tailrace.kernel.reference_kafka import (
        batches_from_kafka,
        plain_batch_to_kafka,
        records_to_kafka,
    )
    from tailrace.kernel.reference_keys import KeyNumbers
    from tailrace.kernel.reference_offsets import KeyOffsets
else:
    encoded_batch, stamp_batch = _native.encoded_batch, _native.stamp_batch
    BatchShape, FastPathPartition = _native.BatchShape, _native.FastPathPartition
    is_valid_batch, fast_append = _native.is_valid_batch, _native.fast_append
    keep_message, lay_message = _native.keep_message, _native.lay_message
    read_produce = _native.read_produce
    PartitionCache, OpenBatch, OpenQueue = (
        _native.PartitionCache,
        _native.OpenBatch,
        _native.OpenQueue,
    )
    FastPathSender, RecordBuffer = _native.FastPathSender, _native.RecordBuffer
    RecordRows, fetched_rows = _native.RecordRows, _native.fetched_rows
    GatheredCells, rows_by_partition = _native.GatheredCells, _native.rows_by_partition
    KeyNumbers, KeyOffsets = _native.KeyNumbers, _native.KeyOffsets
    murmur2, new_lock, fast_send = _native.murmur2, _native.new_lock, _native.fast_send
    LoopSender = _native.LoopSender
    new_alarm = _native.new_alarm
    batches_from_kafka = _native.batches_from_kafka
    records_to_kafka = _native.records_to_kafka
    plain_batch_to_kafka = _native.plain_batch_to_kafka
