"""A request has one outcome, whatever the order in which things happen to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_infer.lifecycle import NEXT, OUTCOMES, CancelReason, Life, LifecycleError, Outcome, Phase
from trio_infer.observe.statistics import RequestCounters

WALKS = [
    (Phase.SENDING,),
    (Phase.RUNNING, Phase.SENDING),
    (Phase.QUEUED, Phase.RUNNING, Phase.SENDING),
    (Phase.QUEUED, Phase.SENDING),
    (Phase.RUNNING, Phase.STREAMING),
    (Phase.QUEUED, Phase.RUNNING, Phase.STREAMING),
]


ENDINGS = [
    (walk, status, outcome)
    for walk in WALKS
    for status, outcome in [
        (200, Outcome.COMPLETED),
        (404, Outcome.REJECTED),
        (408, Outcome.REJECTED),
        (500, Outcome.FAILED),
    ]
    if walk[-1] is not Phase.STREAMING or status == 200  # a stream starts as good; what fails in it is an event
]


@pytest.mark.parametrize(("walk", "status", "outcome"), ENDINGS)
def test_a_life_that_nobody_cancels_ends_as_its_status_says(
    walk: tuple[Phase, ...], status: int, outcome: Outcome
) -> None:
    life = Life()
    for phase in walk:
        life.advance(phase)
    life.status = status
    assert life.end() is outcome


def test_an_error_told_under_a_good_status_is_a_failure() -> None:
    life = Life()
    life.advance(Phase.RUNNING)
    life.advance(Phase.STREAMING)
    life.status = 200
    assert life.end(failed=True) is Outcome.FAILED


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("reason", list(CancelReason))
def test_a_cancel_decides_the_outcome_from_any_phase_and_remembers_where_it_struck(
    phase: Phase, reason: CancelReason
) -> None:
    life = Life()
    told = []
    life.canceller = told.append
    for step in next((w[: w.index(phase) + 1] for w in WALKS if phase in w), ()):
        life.advance(step)
    life.status = 200
    assert life.cancel(reason)
    assert not life.cancel(CancelReason.SHUTDOWN), "the first one counts"
    assert told == [reason]
    assert life.end() is Outcome.CANCELLED
    assert (life.reason, life.struck) == (reason, phase)
    assert (
        life.status
        == {
            CancelReason.DISCONNECTED: 499,
            CancelReason.STALLED: 499,
            CancelReason.REQUESTED: 499,
            CancelReason.SHUTDOWN: 503,
            CancelReason.UNLOADED: 503,
            CancelReason.SEQUENCE: 499,
            CancelReason.DEADLINE: 504,
        }[reason]
    )


def test_a_cancel_after_the_end_changes_nothing() -> None:
    life = Life()
    life.advance(Phase.SENDING)
    life.status = 200
    life.end()
    assert not life.cancel(CancelReason.DISCONNECTED)
    assert not life.cancelled
    assert life.outcome is Outcome.COMPLETED


def test_a_child_is_cancelled_with_its_parent_and_a_late_one_at_once() -> None:
    parent = Life()
    early = parent.child("inner")
    grandchild = early.child("innermost")
    done = parent.child("done")
    done.advance(Phase.SENDING)
    done.end()
    parent.cancel(CancelReason.DISCONNECTED)
    assert (early.reason, grandchild.reason) == (CancelReason.DISCONNECTED,) * 2
    assert not done.cancelled
    assert parent.child("late").reason is CancelReason.DISCONNECTED


def test_cancelling_a_child_leaves_its_parent_and_its_siblings_alone() -> None:
    parent = Life()
    child, sibling = parent.child("one"), parent.child("two")
    child.cancel(CancelReason.DEADLINE)
    assert not parent.cancelled
    assert not sibling.cancelled


def test_counters_count_what_clients_ask_and_not_what_models_ask_of_each_other() -> None:
    counters = RequestCounters()
    child = Life([counters]).child("inner")
    child.advance(Phase.SENDING)
    child.end()
    assert counters.statistics().received == 1
    assert counters.statistics().outcomes[Outcome.COMPLETED] == 0


def test_a_life_ends_once() -> None:
    life = Life()
    life.advance(Phase.SENDING)
    life.end()
    with pytest.raises(LifecycleError, match="can't end as completed while sending"):
        life.end()
    with pytest.raises(LifecycleError, match="can't go from sending to running"):
        life.advance(Phase.RUNNING)


@pytest.mark.parametrize("phase", [Phase.RECEIVING, Phase.QUEUED, Phase.RUNNING])
def test_a_life_can_not_end_well_before_an_answer(phase: Phase) -> None:
    life = Life()
    if phase is not Phase.RECEIVING:
        life.advance(phase)
    with pytest.raises(LifecycleError):
        life.end()


def test_the_tables_speak_of_every_phase() -> None:
    assert set(NEXT) == set(OUTCOMES) == set(Phase)


@given(st.lists(st.lists(st.sampled_from([*Phase, *CancelReason, "end"]), max_size=8), max_size=20))
def test_counters_add_up_whatever_happens(histories: list[list[object]]) -> None:
    counters = RequestCounters()
    lives = []
    for history in histories:
        life = Life([counters])
        lives.append(life)
        for move in history:
            try:
                if isinstance(move, Phase):
                    life.advance(move)
                elif isinstance(move, CancelReason):
                    life.cancel(move)
                else:
                    life.end()
            except LifecycleError:
                pass
        now = counters.statistics()
        assert now.received == len(lives) == sum(now.in_flight.values()) + sum(now.outcomes.values())
        assert sum(now.cancelled.values()) == now.outcomes[Outcome.CANCELLED]
