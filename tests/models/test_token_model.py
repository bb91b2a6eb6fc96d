"""Token loops: who is in which step, what a departure changes, and that nobody else notices."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from desk import EXAMPLES, Guest, desk
from support import post, serving
from trio_infer import (
    Active,
    Generation,
    InferError,
    InferRequest,
    ModelLoadError,
    Outcome,
    Prompt,
    Queueing,
    QueuePolicy,
    TensorSpec,
    TokenModel,
)
from trio_infer.lifecycle import Life
from trio_infer.models.host import NoHost
from trio_infer.models.repository import find_models
from trio_infer.models.token_runner import ROOM, TokenRunner, portions
from trio_infer.protocol.values import Array, InferResponse
from trio_infer.scheduling.served import ServedModel


@attrs.define(eq=False)
class Counter(TokenModel):
    """Counts on from the last token of the prompt, in a row for each slot; notes who was in which call."""

    name: str = "counter"
    max_slots: int = 2
    prefill_budget: int = 100
    chunked: bool = False
    threaded: bool = False
    end_token: int | None = None
    queueing: Queueing | None = None
    on_disconnect: Any = None
    rows: dict[int, list[int]] = attrs.field(factory=dict)
    prefills: list[list[tuple[int, int]]] = attrs.field(factory=list)
    steps: list[list[int]] = attrs.field(factory=list)

    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("token", "INT32", [1]),)

    def start(self, request: InferRequest) -> Prompt:
        x = request.inputs["x"]
        if x[0] < 0:
            raise InferError("no negative numbers")
        return Prompt(x[1:].astype(int).tolist(), max_tokens=int(x[0]))

    def prefill(self, generations: Sequence[Generation]) -> Array:
        self.prefills.append([(generation.prefilled, generation.upto) for generation in generations])
        for generation in generations:
            if generation.prefilled == 0:
                self.rows[generation.slot] = []
            self.rows[generation.slot] += generation.prompt[generation.prefilled : generation.upto].tolist()
            if 666 in self.rows[generation.slot]:
                raise ValueError("a bad prompt")
        return np.array([self.rows[generation.slot][-1] + 1 for generation in generations])

    def step(self, active: Active) -> Array:
        self.steps.append(active.slots.tolist())
        for slot, token, position in zip(active.slots, active.tokens, active.positions, strict=True):
            self.rows[slot].append(int(token))
            assert len(self.rows[slot]) == position + 1
            if token == 1013:
                raise ValueError("an unlucky number")
        return np.array([self.rows[slot][-1] + 1 for slot in active.slots])


def tokens(guest: Guest) -> list[int]:
    return [int(response.outputs["token"][0]) for response in guest.responses]


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_requests_share_steps_and_each_gets_the_tokens_it_would_get_alone() -> None:
    model = Counter()
    async with desk(TokenRunner(model)) as at:
        first, second = at.ask(5, 10), at.ask(3, 20, 21)
    assert tokens(first) == [11, 12, 13, 14, 15]
    assert tokens(second) == [22, 23, 24]
    assert [len(step) for step in model.steps] == [2, 2, 1, 1]
    assert at.books.first_response.total > 0


async def test_who_waits_takes_over_a_slot_at_the_next_step() -> None:
    model = Counter(max_slots=1)
    async with desk(TokenRunner(model)) as at:
        guests = [await at.asked(n, 10 * n) for n in (3, 2, 1)]
    assert [tokens(guest) for guest in guests] == [[31, 32, 33], [21, 22], [11]]
    assert model.steps == [[0]] * 3
    assert len(model.prefills) == 3


@attrs.define(eq=False)
class Gated(Counter):
    """Each call waits, in its thread, until the test lets it go on."""

    threaded: bool = True
    entered: queue.Queue[str] = attrs.field(factory=queue.Queue)
    gate: queue.Queue[None] = attrs.field(factory=queue.Queue)

    def prefill(self, generations: Sequence[Generation]) -> Array:
        self.wait("prefill")
        return super().prefill(generations)

    def step(self, active: Active) -> Array:
        self.wait(f"step {active.slots.tolist()}")
        return super().step(active)

    def wait(self, call: str) -> None:
        self.entered.put(call)
        self.gate.get(timeout=20)

    async def during(self, call: str) -> None:
        """Return while that call is going on."""
        with trio.fail_after(20):
            assert await trio.to_thread.run_sync(self.entered.get, abandon_on_cancel=True) == call

    def go(self) -> None:
        self.gate.put(None)


async def test_the_effect_of_a_departure_in_each_phase() -> None:
    model = Gated(max_slots=2)
    async with desk(TokenRunner(model)) as at:
        stays, leaves = await at.asked(6, 100), await at.asked(6, 200)
        queued, heir = await at.asked(6, 300), await at.asked(2, 400)
        await model.during("prefill")  # of the first alone: it was there first
        queued.leave()
        assert at.model.statistics().waiting == 1, "gone in that instant"
        model.go()
        for call in ("step [0]", "prefill"):
            await model.during(call)
            model.go()
        await model.during("step [0, 1]")
        leaves.leave()
        await leaves.done.wait()
        assert at.model.statistics().abandoned == 1, "its slot is in use until the step is over"
        assert heir.life.timing is None
        model.go()
        await model.during("prefill")
        assert model.rows[1] == [200, 201], "its token went nowhere"
        model.go()
        await model.during("step [0, 1]")  # the heir is in the slot, at the next step
        model.go()
        await heir.done.wait()
        await model.during("step [0]")
        stays.leave()
        await stays.done.wait()
        model.go()
        with trio.fail_after(20):
            await at.model.settled()
        await settle()
    assert tokens(heir) == [401, 402]
    assert tokens(stays) == [101, 102, 103, 104]
    assert tokens(leaves) == [201]
    assert queued.responses == []
    runner = at.model._runner
    assert isinstance(runner, TokenRunner)
    assert runner.statistics().departed_steps == 2
    assert not runner._running, "nobody is there: nothing runs"


async def test_one_that_leaves_during_its_prefill_is_not_stepped_and_its_prompt_goes_no_further() -> None:
    model = Gated(max_slots=1, chunked=True, prefill_budget=2)
    async with desk(TokenRunner(model)) as at:
        leaves = await at.asked(5, 1, 2, 3, 4, 5)
        await model.during("prefill")
        model.go()
        await model.during("prefill")
        leaves.leave()
        model.go()
        probe = await at.asked(1, 7)
        await model.during("prefill")
        model.go()
    assert model.prefills == [[(0, 2)], [(2, 4)], [(0, 1)]]
    assert model.steps == []
    assert tokens(probe) == [8]


async def test_long_prompts_go_in_by_parts_between_the_steps_of_others() -> None:
    model = Counter(chunked=True, prefill_budget=2)
    async with desk(TokenRunner(model)) as at:
        short, long = at.ask(6, 1), at.ask(2, 11, 12, 13, 14, 15)
    assert tokens(short) == [2, 3, 4, 5, 6, 7]
    assert tokens(long) == [16, 17]
    assert all(sum(upto - begun for begun, upto in call) <= 2 for call in model.prefills)
    assert sum(len(call) for call in model.prefills) >= 4


@pytest.mark.parametrize(
    ("lengths", "budget", "chunked", "expected"),
    [
        ([], 5, False, []),
        ([3, 2, 1], 5, False, [3, 2]),
        ([9, 1], 5, False, [9]),
        ([3, 4, 1], 5, False, [3]),
        ([9, 1], 5, True, [5]),
        ([3, 4, 1], 5, True, [3, 2]),
    ],
)
def test_the_prefill_budget(lengths: list[int], budget: int, chunked: bool, expected: list[int]) -> None:
    assert portions(lengths, budget, chunked=chunked) == expected


async def test_a_request_that_is_refused_or_whose_prompt_is_bad_fails_alone() -> None:
    model = Counter(max_slots=4)
    async with desk(TokenRunner(model)) as at:
        good, refused, bad, better = (at.ask(*row) for row in ((2, 5), (-1, 5), (2, 666), (2, 7)))
    assert tokens(good) == [6, 7]
    assert tokens(better) == [8, 9]
    assert str(refused.error) == "no negative numbers"
    assert isinstance(bad.error, ValueError)


async def test_a_step_that_raises_fails_all_that_are_in_it_and_the_model_serves_on() -> None:
    model = Counter(max_slots=2)
    async with desk(TokenRunner(model)) as at:
        guests = [at.ask(9, 1010), at.ask(9, 1)]
        for guest in guests:
            await guest.done.wait()
        probe = at.ask(2, 1)
    assert sorted(str(guest.error) for guest in guests) == ["ValueError: an unlucky number", "an unlucky number"]
    assert tokens(probe) == [2, 3]


async def test_a_model_that_gives_no_integers_is_told_so() -> None:
    class Floats(Counter):
        def step(self, active: Active) -> Array:
            return np.zeros(len(active.slots))

    async with desk(TokenRunner(Floats())) as at:
        guest = at.ask(2, 1)
    assert str(guest.error) == "`step` must give 1 integers, one a request; got float64 of shape [1]"


async def test_a_slow_reader_pauses_alone_in_its_slot() -> None:
    model = Counter(max_slots=2)
    served = ServedModel(TokenRunner(model))
    await served.load(NoHost())
    served.ready = True
    read = trio.Event()
    taken: dict[str, list[int]] = {"slow": [], "quick": []}

    async def client(name: str, *row: int) -> None:
        async def take(response: InferResponse) -> None:
            if name == "slow":
                await read.wait()
            taken[name].append(int(response.outputs["token"][0]))

        await served.infer(Life(label=name), InferRequest("counter", "1", {"x": np.array(row, np.float32)}), take)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client, "slow", 100, 1)
        await settle()
        nursery.start_soon(client, "quick", 200, 3000)
        await settle()
        assert taken["quick"] == list(range(3001, 3201))
        assert sum(0 in step for step in model.steps) <= ROOM + 1, "it is in no step while it has so many unread"
        assert served.statistics().running == 1
        read.set()
    assert taken["slow"] == list(range(2, 102))
    assert served.statistics().running == 0


async def test_an_end_token_ends_the_answer_and_is_not_in_it() -> None:
    async with desk(TokenRunner(Counter(end_token=14))) as at:
        guest = at.ask(100, 10)
    assert tokens(guest) == [11, 12, 13]


async def test_the_queue_in_front_of_the_slots_has_bounds_and_priorities_like_any_other() -> None:
    levels = Queueing(QueuePolicy(max_queue_size=2), priority_levels=2, default_priority_level=2)
    model = Gated(max_slots=1, queueing=levels)
    async with desk(TokenRunner(model)) as at:
        running, low, lower, refused = [await at.asked(1, n) for n in range(4)]
        high = await at.asked(1, 9, parameters={"priority": 1})
        assert str(refused.error).startswith("Exceeds maximum queue size")
        for _ in range(4):
            await model.during("prefill")
            model.go()
    assert [guest for guest in at.order if guest is not refused] == [running, high, low, lower]


def test_what_a_loop_can_not_be_made_of() -> None:
    for attribute in ("max_slots", "prefill_budget"):
        with pytest.raises(ModelLoadError, match=f"`{attribute}` must be a whole number of 1 or more, got 0"):
            TokenRunner(Counter(**{attribute: 0}))


CODE = """
import numpy as np
from trio_infer import Prompt, TensorSpec, TokenModel

class Letters(TokenModel):
    inputs = (TensorSpec("text_input", "BYTES", [1]),)
    outputs = (TensorSpec("text_output", "BYTES", [1]),)

    def start(self, request):
        return Prompt(list(request.inputs["text_input"][0]), max_tokens=3)

    def prefill(self, generations):
        return np.array([generation.prompt[-1] + 1 for generation in generations])

    def step(self, active):
        return active.tokens + 1

    def output(self, generation, token):
        return {"text_output": np.array([bytes([token])], object)}
"""


async def test_a_stream_gives_each_token_and_generate_and_infer_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "letters/1").mkdir(parents=True)
    (tmp_path / "letters/1/model.py").write_text(CODE)
    (tmp_path / "letters/config.pbtxt").write_text(
        'backend: "trio_infer"\nparameters { key: "max_slots" value { string_value: "3" } }'
    )
    (runner,) = find_models([tmp_path])
    assert runner.instances == 3
    async with serving(runner) as served:
        client = await served.connect()
        await client.send(post("letters", "generate", {"text_input": "a"}))
        assert (await client.answer()).json["text_output"] == "bcd"
        await client.send(
            post(
                "letters",
                "infer",
                {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]},
            )
        )
        answer = await client.answer()
        assert answer.status == 200, answer
        assert answer.json["outputs"][0]["data"] == ["yz{"]
        await client.send(post("letters", "generate_stream", {"text_input": "a"}))
        answer = await client.answer()
        assert answer.body.count(b"data: ") == 3
        assert b'"text_output":"d"' in answer.body
        await client.close()


class LoopMachine(RuleBasedStateMachine):
    """Arrivals and departures between any two ticks; every survivor's tokens are those of a run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.script: list[tuple[str, int]] = []

    @rule(length=st.integers(1, 12), prompt=st.integers(1, 5))
    def arrive(self, length: int, prompt: int) -> None:
        self.script.append(("arrive", length * 10 + prompt))

    @rule(who=st.integers(0, 30))
    def leave(self, who: int) -> None:
        self.script.append(("leave", who))

    @rule(ticks=st.integers(1, 6))
    def tick(self, ticks: int) -> None:
        self.script.append(("tick", ticks))

    def teardown(self) -> None:
        trio.run(self.play)

    async def play(self) -> None:
        model = Counter(max_slots=3, chunked=True, prefill_budget=4)
        runner = TokenRunner(model)
        async with desk(runner) as at:
            guests: list[tuple[Guest, int, int]] = []
            for what, number in self.script:
                if what == "arrive":
                    length, size = divmod(number, 10)
                    base = 100 * len(guests)
                    guests.append((at.ask(length, *range(base - size, base)), length, base))
                elif what == "leave" and guests:
                    guests[number % len(guests)][0].leave()
                elif what == "tick":
                    for _ in range(number):
                        await trio.lowlevel.checkpoint()
                assert len(runner._seats) <= 3
        assert all(len(step) == len(set(step)) for step in model.steps), "no slot is given to two"
        assert runner.statistics().departed_steps == 0, "without a thread nobody can leave in mid-step"
        for guest, length, base in guests:
            whole = list(range(base, base + length))
            if guest.life.outcome is Outcome.CANCELLED:
                assert tokens(guest) == whole[: len(guest.responses)]
            else:
                assert tokens(guest) == whole


LoopMachine.TestCase.settings = settings(max_examples=EXAMPLES or 500, stateful_step_count=25, deadline=None)
TestLoop = LoopMachine.TestCase


@attrs.define(eq=False)
class Leaver(Counter):
    """Ends a step by `sys.exit`, and gives one prompt that has no dimension."""

    def start(self, request: InferRequest) -> Prompt:
        prompt = super().start(request)
        return Prompt(7, 3) if prompt.tokens == [7] else prompt  # type: ignore[arg-type]  # that's the point

    def step(self, active: Active) -> Array:
        if (active.tokens >= 13).any():
            raise SystemExit(3)
        return super().step(active)


@pytest.mark.parametrize("threaded", [False, True])
async def test_whatever_a_model_raises_or_starts_with_fails_its_own_requests_only(threaded: bool) -> None:
    async with desk(TokenRunner(Leaver(threaded=threaded))) as at:
        odd, good = at.ask(3, 7), at.ask(3, 1)
        await odd.done.wait()
        await good.done.wait()
        exits = at.ask(3, 12)
        await exits.done.wait()
        last = at.ask(2, 1)
    assert str(odd.error) == "`start` must give tokens in one dimension, got shape []"
    assert good.error is None
    assert str(exits.error) == "`step` raised SystemExit: 3"
    assert last.error is None
