"""What models log goes under `trio_infer.model.NAME`, with the file and line of the model's own code."""

from __future__ import annotations

import logging

__all__ = ["log_as"]


def log_as(model: str, level: int, message: str, file: str = "", line: int = 0) -> None:
    """Write a model's words to the log, if its level is on.

    Args:
        model: its name; "" if that isn't known.
        level: `logging`'s.
        file, line: where the call is; "" and 0 if that isn't known.
    """
    logger = logging.getLogger(f"trio_infer.model.{model}" if model else "trio_infer.model")
    if logger.isEnabledFor(level):
        logger.handle(logger.makeRecord(logger.name, level, file or "(unknown file)", line, message, (), None))
