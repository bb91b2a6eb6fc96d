"""Models come and go while the server runs: what is served in between, what is told, and what is cleaned up."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_infer.errors import InferError, ModelLoadError, SetupError, UnknownModelError
from trio_infer.lifecycle import CancelReason, Life
from trio_infer.limits import ControlPolicy
from trio_infer.models.host import NoHost
from trio_infer.models.runner import Instance
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, InferResponse, Send, Signature, TensorSpec
from trio_infer.scheduling.catalog import Catalog
from trio_infer.scheduling.control import ModelControl
from trio_infer.scheduling.served import ServedModel
from trio_infer.scheduling.sources import State, plan_poll
from trio_infer.wire.serve import sole

X = (TensorSpec("x", "FP32", [1]),)


@attrs.define(eq=False)
class Runner:
    """Notes what is done to it. It runs until `release`, or until it is cancelled; a deaf one until it is killed."""

    name: str
    version: str = "1"
    generation: int = 0
    fails: str = ""
    deaf: bool = False
    killable: bool = True
    slow: trio.Event | None = None
    notes: Counter[str] = attrs.field(factory=Counter)
    release: trio.Event = attrs.field(factory=trio.Event)
    instances: int | None = None
    stops: Any = "checkpoint"
    on_disconnect: Any = None
    requires: tuple[str, ...] = ()
    _killed: trio.Event = attrs.field(factory=trio.Event)

    @property
    def signature(self) -> Signature:
        return Signature(self.name, self.version, X, X)

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.of_signature(self.signature, instances=None)

    async def load(self, host: Any) -> None:
        self.notes["load"] += 1
        if self.slow is not None:
            await self.slow.wait()
        if self.fails:
            raise ModelLoadError(self.name, self.fails)

    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        assert self.notes["unload"] == 0, "nothing runs in a model that has been cleaned up"
        instance.begin()
        try:
            with trio.CancelScope(shield=self.deaf):
                await (self._killed if self.deaf else self.release).wait()
        finally:
            instance.end()
        await trio.lowlevel.checkpoint()
        await send(InferResponse({"x": np.array([self.generation], "f4")}))

    async def unload(self) -> None:
        self.notes["unload"] += 1

    async def ready(self) -> bool:
        return True

    def kill(self) -> bool:
        self.notes["kill"] += 1
        if self.killable:
            self._killed.set()
        return self.killable


@attrs.frozen
class Set:
    runners: Sequence[Runner]
    disposed: list[str]

    def dispose(self) -> None:
        self.disposed.append(self.runners[0].name)


@attrs.define
class Source:
    """Models by name: each is made anew by a function that is given how often it was."""

    makers: dict[str, Callable[[int], Sequence[Runner]]] = attrs.field(factory=dict)
    faults: dict[str, str] = attrs.field(factory=dict)
    prints: dict[str, int] = attrs.field(factory=dict)
    made: list[Runner] = attrs.field(factory=list)
    disposed: list[str] = attrs.field(factory=list)
    overrides: list[Any] = attrs.field(factory=list)
    looks: int = 0
    gone: bool = False

    async def looked_at(self, more: int) -> None:
        """Return when somebody has looked so many times more."""
        target = self.looks + more
        while self.looks < target:
            await trio.testing.wait_all_tasks_blocked(0.01)

    def scan(self) -> Mapping[str, str]:
        self.looks += 1
        if self.gone:
            raise SetupError("the model repository is gone")
        return {name: self.faults.get(name, "") for name in self.makers}

    def fingerprint(self, name: str) -> int:
        return self.prints.get(name, 0)

    def prepare(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> Set:
        if name not in self.makers:
            raise UnknownModelError(name, "no repository has it")
        self.overrides.append((config, files))
        runners = self.makers[name](sum(runner.name == name for runner in self.made))
        self.made += runners
        return Set(runners, self.disposed)

    def __getitem__(self, name: str) -> Runner:
        """The newest."""
        return [runner for runner in self.made if runner.name == name][-1]


def source(*names: str, **options: Any) -> Source:
    return Source({name: lambda count, name=name: [Runner(name, generation=count, **options)] for name in names})  # type: ignore[misc]


@attrs.frozen
class Stage:
    control: ModelControl
    catalog: Catalog
    nursery: trio.Nursery

    async def states(self) -> dict[str, State | None]:
        return {f"{name}:{version}" if version else name: state for name, version, state in await self.control.index()}

    async def ask(self, name: str, model: ServedModel | None = None) -> tuple[Life, list[float]]:
        """A request on its way; returns when it runs."""
        life, given = Life(), []
        model = model or self.catalog.find_ready(name, None)

        async def send(response: InferResponse) -> None:
            given.append(float(response.outputs["x"][0]))

        async def run() -> None:
            with trio.CancelScope() as scope:
                life.canceller = lambda _: scope.cancel()
                with suppress(InferError):  # unloaded in that very moment: told so
                    await model.infer(life, InferRequest(name, "1", {"x": np.zeros(1, "f4")}), send)

        self.nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        return life, given


@asynccontextmanager
async def stage(models: Source, mode: str = "explicit", **policy: Any) -> AsyncIterator[Stage]:
    """A control that has begun; in the end it is closed, and each model that was loaded has been cleaned up once."""
    catalog = Catalog()
    options: dict[str, Any] = {"load_model": ("*",), "unload_timeout_secs": 0.05, **policy}
    control = ModelControl(
        catalog,
        models,
        ControlPolicy(model_control_mode=mode, **options),
        host=lambda _: NoHost(),  # type: ignore[arg-type]
    )
    try:
        async with trio.open_nursery() as nursery:
            try:
                async with trio.open_nursery() as inner:
                    await inner.start(control.run)
                    yield Stage(control, catalog, nursery)
                    inner.cancel_scope.cancel()
            finally:
                await control.close()
    except BaseExceptionGroup as group:
        raise sole(group) from None
    for runner in models.made:
        assert runner.notes["unload"] == runner.notes["load"] <= 1, runner
    assert list(catalog) == []
    assert control.live == []


async def test_all_models_are_loaded_side_by_side_at_the_start() -> None:
    gate = trio.Event()
    models = source("a", "b", "c", slow=gate)
    async with trio.open_nursery() as nursery:

        async def serve(task_status: Any) -> None:
            async with stage(models, "none", model_load_thread_count=2) as on:
                assert {model.signature.name for model in on.catalog} == {"a", "b", "c"}
                task_status.started()

        nursery.start_soon(nursery.start, serve)
        with trio.fail_after(5):
            while len(models.made) < 2:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(models.made) == 2, "no more than the count at once"
        gate.set()


async def test_explicit_mode_loads_what_is_named_and_refuses_a_name_that_is_not_there() -> None:
    async with stage(source("a", "b"), load_model=("b",)) as on:
        assert await on.states() == {"a": None, "b:1": State("READY")}
    with pytest.raises(UnknownModelError, match="no repository has it"):
        async with stage(source("a"), load_model=("z",)):
            pass


async def test_every_failure_of_the_start_is_named_or_served_without() -> None:
    models = source("a")
    models.makers |= {name: lambda _, name=name: [Runner(name, fails=f"{name} broke")] for name in ("x", "y")}  # type: ignore[misc]
    models.makers["z"], models.faults["z"] = lambda _: [], "model appears in two or more repositories"
    with pytest.raises(SetupError, match=r"x broke.*y broke.*two or more") as caught:
        async with stage(models, "none"):
            pass
    assert not isinstance(caught.value, ModelLoadError)
    async with stage(models, "none", exit_on_error=False) as on:
        assert on.catalog.find("a", None) is not None
        assert not on.control.ready
        states = await on.states()
        assert states["x:1"] == State("UNAVAILABLE", "x broke")
        assert states["z"] == State("UNAVAILABLE", "model appears in two or more repositories")
        with pytest.raises(InferError, match="'x' has no available versions"):
            on.catalog.find_ready("x", None)
    async with stage(models, "none", exit_on_error=False, strict_readiness=False) as on:
        assert on.control.ready


async def test_a_model_that_can_not_be_loaded_is_tried_again_as_often_as_is_asked_for() -> None:
    models = Source({"m": lambda count: [Runner("m", fails="" if count == 2 else "not yet")]})
    async with stage(models, "none", model_load_retry_count=2):
        assert len(models.made) == 3
    with pytest.raises(ModelLoadError, match="not yet"):
        async with stage(Source({"m": models.makers["m"]}), "none", model_load_retry_count=1):
            pass


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_only_explicit_mode_loads_and_unloads_on_request(mode: str) -> None:
    async with stage(source("m"), mode) as on:
        for ask in (on.control.load, on.control.unload):
            with pytest.raises(InferError, match="not allowed if polling is enabled") as caught:
                await ask("m")
            assert caught.value.status == 503


async def test_an_unload_waits_for_its_requests_and_its_answer_tells_the_truth() -> None:
    models = source("m")
    async with stage(models, unload_timeout_secs=30) as on:
        life, given = await on.ask("m")
        done = trio.Event()

        async def unload() -> None:
            await on.control.unload("m")
            done.set()

        on.nursery.start_soon(unload)
        await trio.testing.wait_all_tasks_blocked()
        assert on.catalog.find("m", None) is None, "no new request finds it"
        assert (await on.states())["m:1"] == State("UNLOADING")
        assert on.control.ready, "it was unloaded on purpose"
        assert not done.is_set()
        models["m"].release.set()
        with trio.fail_after(5):
            await done.wait()
        assert given == [0.0]
        assert not life.cancelled
        assert (await on.states())["m:1"] == State("UNAVAILABLE", "unloaded")
        await on.control.unload("m")
        await on.control.unload("never-heard-of")
        await on.control.load("m")
        assert (await on.states())["m:1"] == State("READY")


async def test_requests_that_do_not_end_are_cancelled_at_the_limit_and_what_is_deaf_is_killed() -> None:
    models = source("m", deaf=True)
    async with stage(models) as on:
        life, _ = await on.ask("m")
        with trio.fail_after(5):
            await on.control.unload("m")
        assert life.reason is CancelReason.UNLOADED
        assert models["m"].notes["kill"] == 1


async def test_an_unload_of_what_can_not_be_stopped_is_answered_and_cleaned_up_when_it_ends() -> None:
    models = source("m", deaf=True, killable=False)
    async with stage(models) as on:
        await on.ask("m")
        with trio.fail_after(5):
            await on.control.unload("m")
        runner = models["m"]
        assert (await on.states())["m:1"] == State("UNLOADING")
        assert runner.notes["unload"] == 0
        await on.control.load("m")
        assert models["m"] is not runner, "it is loaded again beside it"
        runner._killed.set()
        with trio.fail_after(5):
            while runner.notes["unload"] == 0:
                await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_reload_swaps_when_the_new_one_is_ready_and_the_old_one_finishes_its_requests() -> None:
    models = source("m")
    async with stage(models, unload_timeout_secs=30) as on:
        _, first = await on.ask("m")
        old = models["m"]
        late = on.catalog.find_ready("m", None)
        await on.control.load("m")
        assert models["m"] is old, "its files have not changed"
        models.prints["m"] = 1
        await on.control.load("m")
        assert models["m"] is not old
        _, second = await on.ask("m")
        _, third = await on.ask("m", late)
        models["m"].release.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (first, second) == ([], [1.0])
        assert third == [1.0], "it had found the old one, and was handed on"
        assert old.notes["unload"] == 0
        old.release.set()
        with trio.fail_after(5):
            while old.notes["unload"] == 0:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert first == [0.0]


async def test_a_failing_reload_keeps_the_old_one_serving_and_says_so_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = Source({"m": lambda count: [Runner("m", generation=count, fails="broken" if count == 1 else "")]})
    async with stage(models) as on:
        models.prints["m"] = 1
        old = on.catalog.find_ready("m", None)
        with pytest.raises(ModelLoadError, match="broken"):
            await on.control.load("m")
        assert on.catalog.find_ready("m", None) is old
        assert old.ready
        assert on.control.ready
        assert (await on.states())["m:1"] == State("READY")
        assert models.disposed == ["m"]
        assert [record.getMessage() for record in caplog.records] == ["model 'm' can't be loaded: broken"]


async def test_a_reload_that_failed_fails_again_until_the_model_is_mended() -> None:
    models = Source({"m": lambda count: [Runner("m", generation=count, fails="broken" if count in {1, 2} else "")]})
    async with stage(models) as on:
        models.prints["m"] = 1
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="broken"):
                await on.control.load("m")
        await on.control.load("m")
        assert models["m"].generation == 3
        await on.control.load("m")
        assert models["m"].generation == 3, "nothing has changed since"
        models.prints["m"] = 2
        models.makers["m"] = lambda _: [Runner("m", fails="broken")]
        with pytest.raises(ModelLoadError, match="broken"):
            await on.control.load("m")
        models.prints["m"] = 1  # what is served lies there again
        await on.control.load("m")
        assert on.catalog.find_ready("m", None).ready


async def test_a_disk_that_fails_is_a_failure_to_load_and_no_end_of_the_server() -> None:
    models = source("m")

    def unreadable(count: int) -> Sequence[Runner]:
        raise OSError(24, "Too many open files")

    async with stage(models) as on:
        models.prints["m"], models.makers["m"] = 1, unreadable
        with pytest.raises(ModelLoadError, match=r"it can't be read: .*Too many open files"):
            await on.control.load("m")
        assert on.catalog.find_ready("m", None).ready
        models.gone = True
        with pytest.raises(InferError, match="the model repository is gone"):
            await on.control.index()
        with pytest.raises(UnknownModelError):
            await on.control.load("made up")
        models.gone = False
        assert list(await on.states()) == ["m:1"]


async def test_a_broken_model_fails_the_first_and_the_second_time() -> None:
    models = Source({"m": lambda _: [Runner("m", fails="no weights")]})
    async with stage(models, load_model=()) as on:
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="no weights") as caught:
                await on.control.load("m")
            assert caught.value.version == "1"
            assert (await on.states())["m:1"] == State("UNAVAILABLE", "no weights")
        assert not on.control.ready
        with pytest.raises(UnknownModelError):
            await on.control.load("z")
        assert "z" not in await on.states()


async def test_all_versions_come_together_or_not_at_all() -> None:
    models = Source({"m": lambda _: [Runner("m", "1"), Runner("m", "2", fails="second broke")]})
    async with stage(models, load_model=()) as on:
        with pytest.raises(ModelLoadError, match="second broke"):
            await on.control.load("m")
        assert on.catalog.versions("m") == []
        models.makers["m"] = lambda _: [Runner("m", "1"), Runner("m", "10"), Runner("m", "9")]
        await on.control.load("m")
        assert on.catalog.versions("m") == ["1", "9", "10"]
        assert on.catalog.find_ready("m", None).signature.version == "10"


async def test_whoever_asked_for_a_load_and_left_leaves_no_half_state() -> None:
    gate = trio.Event()
    models = source("m", slow=gate)
    async with stage(models, load_model=()) as on:
        with trio.CancelScope() as scope:
            on.nursery.start_soon(on.control.unload, "m")
            await trio.testing.wait_all_tasks_blocked()

            async def leave() -> None:
                await trio.testing.wait_all_tasks_blocked(0.01)
                scope.cancel()

            on.nursery.start_soon(leave)
            await on.control.load("m")
        assert scope.cancelled_caught
        assert (await on.states())["m:1"] == State("LOADING")
        gate.set()
        with trio.fail_after(5):
            await on.control.load("m")  # waits for its turn, and finds it loaded
        assert len(models.made) == 1


async def test_the_end_of_the_server_undoes_a_load_that_goes_on() -> None:
    models = source("m", slow=trio.Event())
    async with stage(models, load_model=()) as on:

        async def load() -> None:
            with pytest.raises(InferError, match="shutting down"):
                await on.control.load("m")

        on.nursery.start_soon(load)
        with trio.fail_after(5):
            while not models.made:
                await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_model_may_load_others_but_none_that_waits_for_it() -> None:
    models = source("a", "b", "c")
    async with stage(models, load_model=("c",)) as on:
        caught: dict[str, str] = {}

        def loading(name: str, target: str) -> Callable[[int], Sequence[Runner]]:
            class Asks(Runner):
                async def load(self, host: Any) -> None:
                    try:
                        await on.control.load_for(name, target, None, {})
                    except InferError as error:
                        caught[name] = error.message
                    await super().load(host)

            return lambda _: [Asks(name)]

        models.makers |= {"a": loading("a", "b"), "b": loading("b", "a")}
        with trio.fail_after(5):
            await on.control.load("a")
        assert caught == {"b": "model 'b' can't load or unload 'a' while it is loaded itself for that"}
        assert on.catalog.versions("b") == ["1"]
        await on.ask("c")
        with trio.fail_after(5):
            await on.control.unload_for("c", "c")  # while it runs
        assert on.catalog.versions("c") == []


@pytest.mark.parametrize(
    ("known", "found", "plan"),
    [
        ({}, {"a": 1}, (["a"], [])),
        ({"a": 1}, {"a": 1}, ([], [])),
        ({"a": 1, "b": 1}, {"a": 2}, (["a"], ["b"])),
    ],
)
def test_a_look_at_the_repositories_calls_for_what_is_new_changed_or_gone(known: Any, found: Any, plan: Any) -> None:
    assert plan_poll(known, found) == plan


async def test_poll_mode_follows_the_repositories_and_tries_a_broken_model_again_when_it_changes() -> None:
    models = source("same", "gone", "changed")
    async with stage(models, "poll", repository_poll_secs=0.05) as on:
        del models.makers["gone"]
        models.prints["changed"] = 1
        models.makers["new"] = lambda _: [Runner("new")]
        models.makers["broken"] = lambda count: [Runner("broken", fails="" if count else "broke")]
        with trio.fail_after(5):
            await models.looked_at(3)
        made = Counter(runner.name for runner in models.made)
        assert made == {"same": 1, "gone": 1, "changed": 2, "new": 1, "broken": 1}
        assert on.catalog.find("new", None) is not None
        assert on.catalog.find("gone", None) is None
        models.prints["broken"] = 1
        with trio.fail_after(5):
            await models.looked_at(3)
        assert on.catalog.find("broken", None) is not None


async def test_poll_mode_loads_what_an_ensemble_asks_once_and_tries_the_ensemble_again_when_that_is_mended() -> None:
    models = source("old")
    async with stage(models, "poll", repository_poll_secs=0.05) as on:
        models.makers["a"] = lambda _: [Runner("a", requires=("b", "c"))]
        models.makers["b"] = lambda _: [Runner("b", requires=("c",))]
        models.makers["c"] = lambda _: [Runner("c")]
        models.makers["x"] = lambda _: [Runner("x", requires=("y",))]
        models.makers["y"] = lambda count: [Runner("y", fails="" if count > 1 else "broke")]
        with trio.fail_after(5):
            await models.looked_at(3)
        made = Counter(runner.name for runner in models.made)
        assert (made["a"], made["b"], made["c"]) == (1, 1, 1)
        assert on.catalog.find("a", None) is not None
        assert on.catalog.find("x", None) is None
        assert "asks model 'y'" in (await on.states())["x:1"].reason  # type: ignore[union-attr]  # there is one
        models.prints["y"] = 1
        with trio.fail_after(5):
            await models.looked_at(3)
        assert on.catalog.find("y", None) is not None
        assert on.catalog.find("x", None) is not None, "though nothing of its own has changed"
        del models.makers["c"]
        with trio.fail_after(5):
            await models.looked_at(3)
        assert on.catalog.find("a", None) is not None, "its requests fail, and say why"


ACTIONS = st.lists(
    st.sampled_from(["load", "reload", "break", "unload", "ask", "answer", "settle", "hear nothing"]), max_size=14
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_whatever_is_asked_in_whatever_order_each_copy_is_cleaned_up_once_and_the_index_is_true(
    actions: list[str],
) -> None:
    async def scenario() -> None:
        broken, deaf = False, False
        models = Source(
            {"m": lambda count: [Runner("m", generation=count, fails="broke" if broken else "", deaf=deaf)]}
        )
        lives = []
        async with stage(models, load_model=(), unload_timeout_secs=0.01) as on:

            async def quietly(job: Any) -> None:
                with trio.move_on_after(5) as scope:
                    with suppress(ModelLoadError, InferError):  # broken; cut off by the end of the server
                        await job()
                assert not scope.cancelled_caught

            for action in actions:
                if action in ("load", "reload"):
                    models.prints["m"] = models.prints.get("m", 0) + (action == "reload")
                    on.nursery.start_soon(quietly, lambda: on.control.load("m"))
                elif action == "unload":
                    on.nursery.start_soon(quietly, lambda: on.control.unload("m"))
                elif action == "break":
                    broken = not broken
                elif action == "hear nothing":
                    deaf = not deaf
                elif action == "ask" and on.catalog.find("m", None):
                    lives.append(await on.ask("m"))
                elif action == "answer" and models.made:
                    models["m"].release.set()
                elif action == "settle":
                    await trio.testing.wait_all_tasks_blocked(0.002)
                state = (await on.states()).get("m:1")
                assert (on.catalog.find("m", None) is not None) == (state is not None and state.state == "READY")
        for life, answers in lives:
            assert not (answers and life.cancelled), "answered, or told why not"

    trio.run(scenario)
