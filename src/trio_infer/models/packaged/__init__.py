"""Models to try the server with: served when no repository is given, small, deterministic, and without downloads."""

from __future__ import annotations

from trio_infer.models.native import Model
from trio_infer.models.packaged.identity import Identity
from trio_infer.models.packaged.scribe.model import Scribe
from trio_infer.models.packaged.slow import Slow
from trio_infer.models.packaged.summarize import Summarize

__all__ = ["Identity", "Scribe", "Slow", "Summarize", "packaged_models"]


def packaged_models() -> list[Model]:
    """One fresh object of each packaged model, by name."""
    return [Identity(), Scribe(), Slow(), Summarize()]
