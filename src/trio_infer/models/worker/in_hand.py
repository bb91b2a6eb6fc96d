"""In the server: the requests that one worker process has in hand, and what it says of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from trio_infer.errors import ErrorCode, InferError, Rescheduled
from trio_infer.models.runner import Instance
from trio_infer.models.triton_work import Work
from trio_infer.models.worker.codec import Kind, Message, read_error, unpack
from trio_infer.models.worker.memory import CELLS
from trio_infer.models.worker.process import Worker
from trio_infer.models.worker.records import levels
from trio_infer.models.worker.works import RemoteWork
from trio_infer.protocol.values import InferRequest, InferResponse
from trio_infer.protocol.worker_settings import WorkerSettings

__all__ = ["InHand"]

log: logging.Logger = logging.getLogger("trio_infer.models")


class InHand:
    """The requests of one process. Used in the trio thread only.

    Args:
        model, name: the model's and the instance's.
        worker: the process.
        deaf_after: see `Work`.
        decoupled, settings: of the model; asked at each request, as loading may complete the configuration.
        settle: called when one of them is over, or overdue.
        changed: called when the process can take another one.
        on_over: called when one of them is over.

    Attributes:
        works: all of them, by number.
        overdue: those that go on after their grace, for nobody.
        occupied: by so many of which `execute` hasn't returned.
        begun, finished: how many there have been, and of how many `execute` has returned.
    """

    def __init__(
        self,
        model: str,
        name: str,
        worker: Worker,
        *,
        deaf_after: float,
        decoupled: Callable[[], bool],
        settings: Callable[[], WorkerSettings],
        settle: Callable[[], None],
        changed: Callable[[], None],
        on_over: Callable[[Work], None],
    ) -> None:
        self.works: dict[int, RemoteWork] = {}
        self.overdue: set[RemoteWork] = set()
        self.occupied: int = 0
        self.begun: int = 0
        self.finished: int = 0
        self._model = model
        self._name = name
        self._worker = worker
        self._decoupled = decoupled
        self._deaf_after = deaf_after
        self._settings = settings
        self._settle = settle
        self._changed = changed
        self._on_over = on_over
        self._numbers = itertools.count(1)
        self._cells: list[int] = []
        self._next_cell = 0
        self._levels = levels(model)

    @property
    def doomed(self) -> bool:
        """Whether one of them goes on for nobody, and all that share its run with it: its process is to be killed."""
        return any(work.doomed for work in self.overdue)

    @property
    def wanted(self) -> bool:
        """Whether somebody still wants one of them, or may be about to."""
        return len(self.overdue) < len(self.works)

    def begin(self, batch: Sequence[tuple[Instance, InferRequest]]) -> list[RemoteWork | InferError]:
        """Send one request to the model, or several that `execute` is called with at once.

        Returns:
            for each its work, or why there is no room for it.
        """
        begun: list[RemoteWork | InferError] = []
        for instance, request in batch:
            try:
                begun.append(self._begin(instance, request, last=len(batch) == 1))
                self.occupied += 1  # at once: one that fails gives its instance back, and the next may begin in here
            except InferError as error:
                begun.append(error)
        works = [work for work in begun if isinstance(work, RemoteWork)]
        self.begun += len(works)
        if len(batch) > 1 and works:
            self._worker.run(Kind.EXECUTE, {})
        for work in works:
            work.fellows = works
        return begun

    def _begin(self, instance: Instance, request: InferRequest, *, last: bool) -> RemoteWork:
        worker = self._worker
        if self._next_cell >= CELLS and not self._cells:
            raise InferError(f"model instance '{self._name}' has {CELLS} requests in hand", ErrorCode.UNAVAILABLE)
        now = levels(self._model)
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
            self._name,
            instance,
            worker,
            number,
            cell,
            decoupled=self._decoupled(),
            deaf_after=self._deaf_after,
            grace=self._settings().grace,
            on_overdue=self._note_overdue,
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

    def fail(self, error: Callable[[], InferError]) -> None:
        """The process is gone, or as good as that: nothing more comes of any of them.

        Args:
            error: makes what one of them is told.
        """
        for work in [*self.works.values()]:
            work.died(error())

    def handle(self, message: Message) -> bool:
        """See to what the process says of a request; whether it is that."""
        do = _HANDLERS.get(message.kind)
        if do is None:
            return False
        do(self, message)
        return True

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
        self.finished += 1
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
            log.error("model instance '%s' failed after its final response", self._name, exc_info=error.__cause__)

    def _on_detached(self, message: Message) -> None:
        work = self.works.get(message.fields["n"])
        if work is not None:
            self._free(work)
            work.detach()

    def _on_dropped(self, message: Message) -> None:
        work = self.works.get(message.fields["n"])
        if work is not None:
            work.drop()

    def _response(self, message: Message) -> InferResponse | InferError | None:
        fields = message.fields
        if fields.get("again"):
            return Rescheduled()
        if fields.get("error") is not None:
            return read_error(fields["error"])
        if "tensors" not in fields:
            return None
        return InferResponse(unpack(fields["tensors"], message.tail, self._worker.memory), fields["parameters"])

    def _free(self, work: RemoteWork) -> None:
        """`execute` has returned: the process takes the next request."""
        if work.occupies:
            work.occupies = False
            self.occupied -= 1
            if not self.occupied:
                self._changed()

    def _note_overdue(self, work: RemoteWork) -> None:
        self.overdue.add(work)
        self._settle()

    def _over(self, work: Work) -> None:
        assert isinstance(work, RemoteWork)
        self.works.pop(work.number, None)
        self.overdue.discard(work)
        self._worker.memory.cells[work.cell] = 0
        self._cells.append(work.cell)
        self._on_over(work)
        self._settle()


_HANDLERS: Final[dict[Kind, Callable[[InHand, Message], Any]]] = {
    Kind.RESPONSE: InHand._on_response,
    Kind.FINISHED: InHand._on_finished,
    Kind.DETACHED: InHand._on_detached,
    Kind.DROPPED: InHand._on_dropped,
}
