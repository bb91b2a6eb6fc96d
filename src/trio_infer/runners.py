"""Ways to run plain functions as models: `Server([runners.process(f), runners.thread(g)])`."""

from __future__ import annotations

from trio_infer.models.function_runners import process, thread

__all__ = ["process", "thread"]
