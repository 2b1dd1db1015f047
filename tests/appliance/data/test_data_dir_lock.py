"""Files replaced whole or not at all, identities, manifests, and the specification of a child: by
themselves.
"""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys

import psutil
import pytest

from appliance.data import region_manifest as manifest
from appliance.data.data_dir_lock import DataDirectoryError, take
from appliance.data.region_manifest import RegionManifest
from appliance.observe.checks.doctor_checks import Level, host_checks
from shm.runtime.agent_runner import SPEC_VARIABLE, ProcessSpec
from tailrace import kernel
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import decode_identity, read_identity
from tests.kit.processes import HANG_LIMIT_S


def told(generation: int) -> RegionManifest:
    return RegionManifest(
        generation=generation, boot_id="b", pid=1, shared_memory="s", path="/p", device=1, inode=2,
        regions={"ring-0": "/r", "table-0": "/t"}, old=[],
        directories=["d"], worker_directories={"0": "d"}, lost_memory=False,
    )  # fmt: skip


def test_a_short_write_is_finished(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite

    def short(fd: int, data: memoryview, position: int) -> int:
        return whole(fd, bytes(data[:7]), position)

    monkeypatch.setattr(os, "pwrite", short)
    data = os.urandom(100)
    checked_json.replace(str(tmp_path / "file"), data)
    assert (tmp_path / "file").read_bytes() == data


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    checked_json.replace(str(path), b"old")

    def refuse(_fd: int, _data: memoryview, _position: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space"):
        checked_json.replace(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_links_at_both_names_are_replaced_and_never_followed(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    for name in ("file", "file.tmp"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        checked_json.read(str(tmp_path / "file"))
    checked_json.replace(str(tmp_path / "file"), b"new")
    assert target.read_bytes() == b"precious"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_of_two_manifests_the_newer_whole_one_counts_at_every_length_and_flip(
    tmp_path: pathlib.Path,
) -> None:
    manifest.write(str(tmp_path), told(1))
    older = (tmp_path / "shm.json").read_bytes()
    manifest.write(str(tmp_path), told(2))
    newer = (tmp_path / "shm.json").read_bytes()
    (tmp_path / "shm.json.copy").write_bytes(older)
    assert manifest.read(str(tmp_path)) == (True, told(2))
    for length in range(len(newer)):
        (tmp_path / "shm.json").write_bytes(newer[:length])
        assert manifest.read(str(tmp_path)) == (True, told(1)), length
    for position in range(len(newer)):
        flipped = bytearray(newer)
        flipped[position] ^= 0x10
        (tmp_path / "shm.json").write_bytes(flipped)
        assert manifest.read(str(tmp_path)) == (True, told(1)), position
    (tmp_path / "shm.json.copy").unlink()
    assert manifest.read(str(tmp_path)) == (True, None)
    manifest.remove(str(tmp_path))
    assert manifest.read(str(tmp_path)) == (False, None)


def test_an_identity_is_known_by_every_bit(tmp_path: pathlib.Path) -> None:
    held = take(str(tmp_path))
    data = (tmp_path / "instance.json").read_bytes()
    assert decode_identity(data) == held.identity == read_identity(str(tmp_path))
    assert all(decode_identity(data[:length]) is None for length in range(len(data)))
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        assert decode_identity(bytes(flipped)) is None
    with pytest.raises(DataDirectoryError, match=r"held by processes|in use"):
        take(str(tmp_path))


def test_an_earlier_versions_identity_is_taken_up_with_its_memory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "instance.json").write_bytes(b'{"instance":"%s","format":1}' % (b"ab" * 16))
    held = take(str(tmp_path))
    assert held.instance == held.identity.shared_memory == bytes.fromhex("ab" * 16)
    assert held.identity.inode == tmp_path.stat().st_ino


def test_doctor_says_who_else_may_read_or_write_and_that_machine_or_memory_are_unfit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "coordinator.db").touch(0o644)
    (tmp_path / "coordinator.db").chmod(0o644)

    def found(mode: int) -> list[tuple[Level, str]]:
        tmp_path.chmod(mode)
        return [
            (check.level, check.detail)
            for check in host_checks([str(tmp_path)])
            if check.name == f"directory {tmp_path}"
        ]

    assert found(0o700) == []
    assert [(level, "coordinator.db" in detail) for level, detail in found(0o755)] == [
        (Level.WARNING, True)
    ]
    assert [level for level, _ in found(0o770)] == [Level.WARNING]
    assert [level for level, _ in found(0o777)] == [Level.PROBLEM]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert [check.level for check in host_checks([]) if check.name == "machine"] == [Level.PROBLEM]
    full = psutil.virtual_memory()._replace(available=100 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    (memory,) = [check for check in host_checks([]) if check.name == "memory"]
    assert memory.level is Level.WARNING
    assert memory.detail.startswith(f"100 of {full.total >> 20} MiB")


def test_doctor_says_which_kernel_is_used_and_that_none_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found() -> tuple[Level, str]:
        (check,) = [check for check in host_checks([]) if check.name == "kernel"]
        return check.level, check.detail

    monkeypatch.setattr(kernel, "KIND", "the kind")
    monkeypatch.setattr(kernel, "IS_COMPILED", True)
    assert found() == (Level.OK, "the kind")
    monkeypatch.setattr(kernel, "IS_COMPILED", False)
    monkeypatch.setenv("TAILRACE_PURE", "1")
    assert found() == (Level.OK, "the kind")
    monkeypatch.delenv("TAILRACE_PURE")
    level, detail = found()
    assert level is Level.WARNING
    assert detail.startswith("the kind: work for each record takes several times longer; install")


def test_a_specification_larger_than_an_environment_variable_reaches_its_child() -> None:
    """12 fronts and 128 workers: 145 kB, where 128 KiB are the end."""
    regions = {
        f"front-{f}>worker-{w}": f"/tailrace-0123456789ab-01234567-front-{f}.worker-{w}"
        for f in range(20)
        for w in range(128)
    }
    spec = ProcessSpec(1, 0, 1, "00" * 16, os.getpid(), ["/data"], regions, {})
    fd = spec.to_inherited_file()
    try:
        assert os.fstat(fd).st_size > 128 << 10
        program = (
            "from shm.runtime.agent_runner import ProcessSpec; "
            "print(len(ProcessSpec.from_environment().regions))"
        )
        ended = subprocess.run(
            [sys.executable, "-P", "-c", program], env={**os.environ, SPEC_VARIABLE: str(fd)},
            pass_fds=[fd], capture_output=True, text=True, timeout=HANG_LIMIT_S,
            check=True,
        )  # fmt: skip
    finally:
        os.close(fd)
    assert ended.stdout == f"{len(regions)}\n"
