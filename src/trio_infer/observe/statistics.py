"""Counters that add up: every request is in exactly one phase, and ends in exactly one outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from trio_infer.lifecycle import CancelReason, Life, Outcome, Phase

__all__ = ["RequestCounters", "RequestStatistics"]


@attrs.frozen
class RequestStatistics:
    """A snapshot of the counters.

    Attributes:
        received: requests whose first byte came, ever.
        in_flight: requests by the phase they are in, now.
        outcomes: requests that ended, by outcome. `received` is always the sum of `in_flight` and `outcomes`.
        cancelled: the cancelled ones, by reason and by the phase they were struck in.
    """

    received: int
    in_flight: Mapping[Phase, int]
    outcomes: Mapping[Outcome, int]
    cancelled: Mapping[tuple[CancelReason, Phase], int]


class RequestCounters:
    """Watches the lives of clients' requests and counts them (a `LifeWatcher`)."""

    def __init__(self) -> None:
        self._received = 0
        self._in_flight = dict.fromkeys(Phase, 0)
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._cancelled: Counter[tuple[CancelReason, Phase]] = Counter()

    def life_moved(self, life: Life, left: Phase | None) -> None:
        if life.parent is not None:
            return
        if left is None:
            self._received += 1
        else:
            self._in_flight[left] -= 1
        self._in_flight[life.phase] += 1

    def work_ended(self, life: Life) -> None:
        pass

    def life_ended(self, life: Life) -> None:
        if life.parent is not None:
            return
        assert life.outcome is not None
        self._in_flight[life.phase] -= 1
        self._outcomes[life.outcome] += 1
        if life.reason is not None and life.struck is not None:
            self._cancelled[life.reason, life.struck] += 1

    def statistics(self) -> RequestStatistics:
        """How it stands, now."""
        return RequestStatistics(self._received, dict(self._in_flight), dict(self._outcomes), dict(self._cancelled))
