"""Sequences: who is next in each, which of them has a slot, and what one that leaves takes along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from desk import EXAMPLES, Desk, Guest, desk
from trio_infer import CancelReason, InferError, InferRequest, Life, Outcome
from trio_infer.errors import ModelLoadError
from trio_infer.models.host import NoHost
from trio_infer.models.repository import find_models
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.scheduling.sequences import Member, SequenceTable
from trio_infer.scheduling.served import ServedModel

CODE = """
import numpy as np, trio
from trio_infer import Model, TensorSpec
LOG = []
class M(Model):
    async def infer(self, request):
        x = request.inputs
        LOG.append({name: array.ravel().tolist() for name, array in x.items()})
        await trio.sleep(1)
        if (x["x"] < 0).any():
            raise ValueError("a negative number")
        out = {"y": x["x"].copy()}
        if "sum_in" in x:
            out["y"] = out["sum_out"] = x["sum_in"] + x["x"]
        return out
"""
TENSORS = """
backend: "trio_infer"
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 1 ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
"""
STATE = 'state { input_name: "sum_in" output_name: "sum_out" data_type: TYPE_FP32 dims: [ 1 ] }\n'


def runner(
    tmp_path: Path, sequencing: str, *, rows: int = 4, instances: int = 1, code: str = CODE, more: str = ""
) -> Any:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(code)
    text = TENSORS + f"max_batch_size: {rows}\ninstance_group {{ count: {instances} }}\n{more}"
    (tmp_path / "m/config.pbtxt").write_text(f"{text}sequence_batching {{ {sequencing} }}")
    (found,) = find_models([tmp_path])
    return found


def runs(served: Any) -> list[dict[str, Any]]:
    """What the model was given, run by run."""
    found: list[dict[str, Any]] = served.model.infer.__func__.__globals__["LOG"]
    return found


class Speaker:
    """Asks in one sequence."""

    def __init__(self, at: Desk, key: int | str) -> None:
        self.at, self.key = at, key

    def say(self, value: float, *, start: bool = False, end: bool = False, **fields: Any) -> Guest:
        parameters = {"sequence_id": self.key, "sequence_start": start, "sequence_end": end}
        return self.at.ask([value], parameters=parameters, **fields)

    async def said(self, value: float, **fields: Any) -> Guest:
        guest = self.say(value, **fields)
        await trio.testing.wait_all_tasks_blocked()
        return guest


async def test_requests_of_a_sequence_run_in_order_one_at_a_time_and_are_told_where_they_are(
    tmp_path: Path, autojump_clock: Any
) -> None:
    served = runner(tmp_path, "direct { }" + CONTROLS)
    async with desk(served) as at:
        one, other = Speaker(at, 7), Speaker(at, 8)
        await one.said(1, start=True)
        await one.said(2)
        await other.said(10, start=True, end=True)
        await one.said(3, end=True)
    first, second, third = runs(served)
    assert first == {"x": [1], "START": [1], "END": [-1], "READY": [True], "ID": [7]}
    assert sorted(zip(second["x"], second["ID"], second["START"], second["END"], strict=True)) == [
        (2, 7, 0, -1),
        (10, 8, 1, 1),
    ], "another sequence's request joins"
    assert third == {"x": [3], "START": [0], "END": [1], "READY": [True], "ID": [7]}
    assert trio.current_time() == pytest.approx(3)
    assert at.books.executions == 3


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 1 }"])
async def test_a_sequence_without_a_slot_waits_until_one_has_ended(
    tmp_path: Path, autojump_clock: Any, strategy: str
) -> None:
    served = runner(tmp_path, strategy, rows=1)
    async with desk(served) as at:
        one, other = Speaker(at, "a"), Speaker(at, "b")
        await one.said(1, start=True)
        await other.said(10, start=True, end=True)
        await trio.sleep(1.5)
        assert len(runs(served)) == 1, "the slot is the first one's, though it asks nothing now"
        await one.said(2, end=True)
    assert [run["x"] for run in runs(served)] == [[1], [2], [10]]


async def test_an_idle_sequence_loses_its_slot_to_one_that_waits_and_must_start_anew(
    tmp_path: Path, autojump_clock: Any
) -> None:
    served = runner(tmp_path, "max_sequence_idle_microseconds: 2000000 direct { }", rows=1)
    async with desk(served) as at:
        one, other = Speaker(at, 1), Speaker(at, 2)
        await one.said(1, start=True)
        waits = await other.said(10, start=True, end=True)
        await waits.done.wait()
        assert waits.ended_at == pytest.approx(4), "1 s at work, 2 s idle, 1 s at work"
        late = await one.said(2)
        assert isinstance(late.error, InferError)
        assert late.error.status == 400
        assert late.error.message == (
            "inference request for sequence 1 to model 'm' must specify the START flag on the first request of the "
            "sequence"
        )
        await trio.sleep(60)
        lasting = await one.said(3, start=True)
        await trio.sleep(60)
        assert (await one.said(4)).error is not None, "also if nobody waits for its slot"
    assert lasting.error is None


async def test_implicit_state_goes_from_request_to_request_and_not_to_the_client(
    tmp_path: Path, autojump_clock: Any
) -> None:
    (tmp_path / "m/initial_state").mkdir(parents=True)
    (tmp_path / "m/initial_state/first").write_bytes(np.float32(100).tobytes())
    initial = STATE.replace(
        "dims: [ 1 ] }", 'dims: [ 1 ] initial_state { data_type: TYPE_FP32 dims: [ 1 ] data_file: "first" name: "f" } }'
    )
    served = runner(tmp_path, f"direct {{ }} {initial}")
    async with desk(served) as at:
        one, other = Speaker(at, 1), Speaker(at, 2)
        guests = [await one.said(1, start=True), await other.said(5, start=True), await one.said(2)]
        guests += [await one.said(3, requested_outputs=("y",)), await one.said(4, start=True, end=True)]
    assert [guest.values for guest in guests] == [[[101]], [[105]], [[103]], [[106]], [[104]]]
    assert all(list(guest.responses[0].outputs) == ["y"] for guest in guests)


async def test_a_state_that_is_an_output_of_the_model_too_is_given_to_the_client(
    tmp_path: Path, autojump_clock: Any
) -> None:
    more = 'output { name: "sum_out" data_type: TYPE_FP32 dims: [ 1 ] }'
    async with desk(runner(tmp_path, f"direct {{ }} {STATE}", more=more)) as at:
        one = Speaker(at, 1)
        all_of_it, some = await one.said(1, start=True), await one.said(2, requested_outputs=("sum_out",))
    assert [list(guest.responses[0].outputs) for guest in (all_of_it, some)] == [["y", "sum_out"]] * 2
    assert some.responses[0].outputs["sum_out"].tolist() == [[3]]


async def test_slots_and_states_of_any_size_cost_no_memory_or_refuse_the_model(
    tmp_path: Path, autojump_clock: Any
) -> None:
    async with desk(runner(tmp_path / "a", f"oldest {{ max_candidate_sequences: {2**31 - 1} }}", instances=3)) as at:
        guest = await Speaker(at, 1).said(1, start=True, end=True)
    assert guest.values == [[1]]
    large = STATE.replace("dims: [ 1 ]", f"dims: [ {10**12}, 1000 ]")
    with pytest.raises(ModelLoadError, match="Unable to allocate"):
        await ServedModel(runner(tmp_path / "b", f"direct {{ }} {large}")).load(NoHost())


async def test_a_cancelled_request_takes_along_what_waits_behind_it_and_frees_the_slot(
    tmp_path: Path, autojump_clock: Any
) -> None:
    served = runner(tmp_path, "direct { }", rows=1)
    async with desk(served) as at:
        one, other = Speaker(at, 1), Speaker(at, 2)
        running, second, third = await one.said(1, start=True), await one.said(2), await one.said(3, end=True)
        queued = await other.said(10, start=True)
        await trio.sleep(0.25)
        running.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert [run["x"] for run in runs(served)] == [[1], [10]], "in that instant"
        assert [guest.life.reason for guest in (running, second, third)] == [
            CancelReason.DISCONNECTED,
            CancelReason.SEQUENCE,
            CancelReason.SEQUENCE,
        ]
        late = await one.said(4)
        assert isinstance(late.error, InferError)
    assert queued.values == [[10]]


async def test_what_is_in_front_of_a_cancelled_request_goes_on(tmp_path: Path, autojump_clock: Any) -> None:
    served = runner(tmp_path, "direct { }", rows=1)
    async with desk(served) as at:
        one, other = Speaker(at, 1), Speaker(at, 2)
        front, leaves, behind = await one.said(1, start=True), await one.said(2), await one.said(3)
        waits = await other.said(10, start=True, end=True)
        leaves.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert behind.life.outcome is Outcome.CANCELLED
        assert [run["x"] for run in runs(served)] == [[1]]
        again = await one.said(5, start=True, end=True)
    assert front.values == [[1]]
    assert [run["x"] for run in runs(served)] == [[1], [10], [5]]
    assert (waits.error, again.error) == (None, None)


async def test_one_that_waits_in_the_backlog_leaves_and_nobody_else_notices(
    tmp_path: Path, autojump_clock: Any
) -> None:
    served = runner(tmp_path, "direct { }", rows=1)
    async with desk(served) as at:
        one, two, three = (Speaker(at, key) for key in (1, 2, 3))
        await one.said(1, start=True, end=True)
        leaves, stays = await two.said(2, start=True, end=True), await three.said(3, start=True, end=True)
        assert at.model.statistics().waiting == 2
        leaves.leave()
        assert at.model.statistics().waiting == 1
    assert [run["x"] for run in runs(served)] == [[1], [3]]
    assert stays.values == [[3]]


async def test_who_is_next_in_the_backlog_looks_for_an_idle_sequence_when_the_one_in_front_has_gone(
    tmp_path: Path, autojump_clock: Any
) -> None:
    served = runner(tmp_path, "max_sequence_idle_microseconds: 5000000 direct { }", rows=1)
    async with desk(served) as at:
        one, two, three = (Speaker(at, key) for key in (1, 2, 3))
        await one.said(1, start=True)
        leaves, stays = await two.said(2, start=True), await three.said(3, start=True, end=True)
        await trio.sleep(2)
        leaves.leave()
        with trio.move_on_after(20):
            await stays.done.wait()
        stays.leave()
    assert stays.ended_at == pytest.approx(7), "1 s at work, 5 s idle, 1 s at work"


async def test_a_second_idle_sequence_loses_its_slot_while_the_one_that_took_the_first_one_s_is_at_work(
    tmp_path: Path, autojump_clock: Any
) -> None:
    code = CODE.replace("sleep(1)", "sleep(100 if x['x'][0, 0] == 100 else 1)")
    served = runner(tmp_path, "max_sequence_idle_microseconds: 5000000 direct { }", rows=1, instances=2, code=code)
    async with desk(served) as at:
        one, two, three, four = (Speaker(at, key) for key in (1, 2, 3, 4))
        await one.said(1, start=True)
        await trio.sleep(0.5)
        await two.said(2, start=True)
        long, short = await three.said(100, start=True, end=True), await four.said(4, start=True, end=True)
        await short.done.wait()
    assert short.ended_at == pytest.approx(7.5)
    assert long.ended_at == pytest.approx(106)


async def test_a_request_that_is_cancelled_from_around_leaves_the_backlog_with_its_sequence(
    tmp_path: Path, autojump_clock: Any
) -> None:
    served = runner(tmp_path, "max_sequence_idle_microseconds: 5000000 direct { }", rows=1)
    async with desk(served) as at:
        one, three = Speaker(at, 1), Speaker(at, 3)
        await one.said(1, start=True)

        async def nobody(_: Any) -> None:
            raise AssertionError

        inputs = {"x": np.float32([[2]])}
        for leaves_after in (0.5, 1):
            with trio.move_on_after(leaves_after):
                request = InferRequest("m", "1", inputs, parameters={"sequence_id": 2, "sequence_start": True})
                await at.model.infer(Life(), request, nobody)
        stays = await three.said(3, start=True, end=True)
        await stays.done.wait()
        late = await Speaker(at, 2).said(5)
    assert stays.ended_at == pytest.approx(7)
    assert late.error is not None, "it must START anew"


async def test_one_that_leaves_in_the_tick_in_which_its_turn_comes_never_runs(
    tmp_path: Path, autojump_clock: Any
) -> None:
    served = runner(tmp_path, "direct { }", rows=1)
    async with desk(served) as at:
        at_once = Speaker(at, 1).say(1, start=True)
        at_once.leave()  # before its task has run at all
        await at_once.done.wait()
        first, waits = await Speaker(at, 2).said(2, start=True), await Speaker(at, 3).said(3, start=True)
        first.leave()
        waits.leave()  # the slot is its own already, and its task doesn't know yet
        await waits.done.wait()
        probe = await Speaker(at, 4).said(4, start=True, end=True)
    assert [guest.error for guest in (at_once, first, waits)] == [None] * 3
    assert [run["x"] for run in runs(served)] == [[2], [4]]
    assert probe.values == [[4]]


async def test_a_failed_request_does_not_end_its_sequence(tmp_path: Path, autojump_clock: Any) -> None:
    served = runner(tmp_path, "direct { }")
    async with desk(served) as at:
        one = Speaker(at, 1)
        bad, good = await one.said(-1, start=True), await one.said(2, end=True)
    assert isinstance(bad.error, ValueError)
    assert good.values == [[2]]


async def test_sequences_are_spread_over_instances_and_stay_with_theirs(tmp_path: Path, autojump_clock: Any) -> None:
    served = runner(tmp_path, "oldest { max_candidate_sequences: 2 preferred_batch_size: [ 2 ] }", instances=2)
    async with desk(served) as at:
        speakers = [Speaker(at, key) for key in range(1, 6)]
        for turn in range(2):
            for speaker in speakers:
                await speaker.said(turn, start=turn == 0, end=turn == 1)
    sizes = [len(run["x"]) for run in runs(served)]
    assert sum(sizes) == 10
    assert max(sizes) == 2
    assert trio.current_time() == pytest.approx(4), "the fifth joins when the first has ended"


async def test_a_slot_s_delay_ends_when_enough_are_there(tmp_path: Path, autojump_clock: Any) -> None:
    served = runner(tmp_path, "direct { max_queue_delay_microseconds: 5000000 minimum_slot_utilization: 0.5 }")
    async with desk(served) as at:
        one, other = Speaker(at, 1), Speaker(at, 2)
        await one.said(1, start=True, end=True)
        await trio.sleep(2)
        assert runs(served) == []
        await other.said(2, start=True, end=True)
        assert len(runs(served)) == 1


@pytest.mark.parametrize(
    ("key", "rows", "reason"),
    [
        (0, 1, "must specify a non-zero or non-empty correlation ID"),
        ("", 1, "must specify a non-zero or non-empty correlation ID"),
        ("a", 1, "the sequence id must be a number that fits INT64, got a string"),
        (2**63, 1, "the sequence id must be a number that fits INT64, got 9223372036854775808"),
        (1, 2, "must specify batch-size 1 due to requirements of sequence batcher, got 2"),
    ],
)
async def test_what_is_no_request_of_a_sequence_is_refused(tmp_path: Path, key: Any, rows: int, reason: str) -> None:
    served = runner(tmp_path, "direct { }" + CONTROLS)
    async with desk(served) as at:
        parameters = {"sequence_id": key, "sequence_start": True}
        guest = await at.asked(*[[1]] * rows, parameters=parameters)
    assert isinstance(guest.error, InferError)
    assert guest.error.status == 400
    assert reason in guest.error.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } }', "must say what is false and what is"),
        ('control_input { name: "I" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }', "data_type"),
        ('state { input_name: "i" }', "state 'i' must have"),
        (STATE + STATE, "tensor 'sum_in' is named twice"),
        (STATE.replace("sum_in", "START") + CONTROLS, "tensor 'START' is named twice"),
        ("oldest { max_candidate_sequences: -1 }", "`max_candidate_sequences` can't be negative, got -1"),
        (
            "oldest { preferred_batch_size: [ 9 ] }",
            "`preferred_batch_size` must be from 1 to .* got 9",
        ),
        ("direct { minimum_slot_utilization: inf }", "`minimum_slot_utilization` must be from 0 to 1, got inf"),
    ],
)
def test_a_control_or_state_that_can_not_be_is_refused_when_the_model_is_read(text: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason) as caught:
        ModelConfig.parse(f"sequence_batching {{ {text} }}", name="m", where=Path("config.pbtxt"))
    assert "config.pbtxt:1" in str(caught.value)


TRITON = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            total = sum(pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("sum_in", "IN"))
            out = [pb_utils.Tensor("OUT", total), pb_utils.Tensor("sum_out", total)]
            responses.append(pb_utils.InferenceResponse(out))
        return responses
"""
ITERATIVE = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.seen = {}
    def execute(self, requests):
        responses = []
        for request in requests:
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().item()
            wanted = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().item()
            seen = self.seen[request.correlation_id()] = self.seen.get(request.correlation_id(), 0) + 10 + start
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[seen]], np.float32))])
            again = seen < 10 * wanted
            if again:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if DECOUPLED:
                request.get_response_sender().send(response, 0 if again else 1)
            else:
                responses.append(None if again else response)
        return None if DECOUPLED else responses
"""


def triton(tmp_path: Path, code: str, sequencing: str, execution: Any, more: str = "") -> Any:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(code)
    tensors = TENSORS.replace('"x"', '"IN"').replace('"y"', '"OUT"').replace("trio_infer", "python")
    config = f"{tensors}max_batch_size: 4\n{more}sequence_batching {{ {sequencing} {CONTROLS} }}"
    (tmp_path / "m/config.pbtxt").write_text(config)
    (served,) = find_models([tmp_path], execution=execution)
    return served


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_a_triton_model_has_state_and_controls(tmp_path: Path, execution: Any) -> None:
    async with desk(triton(tmp_path, TRITON, f"oldest {{ max_candidate_sequences: 3 }} {STATE}", execution)) as at:
        guests = []
        for value in (1, 2, 3):
            guest = Speaker(at, 4).say(value, start=value == 1, end=value == 3, name="IN")
            guests.append(guest)
            await guest.done.wait()
    assert [guest.values for guest in guests] == [[[1]], [[3]], [[6]]]


@pytest.mark.parametrize("execution", ["thread", "process"])
@pytest.mark.parametrize("decoupled", [False, True])
async def test_a_request_of_an_iterative_sequence_comes_again_until_the_model_has_done_with_it(
    tmp_path: Path, execution: Any, decoupled: bool
) -> None:
    code = ITERATIVE.replace("DECOUPLED", str(decoupled))
    more = "model_transaction_policy { decoupled: true }\n" if decoupled else ""
    served = triton(tmp_path, code, "iterative_sequence: true direct { }", execution, more)
    async with desk(served) as at:
        guests = [Speaker(at, key).say(3, start=True, end=True, name="IN") for key in (1, 2)]
        leaves = Speaker(at, 3).say(10_000_000, start=True, end=True, name="IN")
        for guest in guests:
            await guest.done.wait()
        leaves.leave()
    given = [[response.outputs["OUT"].item() for response in guest.responses] for guest in guests]
    assert given == [[11, 21, 31]] * 2 if decoupled else [[31]] * 2, "START is said but once"
    assert leaves.life.outcome is Outcome.CANCELLED


async def test_a_model_that_reschedules_without_an_iterative_sequence_is_told_what_that_needs(tmp_path: Path) -> None:
    async with desk(triton(tmp_path, ITERATIVE.replace("DECOUPLED", "False"), "direct { }", "thread")) as at:
        guest = Speaker(at, 1).say(3, start=True, end=True, name="IN")
    assert "needs `sequence_batching { iterative_sequence: true }`" in str(guest.error)


class TableMachine(RuleBasedStateMachine):
    """Requests of sequences come, are served, are cancelled, fall silent, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = SequenceTable("m", 2, 2, 10, lambda: self.now)
        self.waiting: list[Member] = []
        self.serving: list[Member] = []
        self.order: dict[Any, list[Member]] = {}
        self.refused = 0

    def settle(self) -> None:
        for member in [member for member in self.waiting if member.turn]:
            self.waiting.remove(member)
            self.serving.append(member)
        for member in [*self.waiting, *self.serving]:
            if member.life.cancelled:
                (self.waiting if member in self.waiting else self.serving).remove(member)
                self.table.leave(member)

    @rule(key=st.integers(1, 8), start=st.booleans(), end=st.booleans())
    def come(self, key: int, start: bool, end: bool) -> None:
        life = Life()
        try:
            member = self.table.enter(life, key, start=start, end=end)
        except InferError:
            assert not start
            self.refused += 1
            return
        life.attach(member)
        self.waiting.append(member)
        self.settle()

    @precondition(lambda self: self.serving)
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        member = data.draw(st.sampled_from(self.serving))
        self.serving.remove(member)
        member.life.detach(member)
        self.table.leave(member)
        self.settle()

    @precondition(lambda self: self.waiting or self.serving)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        member = data.draw(st.sampled_from([*self.waiting, *self.serving]))
        sequence, number = member.sequence, list(member.sequence.members).index(member)
        behind = list(sequence.members)[number:]
        ahead = list(sequence.members)[:number]
        member.life.cancel(CancelReason.DISCONNECTED)
        assert all(each.life.cancelled for each in behind)
        assert not any(each.life.cancelled for each in ahead)
        self.settle()

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.reap()
        self.settle()

    @invariant()
    def holds(self) -> None:
        busy = {}
        for member in self.serving:
            assert member.sequence not in busy, "one at a time"
            busy[member.sequence] = member
            assert member.sequence.members[0] is member, "in order"
        assert self.table.waiting == len(self.waiting)
        backlog = {member.sequence for member in self.waiting if member.sequence.instance is None}
        assert not (backlog and self.table.free_slots), "nobody waits for a slot that is free"
        assert self.table.free_slots >= 0

    def teardown(self) -> None:
        while self.serving or self.waiting:
            for member in list(self.serving):
                self.serving.remove(member)
                self.table.leave(member)
            self.settle()
            if not self.serving and self.waiting:
                self.now += 11
                self.table.reap()
                self.settle()
                assert self.serving, "somebody's turn comes"
        self.now += 11
        for key in range(1, 9):
            self.table.reap(key)
        assert (self.table.sequences, self.table.free_slots, self.table.waiting) == (0, 4, 0)


TableMachine.TestCase.settings = settings(max_examples=EXAMPLES or 1000, stateful_step_count=30, deadline=None)
TestTable = TableMachine.TestCase
