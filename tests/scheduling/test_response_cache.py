"""The response cache: what is the same, what is kept, and who shares a run with whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from desk import Desk, desk
from support import get, post, serving
from trio_infer import (
    ControlPolicy,
    InferError,
    InferRequest,
    Life,
    MetricsPolicy,
    Model,
    ModelRepository,
    TensorSpec,
    find_models,
)
from trio_infer.errors import ErrorCode, ModelLoadError
from trio_infer.lifecycle import CancelReason, Outcome, Phase, SharedLife, Timing
from trio_infer.models.host import NoHost
from trio_infer.models.native import NativeRunner
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.queueing import Batching, Queueing, QueuePolicy
from trio_infer.protocol.values import InferResponse, Signature
from trio_infer.scheduling import response_cache
from trio_infer.scheduling.catalog import Catalog
from trio_infer.scheduling.response_cache import PER_ARRAY, PER_ENTRY, ResponseCache, digest, owned, wait_digest
from trio_infer.scheduling.served import ServedModel

MIB = 2**20


@attrs.define(eq=False)
class Doubler(Model):
    """Takes a second; notes what it ran, and what became of it."""

    name: str = "doubler"
    instances: int | None = 1
    max_batch_size: int = 4
    batching: Batching | None = None
    queueing: Queueing | None = None
    response_cache: bool = True
    runs: list[list[float]] = attrs.field(factory=list)
    stopped: list[float] = attrs.field(factory=list)
    flags: list[Callable[[], bool]] = attrs.field(factory=list)
    buffer: Any = None

    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    async def infer(self, request: InferRequest) -> Any:
        x = request.inputs["x"]
        self.runs.append(x[:, 0].tolist())
        self.flags.append(request.is_cancelled)
        try:
            await trio.sleep(1)
        except trio.Cancelled:
            self.stopped.append(trio.current_time())
            raise
        if (x < 0).any():
            raise InferError("a negative number", ErrorCode.INTERNAL)
        if self.buffer is not None:
            self.buffer[:] = x * 2
            return {"y": self.buffer}
        return {"y": x * 2}


def looks(at: Desk) -> tuple[int, int, int, int]:
    """Successes, hits, misses, executions; and they must fit."""
    books = at.books
    assert books.success.count == books.cache_hit.count + books.cache_miss.count
    assert books.rows == books.cache_miss.count, "one row each"
    return books.success.count, books.cache_hit.count, books.cache_miss.count, books.executions


# -- What is the same -----------------------------------------------------------------------------------------------


def _request(**fields: Any) -> InferRequest:
    given = {"inputs": {"x": np.array([1, 2], "f4"), "s": np.array([b"ab", b"c"], object)}, **fields}
    return InferRequest("m", "1", **given)


SAME = [
    {"id": "another"},
    {"timeout": 5, "parameters": {"timeout": 5, "priority": 2}},
    {"inputs": {"s": np.array([b"ab", b"c"], object), "x": np.array([1, 9, 2, 9], "f4")[::2]}},
]
OTHER = [
    {"inputs": {"x": np.array([1, 2], "f4"), "s": np.array([b"a", b"bc"], object)}},
    {"inputs": {"x": np.array([1, 2], "f4"), "s": np.array([[b"ab", b"c"]], object)}},
    {"inputs": {"x": np.array([1, 2], "f4")}},
    {"inputs": {"x": np.array([1, 2], "i4"), "s": np.array([b"ab", b"c"], object)}},
    {"inputs": {"x": np.array([[1], [2]], "f4"), "s": np.array([b"ab", b"c"], object)}},
    {"inputs": {"s": np.array([1, 2], "f4"), "x": np.array([b"ab", b"c"], object)}},
    {"requested_outputs": ("y",)},
    {"requested_outputs": ("y", "z")},
    {"parameters": {"temperature": 1}},
    {"parameters": {"temperature": 1.0}},
    {"parameters": {"temperature": True}},
    {"parameters": {"temperature": "1"}},
    {"parameters": {"temperature": "1", "y": ""}},
]


def test_requests_are_the_same_if_their_answers_must_be() -> None:
    assert {digest(_request(**fields)) for fields in SAME} == {digest(_request())}
    assert digest(_request(requested_outputs=("y", "z"))) == digest(_request(requested_outputs=("z", "y", "z")))
    assert len({digest(_request(**fields)) for fields in [{}, *OTHER]}) == len(OTHER) + 1


ARRAYS = st.one_of(
    st.lists(st.binary(max_size=3), max_size=4).map(lambda items: np.array([*items, None], object)[:-1]),
    st.lists(st.integers(0, 3), max_size=4).map(lambda items: np.array(items, "u1")),
    st.lists(st.integers(0, 3), max_size=4).map(lambda items: np.array(items, "f4").reshape(-1, 1)),
)


@given(*[st.dictionaries(st.sampled_from(["a", "b", "ab"]), ARRAYS, max_size=2)] * 2)
def test_two_digests_are_equal_when_the_inputs_are_and_only_then(one: Any, other: Any) -> None:
    def plain(inputs: Any) -> Any:
        return {name: (array.dtype.str, array.shape, array.tolist()) for name, array in inputs.items()}

    same = digest(_request(inputs=one)) == digest(_request(inputs=other))
    assert same is (plain(one) == plain(other))


async def test_large_requests_are_hashed_in_a_thread(monkeypatch: Any) -> None:
    threads = []

    def note(request: InferRequest) -> bytes:
        threads.append(trio.lowlevel.in_trio_task())
        return digest(request)

    monkeypatch.setattr(response_cache, "digest", note)
    for array in (np.zeros(10), np.zeros(100_000), np.full(10, b"abc", object), np.full(5000, b"", object)):
        await wait_digest(_request(inputs={"x": array}))
    assert threads == [True, False, True, False]


# -- What is kept ---------------------------------------------------------------------------------------------------

SIGNATURE = Signature("m", "1", (), (TensorSpec("y", "FP32", [-1]),))


def _response(floats: int, value: float = 0.0) -> InferResponse:
    return owned(InferResponse({"y": np.full(floats, value, "f4")}), _request(), SIGNATURE)


def test_the_longest_unused_answers_make_room_and_one_that_is_too_large_makes_none() -> None:
    each = PER_ENTRY + PER_ARRAY + 400
    cache = ResponseCache(3 * each)
    keys = [("m", bytes([n])) for n in range(5)]
    for key in keys[:3]:
        assert cache.put(key, _response(100))
    assert cache.find(keys[0]) is not None
    assert cache.put(keys[3], _response(100))
    assert [key in cache for key in keys] == [True, False, True, True, False]
    assert not cache.put(keys[4], _response(MIB))
    assert cache.put(keys[0], _response(200)), "in place of the old one, and then it takes two to make room"
    assert [key in cache for key in keys] == [True, False, False, True, False]
    statistics = cache.statistics()
    assert (statistics.entries, statistics.used, statistics.evicted) == (2, 2 * each + 400, 2)
    assert (statistics.hits, statistics.misses, statistics.too_large) == (1, 0, 1)
    cache.drop("m")
    assert (cache.statistics().entries, cache.statistics().used) == (0, 0)


class CacheMachine(RuleBasedStateMachine):
    """Against a list in the order of use."""

    KEYS = st.tuples(st.sampled_from("mn"), st.binary(max_size=1).filter(lambda b: b < b"4"))

    def __init__(self) -> None:
        super().__init__()
        self.cache = ResponseCache(4000)
        self.model: list[tuple[Any, int]] = []

    @rule(key=KEYS, floats=st.integers(0, 1000))
    def put(self, key: Any, floats: int) -> None:
        size = PER_ENTRY + PER_ARRAY + 4 * floats
        kept = self.cache.put(key, _response(floats))
        assert kept is (size <= 4000)
        if kept:
            self.model = [entry for entry in self.model if entry[0] != key]
            while sum(size for _, size in self.model) + size > 4000:
                self.model.pop(0)
            self.model.append((key, size))

    @rule(key=KEYS)
    def find(self, key: Any) -> None:
        found = next((entry for entry in self.model if entry[0] == key), None)
        assert (self.cache.find(key) is not None) is (found is not None)
        if found is not None:
            self.model.remove(found)
            self.model.append(found)

    @rule(name=st.sampled_from("mn"))
    def drop(self, name: str) -> None:
        self.cache.drop(name)
        self.model = [entry for entry in self.model if entry[0][0] != name]

    @invariant()
    def balances(self) -> None:
        statistics = self.cache.statistics()
        assert statistics.entries == len(self.model)
        assert statistics.used == sum(size for _, size in self.model) <= 4000


test_the_cache_keeps_what_was_used_last = CacheMachine.TestCase
test_the_cache_keeps_what_was_used_last.settings = settings(max_examples=50, stateful_step_count=30)


async def test_a_second_request_is_answered_at_once_and_counts_as_a_hit(autojump_clock: Any) -> None:
    cache = ResponseCache(MIB)
    async with desk(NativeRunner(model := Doubler()), cache=cache) as at:
        first = await at.asked([1])
        await first.done.wait()
        again, other = await at.asked([1], id="mine", parameters={"priority": 1}), await at.asked([2])
        assert again.done.is_set(), "while the only instance is busy"
    assert [guest.values for guest in (first, again, other)] == [[[2]], [[2]], [[4]]]
    assert model.runs == [[1], [2]]
    assert looks(at) == (3, 1, 2, 2)
    assert (cache.statistics().hits, cache.statistics().misses, cache.statistics().joined) == (1, 2, 0)
    assert at.books.cache_hit.ns > 0
    assert at.books.cache_miss.ns > 0


async def test_an_answer_stays_as_it_was_whatever_the_model_or_a_client_does_to_it(autojump_clock: Any) -> None:
    model = Doubler(buffer=np.zeros((1, 1), "f4"))
    async with desk(NativeRunner(model), cache=ResponseCache(MIB)) as at:
        for value in (1, 2):
            await (await at.asked([value])).done.wait()
        again = await at.asked([1])
        (array,) = again.responses[0].outputs.values()
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 7
    assert again.values == [[2]]


async def test_a_model_that_is_not_to_be_cached_or_has_no_cache_runs_each_time(autojump_clock: Any) -> None:
    for model, cache in ((Doubler(response_cache=False), ResponseCache(MIB)), (Doubler(), None)):
        async with desk(NativeRunner(model), cache=cache) as at:
            assert not at.model.cached
            for _ in range(2):
                await at.asked([1])
        assert model.runs == [[1], [1]]
        assert (at.books.cache_hit.count, at.books.cache_miss.count) == (0, 0)


async def test_errors_are_told_to_all_and_not_kept(autojump_clock: Any) -> None:
    cache = ResponseCache(MIB)
    async with desk(NativeRunner(model := Doubler()), cache=cache) as at:
        guests = [await at.asked([-1]) for _ in range(3)]
        await guests[0].done.wait()
        again = await at.asked([-1])
    assert model.runs == [[-1], [-1]]
    for guest in (*guests, again):
        assert isinstance(guest.error, InferError)
        assert (guest.error.message, guest.life.outcome) == ("a negative number", Outcome.FAILED)
    assert cache.statistics().entries == 0
    assert (at.books.executions, at.books.cache_hit.count, at.books.cache_miss.count) == (2, 0, 0)
    assert {reason.value: n for reason, n in at.books.failures.items() if n} == {"BACKEND": 4}


def test_models_whose_answers_are_not_a_matter_of_their_request_are_not_loaded() -> None:
    class Streams(Doubler):
        async def infer(self, request: InferRequest) -> Any:
            yield {}

    async def load(model: Model) -> None:
        await ServedModel(NativeRunner(model), ResponseCache(MIB)).load(NoHost())

    with pytest.raises(ModelLoadError, match="does not currently support model doubler with 'decoupled' transaction"):
        trio.run(load, Streams())


# -- Who shares a run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [0, 1, 2])
@pytest.mark.parametrize("busy", [False, True], ids=["running", "queued"])
async def test_one_run_is_for_all_who_ask_the_same_and_goes_on_without_any_of_them(
    autojump_clock: Any, leaver: int, busy: bool
) -> None:
    async with desk(NativeRunner(model := Doubler()), cache=ResponseCache(MIB)) as at:
        if busy:
            await at.asked([9])
        guests = [await at.asked([1]) for _ in range(3)]
        assert {guest.life.phase for guest in guests} == {Phase.QUEUED if busy else Phase.RUNNING}
        assert at.model.statistics().waiting == int(busy)
        await trio.sleep(0.5)
        guests[leaver].leave()
        await trio.testing.wait_all_tasks_blocked()
        assert guests[leaver].life.outcome is Outcome.CANCELLED
        assert at.books.pending == (2 if busy else 0)
        assert not any(flag() for flag in model.flags)
    stayed = [guest for guest in guests if guest is not guests[leaver]]
    assert [guest.values for guest in stayed] == [[[2]]] * 2
    assert model.runs == ([[9], [1]] if busy else [[1]])
    assert model.stopped == []
    assert looks(at) == (2 + busy, 1, 1 + busy, 1 + busy)
    assert at.books.compute_by_outcome["cancelled"] == at.books.compute_by_outcome["wasted"] == 0


@pytest.mark.parametrize("busy", [False, True], ids=["running", "queued"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
async def test_the_last_one_to_leave_stops_the_run_in_that_instant(
    autojump_clock: Any, busy: bool, order: tuple[int, ...]
) -> None:
    cache = ResponseCache(MIB)
    async with desk(NativeRunner(model := Doubler()), cache=cache) as at:
        if busy:
            await at.asked([9])
        guests = [await at.asked([1]) for _ in range(3)]
        for index in order:
            await trio.sleep(0.1)
            guests[index].leave()
        assert at.model.statistics().waiting == 0
        assert model.flags[-1]() is not busy
        await trio.testing.wait_all_tasks_blocked()
        again = await at.asked([1])
        assert not again.done.is_set()
    assert model.stopped == ([] if busy else [pytest.approx(0.3)])
    assert again.values == [[2]]
    assert model.runs == ([[9], [1]] if busy else [[1], [1]])
    assert [guest.life.outcome for guest in guests] == [Outcome.CANCELLED] * 3
    assert looks(at) == (1 + busy, 0, 1 + busy, 2)
    assert bool(at.books.compute_by_outcome["cancelled"]) is not busy, "the run is the last one's"


async def test_who_asks_in_the_tick_in_which_the_last_one_leaves_gets_a_run_of_their_own(autojump_clock: Any) -> None:
    async with desk(NativeRunner(model := Doubler()), cache=ResponseCache(MIB)) as at:
        first = await at.asked([1])
        next_one = at.ask([1])
        first.leave()
        await next_one.done.wait()
        gone = at.ask([5])
        gone.leave()
        last = at.ask([5])
    assert (next_one.values, last.values) == ([[2]], [[10]])
    assert model.runs == [[1], [1], [5]]


async def test_a_result_that_comes_after_the_cancel_is_not_kept(autojump_clock: Any) -> None:
    class Deaf(Doubler):
        async def infer(self, request: InferRequest) -> Any:
            self.runs.append([0])
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
            return {"y": request.inputs["x"]}

    cache = ResponseCache(MIB)
    async with desk(NativeRunner(model := Deaf(instances=None)), cache=cache) as at:
        first = await at.asked([1])
        first.leave()
        again = await at.asked([1])
        again.leave()
    assert len(model.runs) == 2
    assert cache.statistics().entries == 0


async def test_a_member_of_a_batch_may_be_a_run_for_several(autojump_clock: Any) -> None:
    async with desk(NativeRunner(model := Doubler(batching=Batching())), cache=ResponseCache(MIB)) as at:
        await at.asked([0])
        guests = [await at.asked([value]) for value in (1, 1, 2, 2)]
        guests[0].leave()
        await trio.sleep(1.5)
        guests[2].leave()
        guests[3].leave()
    assert model.runs == [[0], [1, 2]]
    assert guests[1].values == [[2]]
    assert looks(at) == (2, 0, 2, 2)
    assert sorted(at.books.batches) == [1, 2]


async def test_each_has_its_own_deadline_and_its_own_patience_in_the_queue(autojump_clock: Any) -> None:
    async with desk(NativeRunner(model := Doubler()), cache=ResponseCache(MIB)) as at:
        await at.asked([9])
        hasty, patient, second_hasty = [await at.asked([1], timeout=timeout) for timeout in (300_000, 0, 400_000)]
        late = await at.asked([1])
        await trio.sleep(0.5)
        late.leave(CancelReason.DEADLINE)
    for guest, when in ((hasty, 0.3), (second_hasty, 0.4)):
        assert isinstance(guest.error, InferError)
        assert guest.error.message == "Request timeout expired"
        assert guest.ended_at == pytest.approx(when)
    assert (late.life.outcome, late.life.status) == (Outcome.CANCELLED, 504)
    assert patient.values == [[2]]
    assert model.runs == [[9], [1]]


async def test_when_all_have_lost_their_patience_the_run_leaves_the_queue(autojump_clock: Any) -> None:
    async with desk(NativeRunner(model := Doubler()), cache=ResponseCache(MIB)) as at:
        await at.asked([9])
        guests = [await at.asked([1], timeout=timeout) for timeout in (300_000, 400_000)]
        await guests[1].done.wait()
        assert at.model.statistics().waiting == 0
        assert trio.current_time() == pytest.approx(0.4)
    assert [str(guest.error) for guest in guests] == ["Request timeout expired"] * 2
    assert model.runs == [[9]]


async def test_a_run_has_the_best_priority_of_those_it_is_for(autojump_clock: Any) -> None:
    queueing = Queueing(priority_levels=3, default_priority_level=3)
    async with desk(NativeRunner(model := Doubler(queueing=queueing)), cache=ResponseCache(MIB)) as at:
        for value, priority in ((9, 1), (1, 3), (2, 2), (1, 1), (2, 3)):
            await at.asked([value], parameters={"priority": priority})
    assert model.runs == [[9], [1], [2]]


async def test_a_full_queue_refuses_what_is_new_to_it_only(autojump_clock: Any) -> None:
    queueing = Queueing(QueuePolicy(max_queue_size=1))
    async with desk(NativeRunner(Doubler(queueing=queueing)), cache=ResponseCache(MIB)) as at:
        await (await at.asked([1])).done.wait()
        running, waiting = await at.asked([2]), await at.asked([3])
        welcome = [await at.asked([value]) for value in (1, 2, 3)]
        refused = await at.asked([4])
    assert [guest.values for guest in (running, waiting, *welcome)] == [[[4]], [[6]], [[2]], [[4]], [[6]]]
    assert str(refused.error).startswith("Exceeds maximum queue size")


async def test_answers_keep_the_order_in_which_requests_came_hits_included(autojump_clock: Any) -> None:
    batching = Batching(preserve_ordering=True)
    async with desk(NativeRunner(Doubler(batching=batching)), cache=ResponseCache(MIB)) as at:
        await (await at.asked([1])).done.wait()
        later, hit = await at.asked([2]), await at.asked([1])
        assert not hit.done.is_set()
    assert at.order[1:] == [later, hit]


async def test_a_task_that_is_cancelled_from_outside_leaves_like_a_client(autojump_clock: Any) -> None:
    async with desk(NativeRunner(model := Doubler()), cache=ResponseCache(MIB)) as at:
        life, nobody = Life(), trio.Event()

        async def keep(response: InferResponse) -> None:
            nobody.set()

        with trio.move_on_after(0.5):
            await at.model.infer(life, InferRequest("doubler", "1", {"x": np.array([[1]], "f4")}), keep)
    assert model.stopped == [pytest.approx(0.5)]
    assert not nobody.is_set()


async def test_what_is_kept_goes_with_the_model_or_with_what_its_steps_ask(autojump_clock: Any) -> None:
    cache, catalog = ResponseCache(MIB), Catalog()

    class Ensemble(NativeRunner):
        requires = ("step",)

    models = [
        ServedModel(Ensemble(Doubler()), cache),
        ServedModel(NativeRunner(Doubler(name="step")), cache),
        ServedModel(NativeRunner(Doubler(name="other")), cache),
    ]
    async with trio.open_nursery() as nursery:
        for model in models:
            await model.load(NoHost())
            catalog.publish(model.signature.name, [model])
        desks = [Desk(model, nursery) for model in models]
        for at in desks:
            await (await at.asked([1])).done.wait()
        assert cache.statistics().entries == 3
        running = await desks[0].asked([2])
        heir = ServedModel(NativeRunner(Doubler(name="step")), cache)
        await heir.load(NoHost())
        catalog.publish("step", [heir])
        models[1].forget()
        fresh = await desks[0].asked([2])
        assert (await desks[2].asked([1])).done.is_set()
        redirected = await desks[1].asked([1])
        assert not redirected.done.is_set(), "what took its place has no answer yet"
    assert (running.values, fresh.values, redirected.values) == ([[4]], [[4]], [[2]])
    assert cache.statistics().entries == 3, "other's 1, the ensemble's 2 once, the heir's 1"


async def test_one_that_was_hashed_while_its_model_went_goes_to_what_took_its_place(autojump_clock: Any) -> None:
    cache = ResponseCache(MIB)
    old, new = (ServedModel(NativeRunner(Doubler(instances=n)), cache) for n in (1, 2))
    catalog = Catalog()
    for model in (old, new):
        await model.load(NoHost())
    catalog.publish("doubler", [old])
    async with trio.open_nursery() as nursery:
        at = Desk(old, nursery)
        guest = at.ask(np.zeros(100_000))
        await trio.lowlevel.checkpoint()
        catalog.publish("doubler", [new])
    assert len(guest.values[0]) == 100_000
    assert old.statistics().running == 0
    await old.settled()


# -- A life for several ---------------------------------------------------------------------------------------------


class SharedMachine(RuleBasedStateMachine):
    """Guests come, leave and lose interest while one run waits, runs and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.guests = [Life()]
        self.there = [self.guests[0]]
        self.shared = SharedLife(self.guests[0])
        self.stops: list[CancelReason] = []
        self.shared.canceller = self.stops.append
        self.timing: Timing | None = None

    def alive(self) -> bool:
        return not self.stops and not self.shared.over

    @precondition(alive)
    @rule()
    def come(self) -> None:
        guest = Life()
        self.guests.append(guest)
        self.there.append(guest)
        self.shared.join(guest)

    @precondition(alive)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["cancel", "leave"]))
    def go(self, which: int, how: str) -> None:
        guest = self.there.pop(which % len(self.there))
        if how == "cancel":
            guest.cancel(CancelReason.DISCONNECTED)
        self.shared.leave(guest)

    @precondition(lambda self: self.alive() and self.shared.phase in (Phase.RECEIVING, Phase.QUEUED))
    @rule()
    def go_on(self) -> None:
        after = {Phase.RECEIVING: Phase.QUEUED, Phase.QUEUED: Phase.RUNNING}
        self.shared.advance(after[self.shared.phase])
        if self.shared.phase is Phase.RUNNING:
            self.timing = self.shared.timing = Timing()

    @precondition(lambda self: self.alive() and self.shared.phase is Phase.RUNNING)
    @rule()
    def end(self) -> None:
        self.shared.over = True
        while self.there:
            self.shared.leave(self.there.pop())

    @precondition(lambda self: not self.alive())
    @rule()
    def nothing_more_happens(self) -> None:
        for guest in self.guests:
            self.shared.leave(guest)

    @invariant()
    def is_stopped_once_and_only_when_nobody_is_there(self) -> None:
        assert len(self.stops) == (0 if self.there or self.shared.over else 1)
        assert self.shared.cancelled is bool(self.stops)

    @invariant()
    def is_where_its_guests_are(self) -> None:
        assert all(guest.phase is self.shared.phase for guest in self.there)

    @invariant()
    def is_in_one_guests_books(self) -> None:
        bearers = [guest for guest in self.guests if guest.timing is not None]
        assert [guest.timing for guest in bearers] == ([] if self.timing is None else [self.timing])
        if self.there and bearers:
            assert bearers == self.there[:1]


test_a_shared_life_ends_with_the_last_of_those_it_is_for = SharedMachine.TestCase
test_a_shared_life_ends_with_the_last_of_those_it_is_for.settings = settings(max_examples=100, stateful_step_count=20)


# -- Over real sockets ----------------------------------------------------------------------------------------------


def _ask(value: float) -> bytes:
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}
    return post("doubler", "infer", document)


async def test_clients_that_ask_the_same_share_a_run_until_all_have_hung_up() -> None:
    gate, gone = trio.Event(), trio.Event()

    class Gated(Doubler):
        async def infer(self, request: InferRequest) -> Any:
            self.runs.append(request.inputs["x"][:, 0].tolist())
            try:
                await gate.wait()
            except trio.Cancelled:
                gone.set()
                raise
            return {"y": request.inputs["x"] * 2}

    model = Gated()
    with trio.fail_after(10):
        async with serving(model, response_cache=MIB) as served:
            clients = [await served.connect() for _ in range(3)]
            for client in clients:
                await client.send(_ask(1))
            await trio.testing.wait_all_tasks_blocked(0.05)
            cache = served.server.statistics().cache
            assert cache is not None
            assert (cache.misses, cache.joined) == (1, 2)
            await clients[0].close()
            await served.ended(1)
            assert not gone.is_set()
            await clients[1].reset()
            await clients[2].close()
            await served.ended(3)
            await gone.wait()
            gate.set()
            client = await served.connect()
            answers = [await client.ask(_ask(1)) for _ in range(2)]
            assert [answer.json["outputs"][0]["data"] for answer in answers] == [[2], [2]]
            stats = (await client.ask(get("/v2/models/doubler/stats"))).json
            await client.close()
    counted = stats["model_stats"][0]["inference_stats"]
    assert (counted["cache_hit"]["count"], counted["cache_miss"]["count"], counted["success"]["count"]) == (1, 1, 2)
    assert counted["fail"]["count"] == 3
    assert len(model.runs) == 2


CACHED = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            pb_utils.Logger.log_info(f"asked {tensor[0]}")
            while tensor[0] > 100 and not request.is_cancelled():
                time.sleep(0.002)
            if request.is_cancelled():
                pb_utils.Logger.log_info("cancelled")
                error = pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            words = np.array([b"a\\0", b"bc"], object)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", tensor * 2), pb_utils.Tensor("WORDS", words)
            ]))
        return responses
"""
CACHED_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "WORDS" data_type: TYPE_STRING dims: [ -1 ] }
response_cache { enable: true }
"""
ASKING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = [pb_utils.get_input_tensor_by_name(request, "IN")]
            asked = pb_utils.InferenceRequest(model_name="cached", inputs=inputs, requested_output_names=["OUT"])
            answer = asked.exec()
            out = pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
            out += 1  # it may
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""
ASKING_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def _write(root: Path, name: str, code: str, config: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    (root / name / "1" / "model.py").write_text(code)


def _infer(model: str, *values: float) -> bytes:
    document = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": list(values)}]}
    return post(model, "infer", document)


@pytest.mark.parametrize("execution", ["process", "thread"])
async def test_a_triton_model_is_cached_for_clients_and_for_models_and_its_is_cancelled_waits_for_the_last(
    tmp_path: Path, execution: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    _write(tmp_path, "cached", CACHED, CACHED_CONFIG)
    _write(tmp_path, "asking", ASKING, ASKING_CONFIG)
    models = find_models([tmp_path], execution=execution)
    with trio.fail_after(20):
        async with serving(*models, response_cache=MIB, metrics=MetricsPolicy()) as served:
            client = await served.connect()
            answers = [await client.ask(_infer("cached", 1, 2)) for _ in range(2)]
            assert answers[0].json == answers[1].json
            assert [output["data"] for output in answers[0].json["outputs"]] == [[2, 4], ["a\0", "bc"]]
            for _ in range(2):
                assert (await client.ask(_infer("asking", 1, 2))).json["outputs"][0]["data"] == [3, 5]
            assert (await client.ask(_infer("cached", 1, 2))).json == answers[0].json
            assert caplog.text.count("asked 1.0") == 2, "once for both outputs, once for one of them"

            leavers = [await served.connect() for _ in range(2)]
            for leaver in leavers:
                await leaver.send(_infer("cached", 1000))
            await trio.testing.wait_all_tasks_blocked(0.1)
            await leavers[0].close()
            await served.ended(6)
            assert "cancelled" not in caplog.messages
            await leavers[1].close()
            await served.ended(7)
            assert (await client.ask(_infer("cached", 3))).status == 200, "the instance is free"
            assert caplog.text.count("asked 1000.0") == 1
            assert "cancelled" in caplog.text
            config = (await client.ask(get("/v2/models/cached/config"))).json
            assert config["response_cache"] == {"enable": True}
            lines = (await client.ask(get("/metrics"))).body.decode().splitlines()
            await client.close()
    assert 'nv_cache_num_hits_per_model{model="cached",version="1"} 3' in lines
    assert 'nv_cache_num_misses_per_model{model="cached",version="1"} 3' in lines
    assert not any(line.startswith("nv_cache") and "asking" in line for line in lines)


async def test_a_model_that_is_replaced_takes_its_answers_with_it(tmp_path: Path) -> None:
    _write(tmp_path, "cached", CACHED, CACHED_CONFIG)
    repository = ModelRepository([tmp_path], execution="thread")
    control = ControlPolicy(model_control_mode="explicit", load_model=("cached",))
    async with serving(memory=True, repository=repository, control=control, response_cache=MIB) as served:
        client = served.connect_in_memory()
        assert (await client.ask(_infer("cached", 1))).json["outputs"][0]["data"] == [2]
        (tmp_path / "cached" / "1" / "model.py").write_text(CACHED.replace("tensor * 2", "tensor * 3"))
        load = b"POST /v2/repository/models/cached/load HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n"
        assert (await client.ask(load)).status == 200
        for _ in range(2):
            assert (await client.ask(_infer("cached", 1))).json["outputs"][0]["data"] == [3]
        cache = served.server.statistics().cache
        assert cache is not None
        assert (cache.entries, cache.hits) == (1, 1)
        assert (await client.ask(load.replace(b"/load", b"/unload"))).status == 200
        cache = served.server.statistics().cache
        assert cache is not None
        assert (cache.entries, cache.used) == (0, 0)


async def test_a_model_that_is_to_be_cached_by_a_server_without_a_cache_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(Doubler(), memory=True):
        assert "model 'doubler' is to be cached, and there is no response cache" in caplog.text


@pytest.mark.parametrize(
    ("extra", "line", "words"),
    [
        ("model_transaction_policy { decoupled: true }\n", 8, "with 'decoupled' transaction policy"),
        ("sequence_batching {}\n", 8, "with `sequence_batching`, where an answer depends on what was asked before"),
    ],
)
def test_configurations_that_can_not_be_cached_are_refused_with_their_line(extra: str, line: int, words: str) -> None:
    config = extra + "max_batch_size: 1\n" + CACHED_CONFIG
    with pytest.raises(ModelLoadError) as caught:
        ModelConfig.parse(config, name="m", where=Path("config.pbtxt"))
    assert f"Response Cache does not currently support model m {words}" in str(caught.value)
    assert f"config.pbtxt:{line})" in str(caught.value)
