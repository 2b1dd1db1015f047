"""Tables of results into docs/performance.md, between their marks. Nothing else of the page is
touched.

The caller hands the tables in: `bench.doc_tables` makes them of a file of results.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.other_tree import ROOT

PAGE = ROOT / "docs/performance.md"


def put(text: str, name: str, table: str) -> str:
    """The page with `table` between its marks `<!-- name -->`. Raises ValueError when they are not
    there.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, opened, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"{PAGE.name} has no part between {start.strip()} and {end}")
    return before + start + table + end + after


def write(tables: Mapping[str, str]) -> list[str]:
    """Put each table between the marks of its name; returns the names. Raises ValueError without
    any.
    """
    if not tables:
        raise ValueError(
            "it has no budget, breadth or goals: give a file of bench-scale, bench-peers or "
            "bench-spark"
        )
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = put(text, name, table)
    PAGE.write_text(text, encoding="utf-8")
    return list(tables)
