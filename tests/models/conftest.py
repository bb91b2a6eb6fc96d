from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from triton_stage import Repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that model code imports as `stage`."""
    module = ModuleType("stage")
    monkeypatch.setitem(sys.modules, "stage", module)
    return module
