"""One request put to a runner without a server, with an eye on what the runner does with its instance."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs
import trio

from trio_infer.lifecycle import CancelReason, Life
from trio_infer.models.runner import Attend, Instance, Runner
from trio_infer.protocol.values import InferRequest, InferResponse

__all__ = ["Visit", "WatchedInstance"]


@attrs.define(eq=False)
class WatchedInstance(Instance):
    """An instance that notes what is done with it.

    Attributes:
        started: set when it is begun.
        begun, ended: how often.
        faults: what must not be done, in words.
    """

    started: trio.Event = attrs.field(init=False, factory=trio.Event)
    begun: int = attrs.field(init=False, default=0)
    ended: int = attrs.field(init=False, default=0)
    faults: list[str] = attrs.field(init=False, factory=list)
    _thread: int = attrs.field(init=False, factory=threading.get_ident)

    def begin(self) -> None:
        self._note("begun")
        self.begun += 1
        if self.begun > 1:
            self.faults.append("the instance was begun twice for one request")
        self.started.set()
        super().begin()

    def end(self) -> None:
        self._note("ended")
        self.ended += 1
        if self.ended > self.begun:
            self.faults.append("the instance was ended without having been begun, or twice")
        super().end()

    def _note(self, what: str) -> None:
        if threading.get_ident() != self._thread:
            self.faults.append(f"the instance was {what} in another thread than trio's")


class Visit:
    """One request; make it in the trio thread, then await `run`, in a task of its own if it is to leave.

    Args:
        runner: loaded.
        request: what is asked.
        index: of the instance.
        on_send: called with this when a response comes, before it is taken.
        working: says whether the model's code is running for it; None if nobody knows.

    Attributes:
        responses: those that came.
        error: what the run raised; None if nothing.
        gone: set when the task has left the runner.
        idle: set when the instance is free again, or was never begun and the task has left.
    """

    def __init__(
        self,
        runner: Runner,
        request: InferRequest,
        *,
        index: int = 0,
        on_send: Callable[[Visit], None] | None = None,
        working: Callable[[], bool] | None = None,
    ) -> None:
        self.life: Life = Life(label="check_runner")
        self.scope: trio.CancelScope = trio.CancelScope()
        self.life.canceller = lambda reason: self.scope.cancel(reason=reason.value)
        self.idle: trio.Event = trio.Event()
        self.gone: trio.Event = trio.Event()
        self.instance: WatchedInstance = WatchedInstance(index, self.life, self._ended)
        self.request: InferRequest = attrs.evolve(request, is_cancelled=lambda: self.life.cancelled)
        self.responses: list[InferResponse] = []
        self.error: Exception | None = None
        self._runner = runner
        self._on_send = on_send
        self._working = working

    def _ended(self) -> None:
        if self._working is not None and self._working():
            self.instance.faults.append("the instance was ended while the model's code was still running")
        self.idle.set()

    async def run(self, attend: Attend | None = None) -> None:
        """Run to the end, or until it leaves.

        Args:
            attend: takes part in a batch; None to run by itself.

        Cancellation: as that of the runner's `run`.
        """
        try:
            with self.scope:
                if attend is None:
                    await self._runner.run(self.instance, self.request, self._send)
                else:
                    await attend(self._send)
        except Exception as error:
            self.error = error
        finally:
            self.gone.set()
            self.instance.started.set()  # or never
            if not self.instance.begun:
                self.idle.set()

    async def _send(self, response: InferResponse) -> None:
        if self._on_send is not None:
            self._on_send(self)
        await trio.lowlevel.checkpoint()
        self.responses.append(response)
        if self.life.cancelled:
            self.instance.faults.append("a response was sent after the cancel: the runner shields or swallows it")

    def leave(self) -> None:
        """The client leaves."""
        self.life.cancel(CancelReason.DISCONNECTED)

    def content(self) -> list[tuple[str, str, bytes]]:
        """All outputs of all responses, with their types, as bytes."""
        return [
            (name, f"{array.dtype}{array.shape}", array.tobytes() if array.dtype != object else repr(array).encode())
            for response in self.responses
            for name, array in response.outputs.items()
        ]
