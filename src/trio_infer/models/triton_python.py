"""Runs Triton's Python models as they are: `TritonPythonModel` in a `model.py`.

Everything of a model (its import, `initialize`, `execute`, `finalize`) runs in a worker thread, and nothing of it in
the trio thread. Facts that this rests on (trio 0.35, Python 3.11, 2 cores):

- A task leaves `to_thread.run_sync(..., abandon_on_cancel=True)` 0.2 ms after its cancel, and the thread runs on. That
  is why an instance's being taken follows the thread (`triton_work`) and not the task.
- In the thread, `is_cancelled()` costs 0.05 microseconds and `trio.from_thread.check_cancelled()` 0.2; a model that
  uses either stops within its own step (0.2 ms median for a tight loop). The second raises `trio.Cancelled`, which is
  let out: nobody waits for it any more.
- An abandoned thread keeps its token of the limiter until it ends. With trio's own limiter of 40, a burst of cancelled
  requests would stop whatever else uses threads, so each runner has a limiter of its own, without a limit: how many
  threads there are is decided by the instances.
- A thread that holds the GIL in one C call stops the whole server meanwhile (1.1 s measured for one regular
  expression). Nothing here can help that; such a model belongs in a process of its own.

Raising an exception in the thread from outside was rejected (`PyThreadState_SetAsyncExc`): it can strike in the middle
of a `finally`, and in 1 of 40 tries it went past the `except` that was there for it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import trio

from trio_infer.errors import InferError, ModelLoadError
from trio_infer.models.host import Host
from trio_infer.models.joining import AT_ONCE
from trio_infer.models.local_bridge import LocalBridge
from trio_infer.models.runner import Attend, Instance
from trio_infer.models.triton_execute import Executor, Loaded
from trio_infer.models.triton_hooks import import_class
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_loading import initialize, make_model
from trio_infer.models.triton_runner import TritonRunner
from trio_infer.models.triton_work import Work, attend, only_response
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, InferResponse, Send

__all__ = ["TritonPythonRunner"]

log: logging.Logger = logging.getLogger("trio_infer.models")


class TritonPythonRunner(TritonRunner):
    """Runs one version of a Triton Python model in threads; see `TritonRunner` for its arguments."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._limiter = trio.CapacityLimiter(math.inf)
        self._lock = threading.Lock()  # for the two below, which loading and unloading threads share
        self._loaded: list[Loaded] = []
        self._closing = False
        self._idle = trio.Event()

    def configure(self, config: ModelConfig) -> None:
        super().configure(config)
        self._executor = Executor(self.signature, config.reshapes, cancel_tasks=config.cancel_tasks)

    # ---- loading and unloading

    async def load(self, host: Host) -> None:
        """Import the model and initialize each instance, one after the other.

        Raises:
            ModelLoadError: the model's code raised, or isn't a model; instances that were ready are finalized.

        Cancellation: leaves at once; the thread stops after the instance that it is at, and what is ready is finalized
        by `unload`, or by the thread if that comes later.
        """
        self.configure(await self._in_thread(self._load, trio.lowlevel.current_trio_token(), host))

    def _load(self, token: trio.lowlevel.TrioToken, host: Host) -> ModelConfig:
        config = self.config
        try:
            for index in range(config.instance_count):
                trio.from_thread.check_cancelled()
                bridge = LocalBridge(host, token, config.name, partial(self._in_hand, index))
                code = ModelCode(config.name, self.file, bridge)
                try:
                    auto_complete = self._auto_complete and index == 0
                    made, config = make_model(self.import_class(code), code, config, auto_complete=auto_complete)
                    initialize(made, code, config, index, self.version)
                except BaseException:
                    code.forget()
                    raise
                self._keep(Loaded(config.instance_name(index), code, made))
        except ModelLoadError:
            self._finalize()
            raise
        return config

    def import_class(self, code: ModelCode) -> type[Any]:
        """The model's class, as an instance's own; called in a thread."""
        return import_class(code, self.program)

    def _in_hand(self, index: int) -> list[Work]:
        return [work for work in self._works if work.index == index]

    def _keep(self, loaded: Loaded) -> None:
        with self._lock:
            self._loaded.append(loaded)
            closing = self._closing
        if closing:
            self._finalize()

    async def unload(self) -> None:
        """Wait until no work is going on, then finalize each instance.

        Cancellation: leaves at once. Instances that the model still works in are then not finalized; a `finalize` that
        has begun goes on in its thread.
        """
        self._closing = True
        while self._works:
            self._idle = trio.Event()
            await self._idle.wait()
        await self._in_thread(self._finalize)

    def _finalize(self) -> None:
        with self._lock:
            going, self._loaded = self._loaded, []
        for loaded in going:
            loaded.finalize()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=self._limiter)

    async def ready(self) -> bool:
        """Whether it is loaded, and the first instance's `is_ready`, if it has one, says so.

        Cancellation: leaves at once; the model's answer is then not waited for.
        """
        loaded = self._loaded[:1]
        return bool(loaded) and bool(await self._in_thread(loaded[0].is_ready))

    def kill(self) -> bool:
        """A thread can't be stopped."""
        return False

    # ---- running

    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        """Run one request.

        Raises:
            InferError: with the code of the response's error, or INTERNAL if the model raised or gave what it must not;
                then the traceback was logged.

        Cancellation: leaves at once, and senders are no longer waited for. The model learns of it by `is_cancelled()`
        or `trio.from_thread.check_cancelled()`. Whatever it still gives or raises is dropped.
        """
        loaded = self._loaded[instance.index]
        work = self._begin(loaded, instance)
        try:
            if self.signature.decoupled:
                await self._run_decoupled(loaded, work, request, send)
            else:
                response = await self._in_thread(self._executor.execute, loaded, work, request)
                if response is None:
                    response = await only_response(work)
                work.leave()
                await send(response)
        finally:
            work.leave()

    def begin_batch(self, batch: Sequence[tuple[Instance, InferRequest]]) -> Sequence[Attend]:
        """Call `execute` with all of them, in one thread."""
        loaded = self._loaded[batch[0][0].index]
        works = [self._begin(loaded, instance) for instance, _ in batch]
        scope = trio.CancelScope()
        jobs = list(zip(works, (request for _, request in batch), strict=True))
        trio.lowlevel.spawn_system_task(self._run_batch, loaded, jobs, scope, name=f"<batch of {loaded.name}>")
        return [partial(self._attend, work, works, scope) for work in works]

    def _begin(self, loaded: Loaded, instance: Instance) -> Work:
        work = Work(
            loaded.name,
            instance,
            decoupled=self.signature.decoupled,
            deaf_after=self._deaf_after,
            on_over=self._work_over,
        )
        self._works.add(work)
        return work

    async def _run_batch(
        self, loaded: Loaded, jobs: Sequence[tuple[Work, InferRequest]], scope: trio.CancelScope
    ) -> None:
        with scope:
            results = await self._in_thread(self._executor.execute_batch, loaded, jobs)
            for (work, _), result in zip(jobs, results, strict=True):
                work.give(result if isinstance(result, InferResponse) else None)
            for number, (work, _) in enumerate(jobs):
                if number % AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
                work.returned.set()

    async def _attend(self, work: Work, fellows: Sequence[Work], scope: trio.CancelScope, send: Send) -> None:
        try:
            await attend(work, send)
        finally:
            if all(fellow.left for fellow in fellows):
                scope.cancel(reason="all clients of the batch have left")  # for `trio.from_thread.check_cancelled`

    def _work_over(self, work: Work) -> None:
        self._works.discard(work)
        self._idle.set()

    async def _run_decoupled(self, loaded: Loaded, work: Work, request: InferRequest, send: Send) -> None:
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._feed, loaded, work, request)
            try:
                while (response := await work.next()) is not None:
                    await send(response)
            except Exception as error:
                failure = error  # raised outside, where no exception group is made of it
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _feed(self, loaded: Loaded, work: Work, request: InferRequest) -> None:
        try:
            await self._in_thread(self._executor.execute, loaded, work, request)
        except InferError as error:
            if error is not work.error:
                log.error("model instance '%s' failed after its final response", loaded.name, exc_info=error.__cause__)
