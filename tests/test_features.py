"""The table in docs/features.md answers for every feature of Triton's interface, and tests show each answer."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = tomllib.loads((ROOT / "docs" / "features.toml").read_text())["section"]
ROWS = [(section["number"], row) for section in SECTIONS for row in section["row"]]
ROWS_OF_SECTIONS = (18, 20, 22, 4, 9, 10, 6, 18, 10, 2, 12, 5, 23, 5, 3, 1, 17, 1, 1)


def test_no_row_is_missing() -> None:
    expected = [f"{number}.{row}" for number, count in enumerate(ROWS_OF_SECTIONS, 1) for row in range(1, count + 1)]
    assert [row["id"] for _, row in ROWS] == expected


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=lambda row: row["id"])
def test_each_row_is_answered_and_shown(row: dict[str, Any]) -> None:
    answer, note, tests = row["answer"], row["note"], row["tests"]
    assert answer in {"yes", "no", "different"}
    if answer == "no":
        assert note, "say why"
    else:
        assert tests, "name the tests that show it"
    if answer == "different":
        assert note, "say how"
    for test in tests:
        path, _, name = test.partition("::")
        assert name in names_in(path), f"{path} has no test {name}"


@cache
def names_in(path: str) -> set[str]:
    """The names of the tests in a file: functions, and hypothesis' state machines."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith("test_")}
