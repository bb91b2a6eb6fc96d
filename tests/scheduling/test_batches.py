"""The dynamic batcher's decision, as a table: who waits, and who runs."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_infer.protocol.queueing import Batching
from trio_infer.scheduling.batches import plan


@attrs.frozen
class Waits:
    rows: int = 1
    shapes: Any = "a"
    entered: float = 0.0


ONE, TWO, THREE, OTHER = Waits(), Waits(2), Waits(3), Waits(shapes="b")


@pytest.mark.parametrize(
    ("preferred", "delay", "line", "now", "runs", "until"),
    [
        ((), 0, [], 0, 0, None),
        ((), 0, [ONE], 0, 1, None),
        ((), 0, [ONE] * 9, 0, 8, None),
        ((), 5, [ONE] * 7, 0, 0, 5),
        ((), 5, [ONE] * 7, 5, 7, None),
        ((), 5, [ONE] * 8, 0, 8, None),
        ((), 5, [THREE, THREE, THREE], 0, 2, None),  # the third doesn't fit, so it can't grow
        ((), 5, [ONE, OTHER], 0, 1, None),
        ((), 5, [OTHER, ONE, OTHER], 0, 1, None),  # nobody is passed over
        ((4,), 5, [ONE] * 3, 0, 0, 5),
        ((4,), 5, [ONE] * 6, 0, 4, None),
        ((2, 6), 0, [ONE] * 5, 0, 2, None),  # nobody waits: the preferred size on the way
        ((2, 6), 5, [ONE] * 5, 0, 0, 5),
        ((2, 6), 5, [ONE] * 5, 5, 5, None),
        ((), 0, [Waits(entered=3)], 0, 1, None),  # and the clock isn't even read
        ((4,), 0, [Waits(7), ONE], 0, 1, None),  # by itself it may be of any size
        ((), 5, [Waits(entered=3), Waits(entered=1)], 0, 0, 6),  # the oldest one counts, not the first
    ],
)
def test_what_a_free_instance_does(
    preferred: tuple[int, ...], delay: float, line: list[Waits], now: float, runs: int, until: float | None
) -> None:
    found = plan(line, Batching(preferred, delay), 8, now)
    assert len(found.batch) == runs
    assert list(found.batch) == line[:runs]
    assert found.until == (float("inf") if until is None else until)


@given(
    st.lists(st.builds(Waits, st.integers(1, 8), st.sampled_from("ab"), st.floats(0, 9))),
    st.sets(st.integers(1, 8)),
    st.floats(0, 9),
    st.floats(0, 20),
)
def test_a_batch_is_the_head_of_the_line_within_bounds_and_nobody_waits_beyond_the_delay(
    line: list[Waits], preferred: set[int], delay: float, now: float
) -> None:
    found = plan(line, Batching(tuple(sorted(preferred)), delay), 8, now)
    batch = list(found.batch)
    assert batch == line[: len(batch)]
    assert len({each.shapes for each in batch}) <= 1
    assert len(batch) <= 1 or sum(each.rows for each in batch) <= (max(preferred) if preferred else 8)
    if line and not batch:
        assert now < found.until <= min(each.entered for each in line[:1]) + delay


def test_what_it_costs_depends_on_the_batch_and_not_on_the_line() -> None:
    endless = repeat(ONE)
    assert len(plan(endless, Batching(), 8, 0).batch) == 8
