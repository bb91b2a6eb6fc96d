"""What a worker logs, in the server's log; and how much the server wants of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

__all__ = ["levels", "relay"]


def levels(model: str) -> dict[str, int]:
    """The levels that a worker's loggers are to have, by name; "" is the root."""
    names = ("", "trio_infer", f"trio_infer.model.{model}")
    return {name: logging.getLogger(name).getEffectiveLevel() for name in names}


def relay(model: str, fields: Mapping[str, Any]) -> None:
    """Log a worker's record: the server's own words under their name, all else under `trio_infer.model.NAME`.

    Args:
        model: the model's name.
        fields: of the message.
    """
    name = str(fields["logger"])
    logger = logging.getLogger(name if name.startswith("trio_infer.") else f"trio_infer.model.{model}")
    level = int(fields["level"])
    if not logger.isEnabledFor(level):
        return
    record = logger.makeRecord(logger.name, level, str(fields["file"]), int(fields["line"]), fields["text"], (), None)
    record.exc_text = fields.get("trace")
    logger.handle(record)
