"""Runs Triton's Python models in processes of their own, one for each instance; see this package's head."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import trio

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.models.host import Host
from trio_infer.models.runner import Attend, Instance
from trio_infer.models.triton_execute import READY_WITHIN
from trio_infer.models.triton_loading import initialize_arguments
from trio_infer.models.triton_runner import TritonRunner
from trio_infer.models.triton_work import Work, attend
from trio_infer.models.worker.slot import REAPING, Plan, Slot
from trio_infer.models.worker.works import RemoteWork
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, Send

__all__ = ["ProcessRunner"]

FINALIZING: Final = 10.0
"""Seconds that a model's `finalize` has, with the end of its process; a server that goes down allows 5."""

log: logging.Logger = logging.getLogger("trio_infer.models")


async def _attend(work: RemoteWork | InferError, send: Send) -> None:
    if isinstance(work, InferError):
        raise work
    await attend(work, send)


Batch = Sequence[tuple[Instance, InferRequest]]
Begun = Sequence[RemoteWork | InferError]


class _Late:
    """A batch whose instance has lost its process: it begins when there is one again, with those who still wait."""

    def __init__(self, batch: Batch) -> None:
        self._waiting = dict(enumerate(batch))
        self._begun: dict[int, RemoteWork | InferError] = {}
        self._ready = trio.Event()

    def attends(self, wait: Callable[[int], Awaitable[Slot]], begin: Callable[[Slot, Batch], Begun]) -> list[Attend]:
        index = self._waiting[0][0].index
        trio.lowlevel.spawn_system_task(self._begin, index, wait, begin, name="<batch that waits for its process>")
        return [partial(self._attend, number) for number in self._waiting]

    async def _begin(
        self, index: int, wait: Callable[[int], Awaitable[Slot]], begin: Callable[[Slot, Batch], Begun]
    ) -> None:
        try:
            slot = await wait(index)
            if self._waiting:
                self._begun = dict(zip(self._waiting, begin(slot, list(self._waiting.values())), strict=True))
        except InferError as error:  # it is being unloaded
            self._begun = {number: InferError(error.message, error.code) for number in self._waiting}
        finally:
            self._ready.set()

    async def _attend(self, number: int, send: Send) -> None:
        try:
            await self._ready.wait()
        except trio.Cancelled:
            del self._waiting[number]
            if number in self._begun:  # in the tick in which it began
                begun = self._begun[number]
                if isinstance(begun, RemoteWork):
                    begun.leave()
            raise
        await _attend(self._begun[number], send)


class ProcessRunner(TritonRunner):
    """Runs one version of a Triton Python model, each instance in a process of its own; see `TritonRunner` for the
    arguments.
    """

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._slots: list[Slot] = []
        self._closing = False
        self._changed = trio.lowlevel.ParkingLot()

    def configure(self, config: ModelConfig) -> None:
        super().configure(config)
        self._grace = config.cancel_grace

    # ---- loading and unloading

    async def load(self, host: Host) -> None:
        """Start a process for each instance, side by side, and have the model import and initialize in each.

        Raises:
            ModelLoadError: the model's code raised, or isn't a model, or died; instances that were ready are finalized.

        Cancellation: leaves as soon as the processes are killed (some 10 ms).
        """
        plan = Plan(
            name=self.config.name,
            setting={"model": self.config.name, "file": str(self.file), "backend": self.backend, "sys_path": sys.path},
            host=host,
            decoupled=lambda: self.signature.decoupled,
            deaf_after=self._deaf_after,
            grace=lambda: self._grace,
            changed=self._tell,
            on_over=self._work_over,
        )
        try:
            self._add_slots(plan, asked=self._auto_complete)
            completed = await self._slots[0].imported()
            if completed is not None:
                self.configure(ModelConfig.of_json(completed, name=self.config.name, where=self.file))
            self.config.check_tensors()
            self._add_slots(plan)
            for slot in self._slots[self.instances :]:
                slot.kill()
            for index, slot in enumerate(self._slots[: self.instances]):
                slot.configure(self._settings(index))
            for slot in self._slots[: self.instances]:
                await slot.loaded()
        except ModelLoadError:
            with trio.move_on_after(FINALIZING):
                await self._finish()
            raise
        except BaseException:
            await self._kill()
            raise

    def _add_slots(self, plan: Plan, *, asked: bool = False) -> None:
        while len(self._slots) < self.instances:
            index = len(self._slots)
            config = self.config.as_json() if asked and index == 0 else None
            slot = Slot(plan, self.config.instance_name(index), config)
            self._slots.append(slot)
            slot.start()

    def _settings(self, index: int) -> dict[str, Any]:
        signature = self.signature
        return {
            "model": signature.name,
            "version": signature.version,
            "instance": self.config.instance_name(index),
            "inputs": [[spec.name, spec.datatype.value, spec.shape] for spec in signature.inputs],
            "outputs": [[spec.name, spec.datatype.value, spec.shape] for spec in signature.outputs],
            "max_batch_size": signature.max_batch_size,
            "decoupled": signature.decoupled,
            "reshapes": self.config.reshapes,
            "cancel_tasks": self.config.cancel_tasks,
            "arguments": initialize_arguments(self.config, index, self.version, str(self.directory)),
        }

    async def unload(self) -> None:
        """Wait until no work is going on, then have each instance finalize, and end its process.

        Cancellation: leaves as soon as the processes that still run are killed (some 10 ms).
        """
        self._closing = True
        self._changed.unpark_all()
        try:
            while self._works:
                await self._changed.park()
            with trio.move_on_after(FINALIZING) as limit:
                await self._finish(keep=True)
            if limit.cancelled_caught:
                log.error("model '%s' took more than %g s to finalize, and was killed", self.config.name, FINALIZING)
        finally:
            await self._kill()

    def kill(self) -> bool:
        """End all processes now; requests in them fail."""
        self._closing = True
        for slot in self._slots:
            slot.kill("the model is being unloaded")
        self._tell()
        return True

    async def _finish(self, *, keep: bool = False) -> None:
        try:
            async with trio.open_nursery() as nursery:
                for slot in self._slots:
                    nursery.start_soon(slot.finish)
        finally:
            if not keep:
                await self._kill()

    async def _kill(self) -> None:
        for slot in self._slots:
            slot.kill()
        with trio.move_on_after(2 * REAPING, shield=True):
            for slot in self._slots:
                await slot.done.wait()

    async def ready(self) -> bool:
        """Whether an instance lives, and its model's `is_ready` says so.

        Cancellation: just stops waiting.
        """
        slot = next((slot for slot in self._slots if slot.alive), None)
        if slot is None:
            return False
        with trio.move_on_after(READY_WITHIN + 1):  # the worker has a limit itself; this one is for one that hangs
            return await slot.ready()
        return False

    # ---- running

    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        """Run one request, as soon as an instance has a process that lives.

        Raises:
            InferError: with the code of the response's error, or INTERNAL if the model raised, gave what it must not,
            or its process died.

        Cancellation: leaves at once, and senders are no longer waited for. The model learns of it by `is_cancelled()`;
        if it goes on for longer than `cancel_grace_ms`, its process is killed.
        """
        slot = await self._slot(instance.index)
        (work,) = self._begin(slot, [(instance, request)])
        await _attend(work, send)

    def begin_batch(self, batch: Sequence[tuple[Instance, InferRequest]]) -> Sequence[Attend]:
        """Have `execute` called with all of them, as soon as an instance has a process that lives."""
        slot = self._free_slot(batch[0][0].index)
        if slot is not None:
            return [partial(_attend, work) for work in self._begin(slot, batch)]
        return _Late(batch).attends(self._slot, self._begin)

    def _begin(self, slot: Slot, batch: Sequence[tuple[Instance, InferRequest]]) -> Sequence[RemoteWork | InferError]:
        begun = slot.begin(batch)
        self._works.update(work for work in begun if isinstance(work, RemoteWork))
        return begun

    def _free_slot(self, index: int) -> Slot | None:
        # The instance's own; while that one has died, any that is free.
        return next((slot for slot in (self._slots[index], *self._slots) if slot.free), None)

    async def _slot(self, index: int) -> Slot:
        while True:
            if self._closing:
                raise InferError(
                    f"Request for model '{self.config.name}' which is not ready: it is being unloaded",
                    ErrorCode.UNAVAILABLE,
                )
            slot = self._free_slot(index)
            if slot is not None:
                return slot
            await self._changed.park()

    def _tell(self) -> None:
        self._changed.unpark_all()

    def _work_over(self, work: Work) -> None:
        self._works.discard(work)
        self._tell()
