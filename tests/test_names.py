"""Identifiers use the field's words (`docs/glossary.md`); a list of banned words keeps others
out.
"""

from __future__ import annotations

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("appliance", "netfront", "shm", "spark_bridge", "tailrace", "workers")
_WORDS = """
    again anew beginnings doubt doubted hear heard hears hire hired hires hiring hold holding
    holds held hurry hush look looked looking looks meet met news nobody oddity owed rung said say
    saying says surroundings tell telling tells thing things ticket tickets told turn turns wanted
    wants what who whoever wonder
"""
BANNED = frozenset(re.findall(r"\w+", _WORDS))


def names_in(tree: ast.AST) -> set[str]:
    """Every name that a module defines or assigns."""
    found: set[object] = set()
    for node in ast.walk(tree):
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            found |= {getattr(node, field, None) for field in ("name", "arg", "id", "attr")}
    return {name for name in found if isinstance(name, str)}


def test_identifiers_use_no_banned_word() -> None:
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for name in names_in(ast.parse(path.read_text())):
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            assert not words & BANNED, f"{path.relative_to(ROOT)}: {name}"


DOCUMENTED = (*PACKAGES, "bench", "tests", "tools")
_QUESTION = re.compile(
    r'^ *r?"""((?:how|of|what|when|where|whether|which|who|whose|why)\b.*)',
    re.IGNORECASE | re.MULTILINE,
)


def test_docstrings_begin_with_their_subject_or_with_a_verb() -> None:
    """A thing is named, not asked for: `The offset of ...`, `True if ...`, `Copy ...`."""
    for path in (path for package in DOCUMENTED for path in (ROOT / package).rglob("*.py")):
        found = _QUESTION.search(path.read_text())
        assert not found, f"{path.relative_to(ROOT)}: {found[1]}"


def test_no_two_names_of_an_enumeration_have_one_number() -> None:
    """Two features that take the next number at once would share a word, a code or a request."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for found in re.finditer(
            r"(@(?:enum\.)?unique\n)?class (\w+)\((?:enum\.)?Int(?:Enum|Flag)\)", path.read_text()
        ):
            assert found[1], f"{path.relative_to(ROOT)}: {found[2]} lacks @unique"


def test_private_names_in_strings_exist() -> None:
    """A rename that forgets `setattr(self, "_name", ...)` passes the type checker."""
    texts = [
        path.read_text()
        for package in (*PACKAGES, "tests", "bench")
        for path in (ROOT / package).rglob("*.py")
    ]
    used = {
        name for text in texts for name in re.findall(r"""attr\([^()"']*["'](_[a-z]\w*)""", text)
    }
    defined = {name for text in texts for name in re.findall(r"""(?<!["'\w])_[a-z]\w*""", text)}
    assert used
    assert not used - defined
