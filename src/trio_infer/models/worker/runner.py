"""Runs Triton's Python models in processes of their own, one for each instance; see this package's head."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import trio

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.models.host import Host
from trio_infer.models.runner import Attend, Instance, Stops
from trio_infer.models.triton_execute import READY_WITHIN
from trio_infer.models.triton_loading import initialize_arguments
from trio_infer.models.triton_runner import TritonRunner
from trio_infer.models.triton_work import Work, attend
from trio_infer.models.worker.process import Launch
from trio_infer.models.worker.slot import FINALIZING, REAPING, Plan, Slot
from trio_infer.models.worker.works import RemoteWork
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, Send

__all__ = ["ProcessRunner"]

SPARE_AFTER: Final = 1.0
"""Seconds from a model's being ready until the first process of its spares is started."""

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

    Beside the instances there may be *spares*: processes whose model is initialized, and that wait to take the place of
    one that is killed, has died or is worn. They are first started when the model has been ready for a second, so that
    a server that starts has all its models ready first. What was replaced is a spare when it is ready again.

    Attributes:
        spare_after: seconds from the model's being ready until its spares are started.
        exits: how many processes have ended so far, by why; see `Plan.on_exit`.
        samples: what a new process runs before it serves; see `KeepsSamples`.
    """

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._slots: list[Slot] = []
        self._places: list[Slot] = []  # by instance: the slot that serves for it; the others are spares
        self._closing = trio.Event()
        self.exits: Counter[str] = Counter()
        self.samples: list[InferRequest] = []
        self.spare_after: float = SPARE_AFTER
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def stops(self) -> Stops:
        return super().stops if self._worker.grace is None else "process"

    @property
    def workers(self) -> dict[str, int]:
        """How many processes there are now: `serving` in an instance's place, `spare`, and `starting`."""
        ready = [slot in self._places for slot in self._slots if slot.alive]
        running = sum(not slot.done.is_set() for slot in self._slots)
        return {"serving": sum(ready), "spare": len(ready) - sum(ready), "starting": running - len(ready)}

    def configure(self, config: ModelConfig) -> None:
        super().configure(config)
        self._worker = config.worker
        self._stateful = config.sequencing is not None

    # ---- loading and unloading

    async def load(self, host: Host) -> None:
        """Start a process for each instance, side by side, and have the model import and initialize in each.

        Raises:
            ModelLoadError: the model's code raised, or isn't a model, or died; instances that were ready are finalized.

        Cancellation: leaves as soon as the processes are killed (some 10 ms).
        """
        plan = Plan(
            name=self.config.name,
            setting={"model": self.config.name, "file": str(self.file), "program": self.program, "sys_path": sys.path},
            host=host,
            deaf_after=self._deaf_after,
            decoupled=lambda: self.signature.decoupled,
            settings=lambda: self._worker,
            samples=self.samples,
            changed=self._tell,
            on_over=self._work_over,
            on_exit=self._count_exit,
        )
        self._check_cpus()
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
            self._places = self._slots[: self.instances]
            if self._worker.spares:
                trio.lowlevel.spawn_system_task(self._add_spares, plan, name=f"<spares of {self.config.name}>")
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
            kind = self.config.instance_kind(index)
            slot = Slot(plan, self.config.instance_name(index), kind, self._launch(index), config)
            self._slots.append(slot)
            slot.start()

    async def _add_spares(self, plan: Plan) -> None:
        with trio.move_on_after(self.spare_after):
            await self._closing.wait()
        if self._closing.is_set():
            return
        for index, names in self.config.spare_names.items():
            for name in names:
                spare = Slot(plan, name, self.config.instance_kind(index), self._launch(len(self._slots)))
                self._slots.append(spare)
                spare.start(self._settings(index, name))

    def _launch(self, index: int) -> Launch:
        worker = self._worker
        cpus = worker.cpus[index % len(worker.cpus)] if worker.cpus else frozenset[int]()
        return Launch(worker.environment, cpus, worker.memory_limit)

    def _check_cpus(self) -> None:
        if not self._worker.cpus:
            return
        if not hasattr(os, "sched_getaffinity"):
            raise ModelLoadError(self.config.name, "`cpu_affinity` needs Linux", where=self.config.where)
        missing = frozenset[int]().union(*self._worker.cpus) - os.sched_getaffinity(0)
        if missing:
            reason = (
                f"`cpu_affinity` names the CPUs {sorted(missing)}, but the server may use only "
                f"{sorted(os.sched_getaffinity(0))}"
            )
            raise ModelLoadError(self.config.name, reason, where=self.config.where)

    def _settings(self, index: int, name: str = "") -> dict[str, Any]:
        """What `INITIALIZE` says.

        Args:
            index: of the instance.
            name: of the spare that is to be able to stand in for it; "" for itself.
        """
        signature = self.signature
        return {
            "model": signature.name,
            "version": signature.version,
            "instance": name or self.config.instance_name(index),
            "inputs": [[spec.name, spec.datatype.value, spec.shape] for spec in signature.inputs],
            "outputs": [[spec.name, spec.datatype.value, spec.shape] for spec in signature.outputs],
            "max_batch_size": signature.max_batch_size,
            "decoupled": signature.decoupled,
            "reshapes": self.config.reshapes,
            "cancel_tasks": self.config.cancel_tasks,
            "arguments": initialize_arguments(self.config, index, self.version, str(self.directory), name),
        }

    async def unload(self) -> None:
        """Wait until no work is going on, then have each instance finalize, and end its process.

        Cancellation: leaves as soon as the processes that still run are killed (some 10 ms).
        """
        self._closing.set()
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
        self._closing.set()
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
        if it goes on for longer than `cancel_grace_ms`, its process is killed, and a spare takes its place.
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
        """The process that a request of this instance can begin in, if there is one now."""
        own = self._places[index]
        if own.free and own.fit:
            return own
        if not own.fit:
            spare = self._spare_for(index)
            if spare is not None:
                self._places[index] = spare
                spare.stand_in(own)
                if own.worn:
                    own.rest()
                return spare
        if own.free or self._stateful:  # what a sequence left in its process is in no other one
            return own if own.free else None
        # While its own has died, any that is free.
        return next((slot for slot in self._slots if slot.free), None)

    def _spare_for(self, index: int) -> Slot | None:
        kind = self._places[index].kind
        spares = (slot for slot in self._slots if slot.kind == kind and slot not in self._places)
        return next((slot for slot in spares if slot.free and slot.fit), None)

    async def _slot(self, index: int) -> Slot:
        while True:
            if self._closing.is_set():
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

    def _count_exit(self, why: str) -> None:
        self.exits[why] += 1

    def _work_over(self, work: Work) -> None:
        self._works.discard(work)
        self._tell()
