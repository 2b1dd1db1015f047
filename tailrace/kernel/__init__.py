"""The kernel: what is done for each record and each batch, compiled where that was possible, else the same in Python.

`reference.py` is the truth; `_native.pyx` and what it includes do the same, byte for byte, several times as fast. Nothing but this module knows which of
them is used.
`TAILRACE_PURE=1` has the reference used; `TAILRACE_PURE=0` refuses to go on without the compiled one.

Invariant: a compiled kernel that was made from another source or for another version than this package's is never used.
Raises KernelError (an ImportError) at import, with what to do, for one that is there and cannot be used.
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
    "Choices",
    "FillingBatch",
    "FillingQueue",
    "ObjectBuffer",
    "PiecedRows",
    "QuickPartition",
    "QuickSender",
    "RecordBuffer",
    "RecordRows",
    "compiled",
    "copied",
    "encoded_batch",
    "fetched_rows",
    "gathered",
    "is_good_batch",
    "keep_message",
    "lay_message",
    "murmur2",
    "murmur2_cells",
    "new_lock",
    "quick_append",
    "quick_send",
    "read_produce",
    "stamp_batch",
]
VARIABLE = "TAILRACE_PURE"
_HERE = os.path.dirname(os.path.abspath(__file__))
_REMEDY = "run `make kernel` in a checkout, else install tailrace again; or set TAILRACE_PURE=1 to use the same functions in Python"


class KernelError(ImportError):
    """The compiled kernel cannot be used; the sentence says what to do."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, name="tailrace.kernel")


def stamp() -> str:
    """What a compiled kernel has to be made from: the version of the package and the checksum of the sources. (`tailrace/kernel/build.py` reckons the same.)"""
    sources = sorted(name for name in os.listdir(_HERE) if name.startswith("_") and name.endswith((".pyx", ".pxi")))
    if not sources:
        return tailrace.__version__
    checksum = 0
    for source in sources:
        with open(os.path.join(_HERE, source), "rb") as file:
            checksum = zlib.crc32(file.read(), checksum)
    return f"{tailrace.__version__}-{checksum:08x}"


def compiled_name() -> str:
    """What a compiled kernel for this interpreter is called."""
    return f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def compiled_file() -> pathlib.Path | None:
    """Where a compiled kernel for this interpreter lies; None: there is none."""
    import pathlib  # every process of the appliance loads this module: half a MB and 5 ms that it does not need

    path = _compiled_path()
    return None if path is None else pathlib.Path(path)


def _compiled_path() -> str | None:
    found = [os.path.join(_HERE, f"_native{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in found if os.path.exists(path)), None)


def _is_whole(path: str) -> bool:
    """Whether a shared library (ELF, 64 bits) is as long as its header says: its last part is the table of its sections."""
    with open(path, "rb") as file:
        head, size = file.read(64), file.seek(0, os.SEEK_END)
    if len(head) < 64:
        return False
    (sections_at,) = struct.unpack_from("<Q", head, 40)
    section_bytes, section_count = struct.unpack_from("<HH", head, 58)
    return bool(size >= sections_at + section_bytes * section_count)


def load_compiled() -> ModuleType | None:
    """The compiled kernel; None: there is none. Raises KernelError."""
    path = _compiled_path()
    if path is None:
        return None
    try:
        if not _is_whole(path):  # to load it would end the process: SIGBUS
            raise ImportError("the file is cut short")
        module = importlib.import_module("tailrace.kernel._native")
    except (ImportError, OSError) as error:
        raise KernelError(f"the compiled kernel {path} cannot be loaded ({error}): {_REMEDY}") from None
    made_from, wanted = str(module.STAMP), stamp()
    if made_from != wanted and not made_from.startswith(f"{wanted}-"):
        raise KernelError(f"the compiled kernel {path} was made from {made_from}, and this is tailrace {wanted}: {_REMEDY}")
    return module


def _chosen() -> tuple[ModuleType | None, str]:
    """(the compiled kernel, or None for the reference; which it is and why, a clause)."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise KernelError(f"{VARIABLE} is {wish[:40]!r}; it takes 1 (use Python), 0 (go on with the compiled kernel only), or nothing")
    if wish == "1":
        return None, f"Python, because {VARIABLE}=1"
    module = load_compiled()
    if module is not None:
        return module, f"compiled, {module.STAMP}"
    if wish == "0":
        raise KernelError(
            f"{VARIABLE}=0, and no compiled kernel lies in {_HERE}: run `make kernel` in a checkout, else install a wheel for this Python"
        )
    return None, "Python, because none is compiled here"


_native, KIND = _chosen()
IS_COMPILED = _native is not None
"""Whether the compiled kernel is used. For reports; nothing depends on it."""


compiled: Any = _native
"""The compiled module, for classes whose reference lies elsewhere, in `shm` and `netfront`, and who take hot methods from it (see `shm.cell`); None: they are
used as they are.
"""


def is_wished() -> bool:
    """Whether the reference is used because TAILRACE_PURE=1 says so."""
    return os.environ.get(VARIABLE) == "1"


ObjectBuffer = reference.RecordBuffer
"""For records whose values are no bytes: rows of typed topics."""
PiecedRows = reference.PiecedRows
"""For records that are made in Python: those of typed topics."""

if TYPE_CHECKING or _native is None:
    from tailrace.kernel.reference import (
        Choices,
        FillingBatch,
        FillingQueue,
        QuickSender,
        RecordBuffer,
        RecordRows,
        murmur2,
        new_lock,
        quick_send,
    )
    from tailrace.kernel.reference_appends import BatchShape, QuickPartition, is_good_batch, quick_append
    from tailrace.kernel.reference_encoding import encoded_batch, stamp_batch
    from tailrace.kernel.reference_fetched import fetched_rows
    from tailrace.kernel.reference_frames import copied, keep_message, lay_message
    from tailrace.kernel.reference_gathering import gathered, murmur2_cells
    from tailrace.kernel.reference_requests import read_produce
else:
    encoded_batch, stamp_batch = _native.encoded_batch, _native.stamp_batch
    BatchShape, QuickPartition = _native.BatchShape, _native.QuickPartition
    is_good_batch, quick_append = _native.is_good_batch, _native.quick_append
    copied, keep_message, lay_message, read_produce = _native.copied, _native.keep_message, _native.lay_message, _native.read_produce
    Choices, FillingBatch, FillingQueue = _native.Choices, _native.FillingBatch, _native.FillingQueue
    QuickSender, RecordBuffer = _native.QuickSender, _native.RecordBuffer
    RecordRows, fetched_rows = _native.RecordRows, _native.fetched_rows
    gathered, murmur2_cells = _native.gathered, _native.murmur2_cells
    murmur2, new_lock, quick_send = _native.murmur2, _native.new_lock, _native.quick_send
