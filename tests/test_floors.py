"""The architecture's rules, held by import-linter, and the public names, held by a list."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import trio_infer

ROOT = Path(__file__).parent.parent


def test_imports_run_strictly_downward() -> None:
    lint = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
    assert "3 kept, 0 broken" in lint.stdout


def test_each_public_name_exists_and_says_what_it_is() -> None:
    for name in trio_infer.__all__:
        value = getattr(trio_infer, name)
        if name != "__version__":
            assert inspect.getdoc(value), name
