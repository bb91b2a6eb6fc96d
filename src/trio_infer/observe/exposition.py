"""Prometheus' text format, for the names and numbers that Triton's dashboards and tests look for.

The families are prometheus-client's, so that they can go into any registry of that library, but the library's own
writer won't do here: it renames a counter's family to end in `_total`, which Triton's don't, and writes every value as
a float (`1.0`), where Triton's own writer, and those who match whole lines of it, have `1`. This one writes names as
they are and whole numbers as such; a scraper reads both alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

__all__ = ["CONTENT_TYPE", "write_text"]

CONTENT_TYPE: Final = "text/plain; charset=utf-8"

_KINDS: Final = {"unknown": "untyped"}
_EXACT: Final = 2**53


def write_text(families: Iterable[Metric]) -> bytes:
    """The text that a scraper is given; families without a sample are left out.

    Args:
        families: their samples' names are written as they are, labels in their order.
    """
    lines = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escape(family.documentation)}")
        lines.append(f"# TYPE {family.name} {_KINDS.get(family.type, family.type)}")
        for sample in family.samples:
            labels = ",".join(f'{name}="{_escape(value, quote=True)}"' for name, value in sample.labels.items())
            lines.append(f"{sample.name}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines).encode()


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    text = text.replace('"', r"\"") if quote else text
    return text.encode("utf-8", "backslashreplace").decode()


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) and abs(value) <= _EXACT else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
