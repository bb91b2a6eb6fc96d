"""In the server: one request in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from trio_infer.errors import InferError
from trio_infer.models.runner import Instance
from trio_infer.models.triton_work import LIMIT, Work
from trio_infer.models.worker.codec import Kind
from trio_infer.models.worker.process import Worker
from trio_infer.protocol.values import InferResponse

__all__ = ["RemoteWork"]


class RemoteWork(Work):
    """As `Work`, moved on by the worker's messages in the trio thread. It hears at once when the task leaves.

    Args:
        worker: the process that it goes to.
        number: of the request, for this process.
        cell: of its flag.
        grace: seconds that the model has to end with it after the task has left; None for any time.
        on_overdue: called if it has not.

    Attributes:
        occupies: whether the process can't take another request because of this one.
        overdue: whether the model goes on with it after the grace, for nobody.
        fellows: all that `execute` is called with at once, this one among them.
    """

    def __init__(
        self,
        label: str,
        instance: Instance,
        worker: Worker,
        number: int,
        cell: int,
        *,
        decoupled: bool,
        deaf_after: float,
        grace: float | None,
        on_overdue: Callable[[RemoteWork], None],
        on_over: Callable[[Work], None],
    ) -> None:
        super().__init__(label, instance, decoupled=decoupled, deaf_after=deaf_after, on_over=on_over)
        self.worker = worker
        self.number = number
        self.cell = cell
        self.occupies = True
        self.overdue: bool = False
        self.fellows: Sequence[RemoteWork] = (self,)
        self._grace = grace
        self._on_overdue = on_overdue
        self._owed = 0
        self._died = False

    @property
    def doomed(self) -> bool:
        """Whether it is overdue, and so are all that it shares its run with: no good will come of its process."""
        return self.overdue and all(fellow.overdue or fellow.over for fellow in self.fellows)

    @property
    def executing(self) -> bool:
        """Whether `execute` is running, as far as is known here."""
        return self._executing

    def _tell(self) -> None:
        self._notice()

    def finish(self, *, expect_more: bool, error: InferError | None = None, ended: int = 0) -> None:
        super().finish(expect_more=expect_more, error=error, ended=ended)
        self.give(self.response)
        self.returned.set()

    def ran(self, began: int) -> None:
        """When `execute` was called, in `perf_counter_ns` (which processes share); 0 if it wasn't."""
        self._instance.timing.infer_began = began

    def died(self, error: InferError) -> None:
        """The process is gone; nothing more comes."""
        self._died = True
        self.finish(expect_more=False, error=error, ended=self._instance.timing.infer_ended)

    def put(self, response: InferResponse | InferError | None, *, final: bool) -> None:
        if response is not None and len(self._waiting) >= LIMIT and not self._left:
            raise ValueError(
                "more responses than there were credits for"
            )  # and waiting for room is not for this thread
        super().put(response, final=final)

    async def next(self) -> InferResponse | None:
        response = await super().next()
        self._owed += 1
        if self._owed >= LIMIT // 2 and not self._final and not self._died:
            self.worker.control(Kind.CREDIT, {"n": self.number, "count": self._owed})
            self._owed = 0
        return response

    def leave(self) -> None:
        going_on = self._executing or (self._promised and not (self._final or self._dropped))
        if going_on and not self._left and not self._died:
            # The flag first: it is seen at once, while the message waits for the worker's control thread.
            self.worker.memory.cells[self.cell] = self.number
            self.worker.control(Kind.LEFT, {"n": self.number})
            if self._grace is not None:
                trio.lowlevel.spawn_system_task(self._allow, self._grace, name=f"<grace {self.label}>")
        super().leave()

    async def _allow(self, grace: float) -> None:
        with trio.move_on_after(grace):
            await self._ended.wait()
        if not self._over:
            self.overdue = True
            self._on_overdue(self)
