"""What is asked of the models that are loaded, when somebody looks at the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

__all__ = ["LiveModel"]


@attrs.frozen
class LiveModel:
    """One version of one model, now.

    Args:
        model, version: which.
        stops: where a cancelled run ends, in one word.
        abandoned: how many runs go on for nobody.
        workers: processes of its own, by what they are there for.
        exits: how many of its processes have ended since it was loaded, by why.
    """

    model: str
    version: str
    stops: str
    abandoned: int = 0
    workers: Mapping[str, int] = MappingProxyType({})
    exits: Mapping[str, int] = MappingProxyType({})
