"""Installation into a directory: files, second runs, changes by hand, interrupted runs, older
versions, removal.
"""

from __future__ import annotations

import pathlib
import stat

import pytest

from appliance.install import apply, instances, plan, removal
from appliance.install.apply import Action
from appliance.install.record import PATH, Record, write_file
from tests.kit.hosts.installed import ROOT

PROGRAM = "/opt/tailrace/bin/tailrace"
DOCUMENTS = plan.Documents({"tailrace.1": ".TH TAILRACE 1\n"}, "bash\n", "zsh\n", "fish\n")
CONFIG = "/etc/tailrace/tailrace.toml"
UNIT = "/etc/systemd/system/tailrace.service"


def planned(text: str = "# settings\n", program: str = PROGRAM) -> list[plan.PlannedFile]:
    instance = instances.Instance(instances.DEFAULT, CONFIG, "/var/lib/tailrace", text)
    return plan.plan_files(str(ROOT / "systemd"), program, instance, DOCUMENTS, plan.ADMINISTRATOR)


def install(
    root: pathlib.Path, text: str = "# settings\n", program: str = PROGRAM
) -> dict[str, Action]:
    """Install; path -> action."""
    record = Record.read(str(root))
    steps = apply.decide(planned(text, program), str(root), record)
    apply.perform(steps, str(root), record)
    return {step.file.path: step.action for step in steps}


def tree(root: pathlib.Path) -> dict[str, tuple[int, str]]:
    """Path -> (inode and time of change, content) of everything but the record."""
    return {
        str(path): (path.lstat().st_ino ^ path.lstat().st_mtime_ns,
                    path.readlink().name if path.is_symlink() else path.read_text())
        for path in sorted(root.rglob("*")) if not path.is_dir() and path != root / PATH
    }  # fmt: skip


def test_a_second_run_touches_nothing(tmp_path: pathlib.Path) -> None:
    first = install(tmp_path)
    assert set(first.values()) == {Action.CREATE}
    before = tree(tmp_path)
    assert set(install(tmp_path).values()) == {Action.UNCHANGED}
    assert tree(tmp_path) == before


def test_units_name_the_program_and_templates_their_instance(tmp_path: pathlib.Path) -> None:
    install(tmp_path)
    unit = (tmp_path / UNIT[1:]).read_text()
    assert f"ExecStart={PROGRAM} serve --config {CONFIG}" in unit
    template = (tmp_path / "etc/systemd/system/tailrace@.service").read_text()
    assert f"ExecStart={PROGRAM} serve --config /etc/tailrace/%i.toml" in template
    for line in ("StateDirectory=tailrace-%i", "RuntimeDirectory=tailrace-%i"):
        assert line in template.splitlines()
    assert "/usr/bin/tailrace" not in unit + template
    assert stat.S_IMODE((tmp_path / CONFIG[1:]).stat().st_mode) == 0o640
    assert (tmp_path / "usr/local/bin/tailrace").readlink() == pathlib.Path(PROGRAM)


def test_a_configuration_that_was_changed_is_kept_and_the_new_one_put_beside_it(
    tmp_path: pathlib.Path,
) -> None:
    install(tmp_path)
    (tmp_path / CONFIG[1:]).write_text("fronts = 2\n")
    assert install(tmp_path, "# settings of another version\n")[CONFIG] is Action.KEEP
    assert (tmp_path / CONFIG[1:]).read_text() == "fronts = 2\n"
    new = tmp_path / f"{CONFIG[1:]}.new"
    assert new.read_text() == "# settings of another version\n"


def test_an_unchanged_configuration_is_updated_with_the_version(tmp_path: pathlib.Path) -> None:
    install(tmp_path)
    assert install(tmp_path, "# settings of another version\n")[CONFIG] is Action.UPDATE


def test_a_unit_that_somebody_wrote_is_replaced_and_kept_beside(tmp_path: pathlib.Path) -> None:
    unit = tmp_path / UNIT[1:]
    unit.parent.mkdir(parents=True)
    unit.write_text("# of an older version, copied by hand\n")
    assert install(tmp_path)[UNIT] is Action.REPLACE
    assert unit.with_name("tailrace.service.old").read_text().startswith("# of an older version")
    assert install(tmp_path)[UNIT] is Action.UNCHANGED


def test_another_program_of_the_name_is_left_alone(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "usr/local/bin/tailrace"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    assert install(tmp_path)["/usr/local/bin/tailrace"] is Action.KEEP
    assert program.read_text() == "#!/bin/sh\n"


def test_a_program_that_moved_changes_units_and_link(tmp_path: pathlib.Path) -> None:
    install(tmp_path)
    changed = install(tmp_path, program="/opt/pipx/venvs/tailrace/bin/tailrace")
    assert changed[UNIT] is Action.UPDATE
    assert changed["/usr/local/bin/tailrace"] is Action.UPDATE


def test_a_file_of_an_older_version_is_removed(tmp_path: pathlib.Path) -> None:
    install(tmp_path)
    record = Record.read(str(tmp_path))
    old = tmp_path / "etc/systemd/system/tailrace-gone.service"
    old.write_text("old\n")
    record.add("/etc/systemd/system/tailrace-gone.service", "old\n")
    record.write(str(tmp_path))
    assert install(tmp_path)["/etc/systemd/system/tailrace-gone.service"] is Action.REMOVE
    assert not old.exists()
    assert set(install(tmp_path).values()) == {Action.UNCHANGED}


@pytest.mark.parametrize("writes", range(12))
def test_a_run_that_ends_after_any_write_is_completed_by_the_next(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    count = 0

    def failing(path: str, content: str, mode: int) -> None:
        nonlocal count
        if count == writes:
            raise OSError(28, "No space left on device", path)
        count += 1
        write_file(path, content, mode)

    monkeypatch.setattr("appliance.install.apply.write_file", failing)
    with pytest.raises(OSError, match="No space left"):
        install(tmp_path)
    monkeypatch.undo()
    actions = install(tmp_path)
    assert not {Action.KEEP, Action.REPLACE} & set(actions.values())
    whole = tmp_path / "whole"
    install(whole)
    contents = {
        path.relative_to(whole): path.read_text() for path in whole.rglob("*.*") if path.is_file()
    }
    for path, text in contents.items():
        assert str(path) == PATH or (tmp_path / path).read_text() == text


def test_a_removal_leaves_configuration_data_and_what_was_changed(tmp_path: pathlib.Path) -> None:
    install(tmp_path)
    (tmp_path / "var/lib/tailrace").mkdir(parents=True)
    changed = tmp_path / "etc/sysctl.d/60-tailrace.conf"
    changed.write_text("vm.swappiness = 1\n")
    root = str(tmp_path)
    steps = removal.plan_removal(root, Record.read(root))
    removal.remove_files(root, steps)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()]
    assert sorted(left) == ["etc/sysctl.d/60-tailrace.conf", CONFIG[1:]]
    assert [step.file.path for step in steps if step.action is Action.KEEP] == [
        "/etc/sysctl.d/60-tailrace.conf"
    ]
    names = instances.installed_names(root)
    purged = removal.purged_paths(root, names)
    assert purged == [CONFIG, "/var/lib/tailrace"]
    removal.purge(root, purged)
    assert not (tmp_path / "etc/tailrace").exists()
    assert not (tmp_path / "var/lib/tailrace").exists()


def test_instances_share_no_port_and_no_directory() -> None:
    first = instances.settings_of_instance(instances.DEFAULT, [])
    assert first["listen"] == ["tcp://127.0.0.1:7420", "ipc:///run/tailrace/tailrace.sock"]
    second = instances.settings_of_instance("staging", [repr(first)])
    third = instances.settings_of_instance("load", [repr(first), repr(second)])
    for name in ("listen", "http.listen", "data_dirs"):
        assert len({str(settings[name]) for settings in (first, second, third)}) == 3


@pytest.mark.parametrize("name", ["tailrace", "Staging", "../x", "a" * 32, "", "1a", "a.b"])
def test_a_name_that_no_instance_can_have_is_refused(name: str) -> None:
    with pytest.raises(Exception, match="--instance is"):
        instances.check_name(name)
