"""In the server: one instance of a model, whatever becomes of its processes.

    STARTING ── the module is imported ── the model initialized ── READY ── … ── FINALIZING ── gone
        ▲                                                            │
        └───── at once, then after 0.1, 0.2, ... 5 s ────────────────┘  the process died

A process that dies takes with it the requests that it had in hand, and nothing else: each is told what it died of, and
the instance is started again. The pause before that grows while processes die without having finished one request, so
that a model that dies at each start, or at each request, doesn't keep the machine busy; a single crash costs no pause.

The last rung of a cancel. A request that was cancelled and goes on for longer than `cancel_grace_ms` is *overdue*. A
process in which every request is overdue is killed; while one of them isn't, it works for somebody. Whoever waits for
its instance doesn't wait for its end: the requests are over, and the slot is out of use, in the instant of the SIGKILL,
and a spare has the next request while this one is reaped and started anew behind it. A process that has served
`max_requests` is *worn*: it is let go of in the same way, but politely, when nothing is in hand.

Each instance is a system task, because requests come and go while it stays; it ends when it is unloaded, and by
trio's own cancel when the run ends. Whatever way it ends, its process is killed and reaped before.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError, ModelLoadError, Rescheduled
from trio_infer.models.host import Host
from trio_infer.models.runner import Instance
from trio_infer.models.triton_work import Work
from trio_infer.models.worker.calls import Calls
from trio_infer.models.worker.codec import CodecError, Kind, Message, RemoteTraceback, read_error, unpack
from trio_infer.models.worker.memory import CELLS
from trio_infer.models.worker.process import Launch, Worker, died_of
from trio_infer.models.worker.records import levels, relay
from trio_infer.models.worker.result import Result
from trio_infer.models.worker.works import RemoteWork
from trio_infer.protocol.values import InferRequest, InferResponse

__all__ = ["FINALIZING", "REAPING", "Plan", "Slot"]

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
FINALIZING: Final = 10.0
"""Seconds that a model's `finalize` has, with the end of its process; a server that goes down allows 5."""
REAPING: Final = 5.0
"""Seconds after SIGKILL in which a process is gone: 20 ms with 2 GiB resident; only a broken driver keeps it."""

log: logging.Logger = logging.getLogger("trio_infer.models")


@attrs.frozen(eq=False)
class Plan:
    """What all instances of one model have in common.

    Args:
        name: the model's.
        setting: what `IMPORT` says.
        host: what the model may ask of the server.
        decoupled: asked of the configuration, which may be completed on the way.
        deaf_after: see `Work`.
        grace: see `RemoteWork`.
        max_requests: asked of the configuration: that a process serves before it is worn; 0 for any number.
        has_spares: asked of the configuration: whether there is somebody to take the place of a process that is worn.
        changed: called when an instance has become free, or has died.
        on_over: called when a request's work is over.
        on_exit: called with why a process has ended: "killed", "crashed", "worn" or "unloaded".
    """

    name: str
    setting: dict[str, Any]
    host: Host
    decoupled: Callable[[], bool]
    deaf_after: float
    grace: Callable[[], float | None]
    max_requests: Callable[[], int]
    has_spares: Callable[[], bool]
    changed: Callable[[], None]
    on_over: Callable[[Work], None]
    on_exit: Callable[[str], None]


class Slot:
    """One instance. `start` it in the trio thread; then `imported` and `loaded` tell of its first process.

    Args:
        plan: the model's.
        name: the instance's.
        kind: of the instance: those of one kind can stand in for each other.
        launch: how its processes are started.
        config: as JSON, to be completed by the model; None if it isn't asked.
    """

    def __init__(
        self, plan: Plan, name: str, kind: Hashable, launch: Launch, config: dict[str, Any] | None = None
    ) -> None:
        self.name = name
        self.kind = kind
        self._launch = launch
        self.works: dict[int, RemoteWork] = {}
        self.done: trio.Event = trio.Event()
        self._plan = plan
        self._config = config
        self._settings: dict[str, Any] | None = None
        self._imported: Result = Result()
        self._loaded: Result = Result()
        self._scope = trio.CancelScope()
        self._numbers = itertools.count(1)
        self._worker: Worker | None = None
        self._calls: Calls | None = None
        self._waits_for_settings = False
        self._ready = self._asks_ready = self._finalized = self._finishing = False
        self._occupied = 0  # by so many requests whose `execute` hasn't returned
        self._fault: ModelLoadError | None = None
        self._killed_why = ""
        self._finished = 0
        self._begun = 0
        self._struck = self._resting = False
        self._cells: list[int] = []
        self._next_cell = 0
        self._levels: dict[str, int] = {}
        self._questions: dict[int, Result] = {}

    # ---- what it is asked

    @property
    def alive(self) -> bool:
        """Whether it has a process whose model is initialized."""
        return self._ready

    @property
    def free(self) -> bool:
        """Whether a request can begin."""
        return self._ready and not self._occupied and not self._finishing

    @property
    def worn(self) -> bool:
        """Whether its process has served as many requests as it is to."""
        return 0 < self._plan.max_requests() <= self._begun

    @property
    def fit(self) -> bool:
        """Whether nothing speaks against its serving: no process that is missing, worn, or about to be killed."""
        return self._ready and not self.worn and not any(work.doomed for work in self.works.values())

    def start(self, settings: dict[str, Any] | None = None) -> None:
        """Start its first process.

        Args:
            settings: what `INITIALIZE` says, for a spare, whose failures to load are its own; None to `configure` it.
        """
        if settings is not None:
            self._settings = settings
            self._imported.set(None)
            self._loaded.set(None)
        trio.lowlevel.spawn_system_task(self._keep, name=f"<instance {self.name}>")

    async def imported(self) -> dict[str, Any] | None:
        """Wait for the model's import; the configuration as it completed it, None if it has no say in it.

        Raises:
            ModelLoadError: it failed.
        """
        config: dict[str, Any] | None = await self._imported.wait()
        return config

    def configure(self, settings: dict[str, Any]) -> None:
        """Let the model be initialized, now and in each process to come.

        Args:
            settings: what `INITIALIZE` says.
        """
        self._settings = settings
        if self._waits_for_settings and self._worker is not None:
            self._waits_for_settings = False
            self._worker.run(Kind.INITIALIZE, dict(settings))

    async def loaded(self) -> None:
        """Wait until the first process is ready.

        Raises:
            ModelLoadError: it failed.
        """
        await self._loaded.wait()

    def begin(self, batch: Sequence[tuple[Instance, InferRequest]]) -> list[RemoteWork | InferError]:
        """Send one request to the model, or several that `execute` is called with at once; only while `free`.

        Returns:
            for each its work, or why there is no room for it.
        """
        begun: list[RemoteWork | InferError] = []
        for instance, request in batch:
            try:
                begun.append(self._begin(instance, request, last=len(batch) == 1))
                self._occupied += 1  # at once: one that fails gives its instance back, and the next may begin in here
            except InferError as error:
                begun.append(error)
        works = [work for work in begun if isinstance(work, RemoteWork)]
        self._begun += len(works)
        if len(batch) > 1 and works and self._worker is not None:
            self._worker.run(Kind.EXECUTE, {})
        for work in works:
            work.fellows = works
        return begun

    def _begin(self, instance: Instance, request: InferRequest, *, last: bool) -> RemoteWork:
        worker = self._worker
        assert worker is not None
        if self._next_cell >= CELLS and not self._cells:
            raise InferError(f"model instance '{self.name}' has {CELLS} requests in hand", ErrorCode.UNAVAILABLE)
        now = levels(self._plan.name)
        if now != self._levels:
            self._levels = now
            worker.control(Kind.LEVELS, {"levels": now})
        if self._cells:
            cell = self._cells.pop()
        else:
            cell, self._next_cell = self._next_cell, self._next_cell + 1
        number = next(self._numbers)
        fields = {
            "n": number,
            "cell": cell,
            "id": request.id,
            "model": request.model_name,
            "version": request.model_version,
            "parameters": dict(request.parameters),
            "outputs": list(request.requested_outputs),
            "last": last,
        }
        work = RemoteWork(
            self.name,
            instance,
            worker,
            number,
            cell,
            decoupled=self._plan.decoupled(),
            deaf_after=self._plan.deaf_after,
            grace=self._plan.grace(),
            settle=self._settle,
            on_over=self._over,
        )
        self.works[number] = work
        try:
            worker.run(Kind.RUN, fields, request.inputs)
        except MemoryError as error:
            work.leave()
            raise InferError(str(error), ErrorCode.UNAVAILABLE) from None
        work.start()
        return work

    async def ready(self) -> bool:
        """What the model's `is_ready` says; True if it has none.

        Cancellation: just stops waiting.
        """
        if not (self._ready and self._worker is not None):
            return False
        if not self._asks_ready:
            return True
        number = next(self._numbers)
        question = self._questions[number] = Result()
        try:
            self._worker.control(Kind.IS_READY, {"id": number})
            return bool(await question.wait())
        except ModelLoadError:  # it died over it
            return False
        finally:
            del self._questions[number]

    async def finish(self) -> None:
        """Let the model finalize, and its process end; call it when nothing is in hand.

        Cancellation: leaves at once; `kill` ends the rest.
        """
        self._finishing = True
        if self._ready and self._worker is not None:
            self._worker.run(Kind.FINALIZE, {})
        else:
            self._scope.cancel()
        await self.done.wait()

    def rest(self) -> None:
        """Have its process end, politely, as soon as nothing is in hand, and start another."""
        self._resting = True
        self._settle()

    def kill(self, why: str = "") -> None:
        """End it now, for good."""
        self._finishing = True
        self._killed_why = self._killed_why or why
        if self._calls is not None:
            self._calls.close()
        if self._worker is not None:
            self._worker.kill()
        self._scope.cancel()

    # ---- its task

    async def _keep(self) -> None:
        pause = 0.0
        try:
            with self._scope:
                while True:
                    self._finished = self._begun = 0
                    self._struck = self._resting = False
                    await self._one_process()
                    if self._finishing or not self._loaded.known_good:
                        return
                    willed = self._struck or self._finalized or self._finished
                    pause = 0.0 if willed else min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
                    # The first crash after good work costs no pause; `pause` is that of the next one.
                    await trio.sleep(0 if pause <= FIRST_PAUSE else pause)
        except Exception:
            log.exception("model instance '%s' ends by a bug in the server", self.name)
        finally:
            for result in (self._imported, self._loaded):
                result.fail(self._load_error("it was stopped while it was loaded"))
            self.done.set()
            self._plan.changed()

    async def _one_process(self) -> None:
        self._fault, self._killed_why, self._finalized = None, "", False
        try:
            worker = Worker(self.name, self._launch)
        except OSError as error:
            self._buried(f"no process can be started: {error}", 0)
            return
        self._worker = worker
        self._cells, self._next_cell = [], 0
        self._levels = levels(self._plan.name)
        why, by_itself = "", False
        try:
            async with trio.open_nursery() as nursery:
                self._calls = Calls(self._plan.host, self._plan.name, worker, self.works, nursery)
                worker.run(Kind.IMPORT, {**self._plan.setting, "levels": self._levels, "config": self._config})
                why = await worker.listen(self._handle)
                by_itself = not why
                self._calls.close()
                nursery.cancel_scope.cancel()
        finally:
            self._ready = self._waits_for_settings = False
            self._occupied = 0
            self._worker = self._calls = None  # and with them, at the latest, the memory goes
            if not by_itself:
                worker.kill()
                with trio.move_on_after(REAPING, shield=True):
                    await worker.gone()
            self._buried(why and f"it sent {why}", worker.reap())

    def _buried(self, why: str, code: int) -> None:
        """Tell all who had to do with a process that it is gone."""
        stage = "initialized" if self._imported.known_good else "imported"
        doing = "it is being unloaded" if self._finishing else "it is being restarted"
        if self._finalized or (self._finishing and not self.works):
            what = "ended"
        elif self._killed_why:
            what = f"was killed ({self._killed_why})"
        else:
            what = f"died ({why or died_of(code)})"
        if not self._loaded.known_good:
            error = self._fault or self._load_error(
                why or f"its process died ({died_of(code)}) while the model was being {stage}"
            )
            self._imported.fail(error)
            self._loaded.fail(error)
        elif self._fault is not None:
            cause = self._fault.__cause__
            log.error("model instance '%s' can't be restarted: %s", self.name, self._fault, exc_info=cause)
        elif (self._struck or self._finalized) and not self._finishing:
            log.info("model instance '%s' %s; %s", self.name, what, doing)  # as it is meant to
        elif not self._finishing or self.works:
            log.error("model instance '%s' %s; %s", self.name, what, doing)
        willed = "killed" if self._struck else "worn" if self._finalized else "crashed"
        self._plan.on_exit("unloaded" if self._finishing else willed)
        for work in [*self.works.values()]:
            text = f"model instance '{self.name}' {what} while it ran this request; {doing}"
            work.died(InferError(text, ErrorCode.INTERNAL))
        for question in self._questions.values():
            question.fail(self._load_error(what))
        self._plan.changed()

    def _load_error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(self._plan.name, reason, where=Path(self._plan.setting["file"]))

    # ---- what its process says

    def _handle(self, message: Message) -> None:
        assert self._calls is not None
        do = _HANDLERS.get(message.kind)
        try:
            if do is not None:
                do(self, message)
            else:
                self._calls.handle(message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CodecError(f"a message {message.kind.name} that can't be: {error!r}") from error

    def _on_imported(self, message: Message) -> None:
        self._imported.set(message.fields["config"])
        if self._settings is not None and self._worker is not None:
            self._worker.run(Kind.INITIALIZE, dict(self._settings))
        else:
            self._waits_for_settings = True

    def _on_fault(self, message: Message) -> None:
        fields = message.fields
        where = None if fields["where"] is None else Path(fields["where"])
        self._fault = ModelLoadError(self._plan.name, fields["reason"], where=where, line=fields["line"])
        if fields["trace"] is not None:
            self._fault.__cause__ = RemoteTraceback(fields["trace"])
        if self._worker is not None:
            self._worker.kill()

    def _on_ready(self, message: Message) -> None:
        self._asks_ready = bool(message.fields["asks_ready"])
        self._ready = True
        self._config = None  # asked but once
        again = self._loaded.known_good
        self._loaded.set(None)
        if again:
            log.info("model instance '%s' is ready again", self.name)
        self._plan.changed()

    def _on_response(self, message: Message) -> None:
        work = self.works.get(message.fields["n"])
        response = self._response(message)
        if work is None or work.left:
            if work is not None and message.fields["final"]:
                work.put(None, final=True)
            return
        work.promise()
        work.put(response, final=bool(message.fields["final"]))

    def _on_finished(self, message: Message) -> None:
        fields = message.fields
        work = self.works.get(fields["n"])
        response = self._response(message)
        self._finished += 1
        if work is None:
            return
        began, ended = fields["times"]
        error = response if isinstance(response, InferError) else None
        work.response = None if isinstance(response, InferError) else response
        work.ran(began)
        self._free(work)
        if fields["promised"]:
            work.promise()
        work.finish(expect_more=bool(fields["more"]), error=error, ended=ended)
        if error is not None and work.error is not error and not work.left:
            log.error("model instance '%s' failed after its final response", self.name, exc_info=error.__cause__)

    def _on_detached(self, message: Message) -> None:
        work = self.works.get(message.fields["n"])
        if work is not None:
            self._free(work)
            work.detach()

    def _on_dropped(self, message: Message) -> None:
        work = self.works.get(message.fields["n"])
        if work is not None:
            work.drop()

    def _on_finalized(self, _: Message) -> None:
        self._finalized = True

    def _on_log(self, message: Message) -> None:
        relay(self._plan.name, message.fields)

    def _on_readiness(self, message: Message) -> None:
        question = self._questions.get(message.fields["id"])
        if question is not None:
            question.set(message.fields["ready"])

    def _response(self, message: Message) -> InferResponse | InferError | None:
        fields = message.fields
        if fields.get("again"):
            return Rescheduled()
        if fields.get("error") is not None:
            return read_error(fields["error"])
        if "tensors" not in fields or self._worker is None:
            return None
        return InferResponse(unpack(fields["tensors"], message.tail, self._worker.memory), fields["parameters"])

    # ---- requests

    def _free(self, work: RemoteWork) -> None:
        """`execute` has returned: the process takes the next request."""
        if work.occupies:
            work.occupies = False
            self._occupied -= 1
            if not self._occupied:
                self._plan.changed()

    def _over(self, work: Work) -> None:
        assert isinstance(work, RemoteWork)
        self.works.pop(work.number, None)
        if work.worker is self._worker:
            work.worker.memory.cells[work.cell] = 0
            self._cells.append(work.cell)
        self._plan.on_over(work)
        self._settle()

    def _settle(self) -> None:
        """See to what waited for the requests in hand to be over, or not to be wanted any more."""
        worker = self._worker
        if worker is None or not self._ready or self._finishing:
            return
        if self.works and all(work.overdue for work in self.works.values()):
            self._strike(worker)
        elif not self.works and (self._resting or (self.worn and not self._plan.has_spares())):
            self._ready = False
            worker.run(Kind.FINALIZE, {})
            self._plan.changed()
            trio.lowlevel.spawn_system_task(self._allow_end, worker, name=f"<end of {self.name}>")

    def _strike(self, worker: Worker) -> None:
        """Kill a process that works for nobody; all that waits for it needn't wait until it is reaped."""
        milliseconds = round(1000 * (self._plan.grace() or 0))
        self._killed_why = f"a cancelled request was still running after cancel_grace_ms {milliseconds}"
        self._struck, self._ready = True, False
        worker.kill()
        if self._calls is not None:
            self._calls.close()
        error = InferError(f"model instance '{self.name}' was killed ({self._killed_why})", ErrorCode.INTERNAL)
        for work in [*self.works.values()]:
            work.died(error)
        self._plan.changed()

    async def _allow_end(self, worker: Worker) -> None:
        with trio.move_on_after(FINALIZING):
            await worker.ended.wait()
            return
        log.error("model instance '%s' took more than %g s to finalize, and was killed", self.name, FINALIZING)
        worker.kill()


_HANDLERS: Final[dict[Kind, Callable[[Slot, Message], None]]] = {
    Kind.IMPORTED: Slot._on_imported,
    Kind.FAULT: Slot._on_fault,
    Kind.READY: Slot._on_ready,
    Kind.RESPONSE: Slot._on_response,
    Kind.FINISHED: Slot._on_finished,
    Kind.DETACHED: Slot._on_detached,
    Kind.DROPPED: Slot._on_dropped,
    Kind.FINALIZED: Slot._on_finalized,
    Kind.LOG: Slot._on_log,
    Kind.READINESS: Slot._on_readiness,
}
