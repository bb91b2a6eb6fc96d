"""The benchmarks still run. What they measure in so short a time means nothing, and nothing is asked of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
SCRIPTS = sorted(path.name for path in BENCH.glob("[!_]*.py"))


@pytest.mark.skipif(sys.platform != "linux", reason="they read /proc and use epoll")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs_to_its_end(script: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCH / script, "--quick"],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith("## ")
    assert "\n| -" in done.stdout, "a table"


def test_there_are_benchmarks() -> None:
    assert len(SCRIPTS) >= 5
