"""The map of the code in CONTRIBUTING.md: files and functions that it names exist, and its drawing
has the rooms and layers of the import contracts.
"""

from __future__ import annotations

import re
import tomllib

from tests.kit.runs.documents import ROOT


def test_files_named_in_the_map_exist() -> None:
    for name in re.findall(
        r"`((?:tailrace|shm|workers|netfront|appliance|spark_bridge|bench|tests|systemd)/[\w/.]+)`",
        (ROOT / "CONTRIBUTING.md").read_text(),
    ):
        assert (ROOT / name).exists(), f"CONTRIBUTING.md names {name}"


def test_functions_named_in_the_map_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`\s+\(`(\w+)`", text)
    assert named
    for path, name in named:
        assert re.search(rf"^\s*(?:def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), (
            f"CONTRIBUTING.md names {name} in {path}"
        )


DISTRIBUTIONS = ("tailrace", "shm", "netfront", "workers", "appliance", "spark_bridge")


def test_the_drawing_of_the_rooms_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawing = text.split("```text\n")[1].split("```")[0]
    assert len(drawing.splitlines()) <= 40
    words = set(re.findall(r"\w+", drawing))
    for distribution in DISTRIBUTIONS:
        rooms = {path.parent.name for path in (ROOT / distribution).glob("*/__init__.py")}
        assert rooms <= words, f"CONTRIBUTING.md draws no {rooms - words} of {distribution}"


def test_the_drawing_has_the_layers_that_imports_keep() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = {c["containers"][0]: c["layers"] for c in contracts["contracts"] if "containers" in c}
    drawn = re.sub(r" ?\| ?", "|", _right_column((ROOT / "CONTRIBUTING.md").read_text()))
    for container in ("netfront", "appliance.groups"):
        assert " > ".join(layers[container]).replace(" | ", "|") in drawn
    tailrace = " > ".join(layers["tailrace"][1:-1]).replace(" | ", "|")
    assert tailrace in drawn


def _right_column(text: str) -> str:
    """The rooms of the drawing, which begin at one column."""
    lines = text.split("```text\n")[1].split("```")[0].splitlines()
    column = lines[0].index("rooms, the highest first")
    return " ".join(" ".join(line[column:] for line in lines).split())
