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
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.models.host import Host
from trio_infer.models.runner import Instance
from trio_infer.models.triton_work import Work, attend
from trio_infer.models.worker.calls import Calls
from trio_infer.models.worker.codec import CodecError, Kind, Message, RemoteTraceback
from trio_infer.models.worker.in_hand import InHand
from trio_infer.models.worker.process import Launch, Worker, died_of
from trio_infer.models.worker.records import levels, relay
from trio_infer.models.worker.result import Result
from trio_infer.models.worker.works import RemoteWork
from trio_infer.protocol.values import InferRequest, InferResponse
from trio_infer.protocol.worker_settings import WorkerSettings

__all__ = ["FINALIZING", "REAPING", "Plan", "Slot"]

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
LONGEST_FOR_SPARES: Final = 300.0
"""For a spare that never was ready: there may be no memory for one more, and each try costs minutes of work."""

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
        deaf_after: see `Work`.
        decoupled, settings: of the model; asked each time, as loading may complete the configuration.
        samples: what a process that is started while the model serves runs first.
        changed: called when an instance has become free, or has died.
        on_over: called when a request's work is over.
        on_exit: called with why a process has ended: "killed", "crashed", "worn" or "unloaded".
    """

    name: str
    setting: dict[str, Any]
    host: Host
    deaf_after: float
    decoupled: Callable[[], bool]
    settings: Callable[[], WorkerSettings]
    samples: Sequence[InferRequest]
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
        self.done: trio.Event = trio.Event()
        self._plan = plan
        self._config = config
        self._settings: dict[str, Any] | None = None
        self._imported: Result = Result()
        self._loaded: Result = Result()
        self._scope = trio.CancelScope()
        self._numbers = itertools.count(1)
        self._worker: Worker | None = None
        self._hand: InHand | None = None
        self._calls: Calls | None = None
        self._waits_for_settings = False
        self._is_spare = False
        self._ready = self._asks_ready = self._finalized = self._finishing = False
        self._fault: ModelLoadError | None = None
        self._killed_why = ""
        self._struck = self._resting = self._ending = False
        self._questions: dict[int, Result] = {}

    # ---- what it is asked

    @property
    def works(self) -> Mapping[int, RemoteWork]:
        """The requests that its process has in hand, by number."""
        return {} if self._hand is None else self._hand.works

    @property
    def alive(self) -> bool:
        """Whether it has a process whose model is initialized."""
        return self._ready

    @property
    def free(self) -> bool:
        """Whether a request can begin."""
        return self._ready and self._hand is not None and not self._hand.occupied and not self._finishing

    @property
    def worn(self) -> bool:
        """Whether its process has served as many requests as it is to."""
        return self._hand is not None and 0 < self._plan.settings().max_requests <= self._hand.begun

    @property
    def fit(self) -> bool:
        """Whether nothing speaks against its serving: no process that is missing, worn, or about to be killed."""
        return self._ready and self._hand is not None and not self.worn and not self._hand.doomed

    def start(self, settings: dict[str, Any] | None = None) -> None:
        """Start its first process.

        Args:
            settings: what `INITIALIZE` says, for a spare, whose failures to load are its own; None to `configure` it.
        """
        if settings is not None:
            self._settings = settings
            self._is_spare = True
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
        assert self._hand is not None
        return self._hand.begin(batch)

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
        elif not self._ending:
            self._scope.cancel()
        await self.done.wait()

    def stand_in(self, other: Slot) -> None:
        """Take another one's place, and with it its CPUs; the other one's next process has those of this one."""
        self._launch, other._launch = other._launch, self._launch
        if self._worker is not None and self._launch.cpus != other._launch.cpus:
            self._worker.pin(self._launch.cpus)

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
                    self._struck = self._resting = self._ending = False
                    finished = await self._one_process()
                    if self._finishing or not self._loaded.known_good:
                        return
                    willed = self._struck or self._finalized or finished
                    longest = LONGEST_FOR_SPARES if self._is_spare else LONGEST_PAUSE
                    pause = 0.0 if willed else min(max(FIRST_PAUSE, 2 * pause), longest)
                    # The first crash after good work costs no pause; `pause` is that of the next one.
                    await trio.sleep(0 if pause <= FIRST_PAUSE else pause)
        except Exception:
            log.exception("model instance '%s' ends by a bug in the server", self.name)
        finally:
            for result in (self._imported, self._loaded):
                result.fail(self._load_error("it was stopped while it was loaded"))
            self.done.set()
            self._plan.changed()

    async def _one_process(self) -> int:
        """Start a process, and return when it is reaped: how many requests it has finished."""
        self._fault, self._killed_why, self._finalized = None, "", False
        try:
            worker = Worker(self.name, self._launch)
        except OSError as error:
            self._buried(f"no process can be started: {error}", 0)
            return 0
        plan = self._plan
        self._worker = worker
        hand = self._hand = InHand(
            plan.name,
            self.name,
            worker,
            deaf_after=plan.deaf_after,
            decoupled=plan.decoupled,
            settings=plan.settings,
            settle=self._settle,
            changed=plan.changed,
            on_over=plan.on_over,
        )
        why, by_itself = "", False
        try:
            async with trio.open_nursery() as nursery:
                self._calls = Calls(plan.host, plan.name, worker, hand.works, nursery)
                worker.run(Kind.IMPORT, {**plan.setting, "levels": levels(plan.name), "config": self._config})
                why = await worker.listen(self._handle)
                by_itself = not why
                self._calls.close()
                nursery.cancel_scope.cancel()
        finally:
            self._ready = self._waits_for_settings = False
            self._worker = self._calls = None
            if not by_itself:
                worker.kill()
                with trio.move_on_after(REAPING, shield=True):
                    await worker.gone()
            self._buried(why and f"it sent {why}", worker.reap())
            self._hand = None  # and with it, at the latest, the memory goes
        return hand.finished

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
            limit = self._launch.memory_limit >> 20
            hint = f"; perhaps for want of memory, as `memory_limit_mb` is {limit}" if limit else ""
            error = self._fault or self._load_error(
                why or f"its process died ({died_of(code)}) while the model was being {stage}{hint}"
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
        if self._hand is not None:
            text = f"model instance '{self.name}' {what} while it ran this request; {doing}"
            self._hand.fail(lambda: InferError(text, ErrorCode.INTERNAL))
        for question in self._questions.values():
            question.fail(self._load_error(what))
        self._plan.changed()

    def _load_error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(self._plan.name, reason, where=Path(self._plan.setting["file"]))

    # ---- what its process says

    def _handle(self, message: Message) -> None:
        assert self._hand is not None
        assert self._calls is not None
        do = _HANDLERS.get(message.kind)
        try:
            if do is not None:
                do(self, message)
            elif not self._hand.handle(message):
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
        self._config = None  # asked but once
        if self._loaded.known_good:
            assert self._hand is not None
            trio.lowlevel.spawn_system_task(self._warm_up, self._hand, name=f"<warm-up of {self.name}>")
            return
        self._ready = True
        self._loaded.set(None)
        self._plan.changed()

    async def _warm_up(self, hand: InHand) -> None:
        """Run the model's samples in a process that is started while the model serves, and let it serve, too."""
        try:
            for sample in self._plan.samples:
                (work,) = hand.begin([(Instance(0), sample)])
                if isinstance(work, InferError):
                    raise work
                await attend(work, _drop)
        except InferError as error:
            log.error("model instance '%s' fails on its warm-up: %s", self.name, error)
        if self._hand is not hand or self._finishing:
            return  # it has died of it, or isn't wanted any more
        log.info("model instance '%s' is ready%s", self.name, ", as a spare" if self._is_spare else " again")
        self._ready, self._is_spare = True, False
        self._plan.changed()

    def _on_finalized(self, _: Message) -> None:
        self._finalized = True

    def _on_log(self, message: Message) -> None:
        relay(self._plan.name, message.fields)

    def _on_readiness(self, message: Message) -> None:
        question = self._questions.get(message.fields["id"])
        if question is not None:
            question.set(message.fields["ready"])

    # ---- the end of a process

    def _settle(self) -> None:
        """See to what waited for the requests in hand to be over, or not to be wanted any more."""
        worker, hand = self._worker, self._hand
        if worker is None or hand is None or not self._ready or self._finishing:
            return
        if hand.works and not hand.wanted:
            self._strike(worker, hand)
        elif not hand.works and (self._resting or (self.worn and not self._plan.settings().spares)):
            self._ready, self._ending = False, True
            worker.run(Kind.FINALIZE, {})
            self._plan.changed()
            trio.lowlevel.spawn_system_task(self._allow_end, worker, name=f"<end of {self.name}>")

    def _strike(self, worker: Worker, hand: InHand) -> None:
        """Kill a process that works for nobody; all that waits for it needn't wait until it is reaped."""
        milliseconds = round(1000 * (self._plan.settings().grace or 0))
        self._killed_why = f"a cancelled request was still running after cancel_grace_ms {milliseconds}"
        self._struck, self._ready = True, False
        worker.kill()
        if self._calls is not None:
            self._calls.close()
        text = f"model instance '{self.name}' was killed ({self._killed_why})"
        hand.fail(lambda: InferError(text, ErrorCode.INTERNAL))
        self._plan.changed()

    async def _allow_end(self, worker: Worker) -> None:
        with trio.move_on_after(FINALIZING):
            await worker.ended.wait()
        if worker.ended.is_set():
            return
        log.error("model instance '%s' took more than %g s to finalize, and was killed", self.name, FINALIZING)
        worker.kill()


async def _drop(_: InferResponse) -> None:
    """Nobody needs it."""


_HANDLERS: Final[dict[Kind, Callable[[Slot, Message], None]]] = {
    Kind.IMPORTED: Slot._on_imported,
    Kind.FAULT: Slot._on_fault,
    Kind.READY: Slot._on_ready,
    Kind.FINALIZED: Slot._on_finalized,
    Kind.LOG: Slot._on_log,
    Kind.READINESS: Slot._on_readiness,
}
