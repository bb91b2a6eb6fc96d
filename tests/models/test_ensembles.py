"""Ensembles: which steps run when, what reaches the client, and that leaving stops every step under it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from ensemble_stage import CHAIN, FORK, STAGE, Add, Several, Stage, Y, ensemble, infer, leave_at, write
from hypothesis import given, settings
from hypothesis import strategies as st

from support import post, serving
from trio_infer import ErrorCode, InferError, InferRequest, Model, ModelLoadError, ModelRepository, Server, TensorSpec
from trio_infer.limits import ControlPolicy
from trio_infer.models.ensemble_plan import EnsemblePlan
from trio_infer.testing import MemoryListener


async def test_steps_run_as_soon_as_their_tensors_are_there(autojump_clock: Any) -> None:
    double, triple = Stage(), Stage("triple", 3)
    async with serving(double, triple, Add(), ensemble(*FORK), memory=True) as served:
        answer = await served.connect_in_memory().ask(infer(1, 2))
        assert answer.json["outputs"][0]["data"] == [5, 10]
        assert (double.log, triple.log) == (["begun 0"], ["begun 0"]), "side by side"
        assert trio.current_time() == pytest.approx(1)
        metadata = await served.connect_in_memory().ask(b"GET /v2/models/e HTTP/1.1\r\nHost: t\r\n\r\n")
        assert metadata.json["platform"] == "ensemble"
        config = (await served.connect_in_memory().ask(b"GET /v2/models/e/config HTTP/1.1\r\nHost: t\r\n\r\n")).json
        assert config["model_transaction_policy"] == {"decoupled": False}
        assert config["instance_group"] == []
        stats = (await served.connect_in_memory().ask(b"GET /v2/models/stats HTTP/1.1\r\nHost: t\r\n\r\n")).json
        counts = {row["name"]: row["inference_stats"]["success"]["count"] for row in stats["model_stats"]}
        assert counts == {"e": 1, "double": 1, "triple": 1, "add": 1}


async def test_leaving_while_the_first_step_runs_starts_no_second(autojump_clock: Any) -> None:
    double, triple = Stage(), Stage("triple", 3)
    await leave_at(0.5, double, triple, ensemble(*CHAIN))
    assert double.log == ["begun 0", "stopped 0.5"]
    assert triple.log == []


async def test_leaving_stops_parallel_branches_and_what_is_nested_in_them(autojump_clock: Any) -> None:
    double, triple = Stage(), Stage("triple", 3)
    outer = (("inner", {"in": "in"}, {"out": "left"}), ("triple", {"x": "in"}, {"y": "right"}), FORK[2])
    inner = ensemble(("double", {"x": "in"}, {"y": "out"}), name="inner")
    await leave_at(0.5, double, triple, Add(), inner, ensemble(*outer))
    assert double.log == ["begun 0", "stopped 0.5"]
    assert triple.log == ["begun 0", "stopped 0.5"]


async def test_a_step_that_waits_in_a_queue_leaves_it_and_nobody_else_notices(autojump_clock: Any) -> None:
    double, triple = Stage(instances=1), Stage("triple", 3, instances=1, seconds=5)
    answers = await leave_at(1.5, double, triple, ensemble(*CHAIN), clients=3)
    assert [answer.json["outputs"][0]["data"] for answer in answers] == [[6], [6]]
    assert double.log == ["begun 0", "begun 1", "begun 2"]
    assert triple.log == ["begun 1", "stopped 1.5", "begun 2", "begun 7"]


async def test_the_first_step_that_fails_names_itself_and_stops_the_others(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    double = Stage(error=InferError("too hot", ErrorCode.UNAVAILABLE), seconds=0.5)
    triple = Stage("triple", 3)
    async with serving(double, triple, Add(), ensemble(*FORK), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(infer(1))
        assert (answer.status, answer.json["error"]) == (503, "in ensemble 'e', step 1 model 'double': too hot")
        assert triple.log == ["begun 0", "stopped 0.5"]
        double.error = ValueError("boom-42")
        with caplog.at_level(logging.ERROR):
            answer = await client.ask(infer(1))
        assert answer.status == 500
        assert answer.json["error"] == "in ensemble 'e', step 1 model 'double': ValueError: boom-42"
        assert sum("boom-42" in (record.exc_text or "") for record in caplog.records) == 1, caplog.text


async def test_a_deadline_reaches_every_step(autojump_clock: Any) -> None:
    double, triple = Stage(), Stage("triple", 3)
    async with serving(double, triple, Add(), ensemble(*FORK), memory=True) as served:
        request = infer(1).replace(b"Host: test", b"Host: test\r\nInference-Timeout-Ms: 250")
        answer = await served.connect_in_memory().ask(request)
        assert answer.status == 504
        assert double.log == triple.log == ["begun 0", "stopped 0.25"]


async def test_responses_of_a_decoupled_step_go_through_the_rest_as_they_come(autojump_clock: Any) -> None:
    double = Stage(seconds=0.25)
    steps = (("several", {"x": "in"}, {"y": "one"}), ("double", {"x": "one"}, {"y": "out"}))
    async with serving(double, Several(), ensemble(*steps), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(post("e", "generate_stream", {"in": [1, 2, 3]}))
        events = [json.loads(event.removeprefix("data: ")) for event in answer.body.decode().split("\n\n") if event]
        assert [event["out"] for event in events] == [2, 4, 6]
        assert double.log == ["begun 1", "begun 2", "begun 3"]
        await client.send(post("e", "generate_stream", {"in": [1, 2, 3]}))
        await client.head()
        await client.chunk()
        await trio.sleep(0.85)
        await client.close()
        await trio.testing.wait_all_tasks_blocked()
        assert double.log[-1].startswith("stopped")
        answer = await served.connect_in_memory().ask(post("e", "infer", {"inputs": []}))
        assert answer.status == 501


async def test_an_error_after_a_decoupled_step_names_the_step_that_failed(autojump_clock: Any) -> None:
    double = Stage(seconds=0.25, error=InferError("too hot", ErrorCode.UNAVAILABLE))
    steps = (("several", {"x": "in"}, {"y": "one"}), ("double", {"x": "one"}, {"y": "out"}))
    async with serving(double, Several(), ensemble(*steps), memory=True) as served:
        answer = await served.connect_in_memory().ask(post("e", "generate_stream", {"in": [1, 2, 3]}))
        assert (answer.status, answer.json["error"]) == (503, "in ensemble 'e', step 2 model 'double': too hot")


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((), "must specify 'step'"),
        (
            (("double", {"x": "mid"}, {"y": "out"}), ("triple", {"x": "out"}, {"y": "mid"})),
            "input 'in' for ensemble 'e' is not used by any of its steps",
        ),
        ((("add", {"a": "in", "b": "out"}, {"y": "out"}),), "depend on each other in a ring: 1 -> 1"),
        ((("double", {"x": "in"}, {"y": "in"}),), "tensor 'in' is made by step 1, but it is an input of the ensemble"),
        ((CHAIN[0], CHAIN[0], CHAIN[1]), "tensor 'mid' is made by step 2, but it is made by step 1"),
        ((CHAIN[0],), "output 'out' of ensemble 'e' is made by none of its steps"),
        ((CHAIN[1],), "takes tensor 'mid' as its input 'x', but nothing makes that"),
        ((("", {"x": "in"}, {"y": "out"}),), "must specify 'model_name' in step 1"),
    ],
)
def test_steps_that_can_not_be_put_in_order(steps: Sequence[Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        ensemble(*steps)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (("nobody", {"x": "in"}, {"y": "out"}), "one of its steps asks model 'nobody'"),
        (("double", {"z": "in"}, {"y": "out"}), "step 1 model 'double' has no input 'z'; it has x"),
        (("double", {"x": "in"}, {"z": "out"}), "step 1 model 'double' has no output 'z'; it has y"),
        (("add", {"a": "in"}, {"y": "out"}), "step 1 model 'add' has no tensor for its input 'b' in `input_map`"),
        (
            ("ints", {"x": "in"}, {"y": "out"}),
            "tensor 'in' is FP32 from the ensemble, but INT32 for step 1 model 'ints'",
        ),
        (
            ("flat", {"x": "in"}, {"y": "out"}),
            r"tensor 'in' has dims \[-1\] from the ensemble, but \[2, 2\] for step 1",
        ),
    ],
)
async def test_an_ensemble_whose_models_do_not_fit_is_not_served(step: Any, reason: str) -> None:
    class Ints(Add):
        name = "ints"
        inputs = (TensorSpec("x", "INT32", [-1]),)

    class Flat(Add):
        name = "flat"
        inputs = (TensorSpec("x", "FP32", [2, 2]),)

    with pytest.raises(ModelLoadError, match=reason):
        await Server([Stage(), Add(), Ints(), Flat(), ensemble(step)]).serve(listeners=[MemoryListener()])


async def test_loading_an_ensemble_loads_its_models_and_unloading_takes_those_along_that_nobody_needs(
    tmp_path: Path,
) -> None:
    for name, factor in (("double", 2), ("triple", 3)):
        write(tmp_path, name, 'backend: "trio_infer"', STAGE.replace("FACTOR", str(factor)))
    for name, steps in (("e", CHAIN), ("f", (("double", {"x": "in"}, {"y": "out"}),))):
        config = ensemble(*steps, name=name).config
        write(tmp_path, name, str(config.message))
    write(tmp_path, "ring", str(ensemble(("ring2", {"in": "in"}, {"out": "out"}), name="ring").config.message))
    write(tmp_path, "ring2", str(ensemble(("ring", {"in": "in"}, {"out": "out"}), name="ring2").config.message))
    control = ControlPolicy(model_control_mode="explicit")
    async with serving(repository=ModelRepository([tmp_path]), control=control, memory=True) as served:
        client = served.connect_in_memory()

        async def call(path: str, document: object = None) -> Any:
            body = json.dumps(document or {}).encode()
            head = f"POST /v2/repository/{path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
            return await client.ask(head.encode() + body)

        async def ready() -> list[str]:
            return sorted(row["name"] for row in (await call("index", {"ready": True})).json)

        assert (await call("models/e/load")).status == 200
        assert (await call("models/f/load")).status == 200
        assert await ready() == ["double", "e", "f", "triple"]
        assert (await client.ask(infer(1))).json["outputs"][0]["data"] == [6]
        assert (await call("models/triple/unload")).status == 200
        assert (await client.ask(b"GET /v2/models/e/ready HTTP/1.1\r\nHost: t\r\n\r\n")).status == 400
        answer = await client.ask(infer(1))
        assert answer.json["error"].startswith("in ensemble 'e', step 2 model 'triple': Request for unknown model")
        assert (await call("models/triple/load")).status == 200
        await call("models/e/unload", {"parameters": {"unload_dependents": True}})
        assert await ready() == ["double", "f"], "f needs it still"
        await call("models/f/unload", {"parameters": {"unload_dependents": True}})
        assert await ready() == []
        refused = await call("models/ring/load")
        assert refused.status >= 400
        assert "while it is loaded itself" in refused.json["error"]


ONE = {"in": "in"}, {"out": "out"}


async def test_an_ensemble_that_is_loaded_again_can_not_ask_itself_nor_too_many_below_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "double", 'backend: "trio_infer"', STAGE.replace("FACTOR", "2"))
    below = {"e": ("double", {"x": "in"}, {"y": "out"}), "f": ("e", *ONE), "g": ("f", *ONE)}
    for name, step in below.items():
        write(tmp_path, name, str(ensemble(step, name=name).config.message))
    control = ControlPolicy(model_control_mode="explicit")
    async with serving(repository=ModelRepository([tmp_path]), control=control, memory=True) as served:
        client = served.connect_in_memory()

        async def load(name: str, asks: str = "") -> str:
            if asks:
                config = str(ensemble((asks, *ONE), name=name).config.message)
                (tmp_path / name / "config.pbtxt").write_text(config)
            head = f"POST /v2/repository/models/{name}/load HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{{}}"
            answer = await client.ask(head.encode())
            return "" if answer.status == 200 else str(answer.json["error"])

        assert await load("g") == ""
        assert "one of its steps asks the ensemble itself" in await load("e", asks="e")
        assert "one of its steps asks the ensemble itself, 2 ensembles further" in await load("e", asks="g")
        assert (await client.ask(infer(1, model="g"))).json["outputs"][0]["data"] == [2], "the old one serves on"
        for number in range(300):
            write(tmp_path, f"n{number}", str(ensemble((f"n{number + 1}", *ONE), name=f"n{number}").config.message))
        write(tmp_path, "n300", (tmp_path / "f/config.pbtxt").read_text().replace('name: "f"', 'name: "n300"'))
        assert "ensembles of ensembles can be 50 deep" in await load("n0"), "and the server lives"
        for number in range(300, 253, -1):
            assert await load(f"n{number}") == ""
        assert (await client.ask(infer(1, model="n254"))).json["outputs"][0]["data"] == [2]
        monkeypatch.setattr("trio_infer.scheduling.control.DEEPEST", 40)
        assert "ensembles of ensembles can be 40 deep" in await load("n253")


@attrs.define(eq=False)
class Node(Model):
    """Adds what it gets."""

    name: str = ""
    inputs: Any = ()
    fails: bool = False

    outputs = Y

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        await trio.sleep(sum(map(ord, self.name)) % 7 / 10)
        if self.fails:
            raise InferError("no")
        return {"y": np.array([1 + sum(float(array[0]) for array in request.inputs.values())], np.float32)}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_graph_gives_what_its_steps_give_one_by_one(data: Any) -> None:
    count = data.draw(st.integers(1, 6))
    sources = [data.draw(st.sets(st.sampled_from(range(number + 1)), min_size=1)) for number in range(count)]
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=1))
    leaves = data.draw(st.booleans())
    models, steps, values, failed = [], [], [1.0], set()
    for number, taken in enumerate(sources):
        name = f"node{number}"
        models.append(Node(name, tuple(TensorSpec(f"i{one}", "FP32", [1]) for one in sorted(taken)), number in bad))
        ins = {f"i{one}": "in" if one == 0 else f"t{one}" for one in taken}
        steps.append((name, ins, {"y": "out" if number == count - 1 else f"t{number + 1}"}))
        values.append(1 + sum(values[one] for one in taken))
    runner = ensemble(*data.draw(st.permutations(steps))) if any("in" in step[1].values() for step in steps) else None
    needed = {step.model for step in EnsemblePlan.of_config(runner.config).needed(["out"])} if runner else set()
    failed = {f"node{number}" for number in bad} & needed

    async def main() -> None:
        async with serving(*models, runner, memory=True) as served:
            client = served.connect_in_memory()
            await client.send(infer(1))
            if leaves:
                await trio.sleep(data.draw(st.floats(0, 2)))
                await client.close()
                await trio.testing.wait_all_tasks_blocked()
            else:
                answer = await client.answer()
                if failed:
                    assert answer.status == 400
                    assert f"model '{min(failed)}': no" in answer.json["error"]
                else:
                    assert answer.json["outputs"][0]["data"] == [values[-1]]
            assert all(queue.running == 0 for queue in served.server.statistics().models.values())

    if runner is not None:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_tritonclient_asks_an_ensemble_like_any_model() -> None:
    import tritonclient.http as triton

    async with serving(Stage(seconds=0), Stage("triple", 3, seconds=0), ensemble(*CHAIN)) as served:

        def ask() -> Any:
            client = triton.InferenceServerClient(f"127.0.0.1:{served.port}")
            tensor = triton.InferInput("in", [2], "FP32")
            tensor.set_data_from_numpy(np.array([1, 2], np.float32))
            try:
                return client.infer("e", [tensor]).as_numpy("out").tolist()
            finally:
                client.close()

        assert await trio.to_thread.run_sync(ask) == [6, 12]
