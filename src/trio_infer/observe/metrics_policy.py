"""What is measured, and how finely: `--metrics-config` and its like, as values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from trio_infer.errors import SetupError

__all__ = ["MetricsPolicy"]

QUANTILES: Final = ((0.5, 0.05), (0.9, 0.01), (0.95, 0.001), (0.99, 0.001), (0.999, 0.001))
"""Triton's: quantile and allowed error."""

MOST_QUANTILES: Final = 20

_TRUTH: Final = {"true": True, "1": True, "false": False, "0": False}


@attrs.frozen(kw_only=True)
class MetricsPolicy:
    """What `/metrics` has: `Server(models, metrics=MetricsPolicy())`.

    Attributes:
        counter_latencies: durations, added up.
        summary_latencies: quantiles of durations, over the latest 1,024 requests of a model that are not older than a
            minute.
        summary_quantiles: which ones, each with the error that Triton allows itself; here they are exact.
        histogram_latencies: the time to the first response, of models that give any number.
        cpu: the machine's CPU and memory, from /proc.
        interval_ms: milliseconds for which a look at the machine holds.
    """

    counter_latencies: bool = True
    summary_latencies: bool = False
    summary_quantiles: tuple[tuple[float, float], ...] = QUANTILES
    histogram_latencies: bool = False
    cpu: bool = True
    interval_ms: float = 2000.0

    @classmethod
    def read(cls, words: Iterable[str], *, cpu: bool = True, interval_ms: float = 2000.0) -> MetricsPolicy:
        """The policy of the values of `--metrics-config`, such as `summary_latencies=true`; the last one counts.

        Raises:
            SetupError: one of them is none.
        """
        fields: dict[str, object] = {}
        for word in words:
            key, equals, value = word.partition("=")
            key, value = key.strip(), value.strip()
            if not equals or key not in ("summary_quantiles", *_SWITCHES):
                raise SetupError(
                    f"--metrics-config must be one of {', '.join(_SWITCHES)} or summary_quantiles, with = and a value; "
                    f"got '{word}'"
                )
            if key == "summary_quantiles":
                fields[key] = _quantiles(value)
            elif value.lower() in _TRUTH:
                fields[key] = _TRUTH[value.lower()]
            else:
                raise SetupError(f"--metrics-config: {key} must be true or false, got '{value}'")
        return cls(cpu=cpu, interval_ms=interval_ms, **fields)  # type: ignore[arg-type]


_SWITCHES: Final = ("counter_latencies", "summary_latencies", "histogram_latencies")


def _quantiles(text: str) -> tuple[tuple[float, float], ...]:
    pairs = []
    for pair in text.split(","):
        quantile, colon, error = pair.partition(":")
        try:
            if not colon:
                raise ValueError
            pairs.append((float(quantile), float(error)))
        except ValueError:
            raise SetupError(
                f"--metrics-config: summary_quantiles must be pairs of quantile:error, such as 0.5:0.05,0.9:0.01; "
                f"got '{text}'"
            ) from None
    if len(pairs) > MOST_QUANTILES or not all(0 <= quantile <= 1 and 0 <= error <= 1 for quantile, error in pairs):
        raise SetupError(
            f"--metrics-config: summary_quantiles must be at most {MOST_QUANTILES}, each from 0 to 1; got '{text}'"
        )
    return tuple(pairs)
