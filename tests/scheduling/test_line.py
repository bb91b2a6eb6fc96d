"""The line: its order, against a list that is sorted anew each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_infer.scheduling.line import Line

STEPS = st.lists(st.tuples(st.sampled_from(["enter", "delay", "leave"]), st.integers(0, 3), st.integers(0, 12)))


@given(STEPS)
def test_the_order_is_by_level_then_by_patience_then_by_arrival(steps: list[tuple[str, int, int]]) -> None:
    line: Line[int] = Line()
    model: list[tuple[int, bool, int, int]] = []  # level, delayed, when, who
    for when, (step, level, who) in enumerate(steps):
        there = next((entry for entry in model if entry[3] == who), None)
        if step == "enter" and there is None:
            line.enter(level, who)
            model.append((level, False, when, who))
        elif step == "delay" and there is not None and not there[1]:
            line.delay(there[0], who)
            model[model.index(there)] = (there[0], True, when, who)
        elif step == "leave":
            found = line.leave(level if there is None else there[0], who)
            assert found is (there is not None)
            if there is not None:
                model.remove(there)
        assert list(line) == [entry[3] for entry in sorted(model)]
        assert len(line) == len(model)
        assert [line.size(number) for number in range(4)] == [
            sum(entry[0] == number for entry in model) for number in range(4)
        ]
