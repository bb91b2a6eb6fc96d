"""In the server: what a worker's model asks for, done by its `Host`; `remote_bridge` is the counterpart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import StandIn
from trio_infer.models.host import Host
from trio_infer.models.inner import ask
from trio_infer.models.triton_log import log_as
from trio_infer.models.worker.codec import Kind, Message, error_fields, unpack
from trio_infer.models.worker.jobs import LIMIT
from trio_infer.models.worker.process import Worker
from trio_infer.models.worker.works import RemoteWork
from trio_infer.protocol.values import InferRequest, InferResponse

__all__ = ["Calls"]

log: logging.Logger = logging.getLogger("trio_infer.models")


class Calls:
    """One worker's. All that it asks for is cancelled when it is gone.

    Args:
        host: the server.
        model: the model's name.
        worker: who asks.
        works: all that it has in hand, by number.
        nursery: ends with the worker.
    """

    def __init__(
        self, host: Host, model: str, worker: Worker, works: Mapping[int, RemoteWork], nursery: trio.Nursery
    ) -> None:
        self._host = host
        self._model = model
        self._worker = worker
        self._works = works
        self._nursery = nursery
        self._asked: dict[int, _Asked] = {}

    def handle(self, message: Message) -> None:
        """Do what a message asks for.

        Raises:
            KeyError: it asks for nothing.
        """
        _HANDLERS[message.kind](self, message)

    def close(self) -> None:
        """The worker is gone: nobody wants the rest."""
        for asked in [*self._asked.values()]:
            asked.parent.stop()

    # ---- one answer

    def _call(self, message: Message) -> None:
        fields = message.fields
        arrays = unpack(fields["tensors"], message.tail, self._worker.memory)
        self._nursery.start_soon(self._answer, fields["id"], fields["what"], fields["arguments"], arrays)

    async def _answer(self, number: int, what: str, arguments: list[Any], arrays: Mapping[str, Any]) -> None:
        fields: dict[str, Any] = {"id": number}
        try:
            fields["value"] = await self._do(what, arguments, arrays)
        except InferError as error:
            fields["error"] = error_fields(error)
        except Exception as error:
            log.exception("model '%s' asked for %s, and that failed", self._model, what)
            fields["error"] = error_fields(InferError(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL))
        self._worker.control(Kind.ANSWER, fields)

    async def _do(self, what: str, arguments: list[Any], arrays: Mapping[str, Any]) -> Any:
        match what, arguments:
            case "load_model", [str(name), (str() | None) as config]:
                await self._host.load_model(name, config, {path: array.tobytes() for path, array in arrays.items()})
            case "unload_model", [str(name), bool(dependents)]:
                await self._host.unload_model(name, unload_dependents=dependents)
            case "is_model_ready", [str(name), str(version)]:
                return self._host.is_model_ready(name, version)
            case "register_metric", [str(name), str(description), ("counter" | "gauge" | "histogram") as kind]:
                self._host.register_metric(name, description, kind)
            case "change_metric", _:
                return self._change(arguments)
            case _:
                raise InferError(f"a worker process asked for '{what}', which is not known", ErrorCode.INTERNAL)
        return None

    def _change(self, arguments: list[Any]) -> float:
        name, labels, operation, value, buckets = arguments
        return self._host.change_metric(name, labels, operation, value, buckets)

    def _tell(self, message: Message) -> None:
        try:
            self._change(message.fields["arguments"])
        except InferError as error:
            log_as(self._model, logging.WARNING, error.message)

    # ---- requests of the model's own

    def _ask(self, message: Message) -> None:
        fields = message.fields
        request = InferRequest(
            fields["model"],
            fields["version"],
            unpack(fields["tensors"], message.tail, self._worker.memory),
            fields["request"],
            fields["parameters"],
            tuple(fields["outputs"]),
        )
        works = [self._works[number] for number in fields["jobs"] if number in self._works] or [*self._works.values()]
        lives = [work.life for work in works if work.life is not None]
        asked = self._asked[fields["id"]] = _Asked(fields["id"], self._worker, StandIn(lives))
        self._nursery.start_soon(self._run, asked, request)

    async def _run(self, asked: _Asked, request: InferRequest) -> None:
        try:
            error = await ask(self._host, asked.parent, request, asked.send)
        finally:
            del self._asked[asked.number]
        fields = {"id": asked.number, "last": True, "error": None if error is None else error_fields(error)}
        self._worker.control(Kind.REPLY, fields)

    def _ask_cancel(self, message: Message) -> None:
        asked = self._asked.get(message.fields["id"])
        if asked is not None:
            asked.parent.stop()

    def _ask_credit(self, message: Message) -> None:
        asked = self._asked.get(message.fields["id"])
        if asked is not None:
            asked.credit()


# Not the bound methods in the object itself: a cycle would keep the memory for longer than the worker lives.
_HANDLERS: Final[dict[Kind, Callable[[Calls, Message], None]]] = {
    Kind.CALL: Calls._call,
    Kind.TELL: Calls._tell,
    Kind.ASK: Calls._ask,
    Kind.ASK_CANCEL: Calls._ask_cancel,
    Kind.ASK_CREDIT: Calls._ask_credit,
}


class _Asked:
    """A request that the model made."""

    def __init__(self, number: int, worker: Worker, parent: StandIn) -> None:
        self.number = number
        self.parent = parent
        self._worker = worker
        self._on_their_way = 0
        self._room = trio.Event()

    async def send(self, response: InferResponse) -> None:
        """A response: pass it on, and wait while too many are."""
        fields = {"id": self.number, "last": False, "parameters": dict(response.parameters)}
        try:
            self._worker.control(Kind.REPLY, fields, response.outputs)
        except MemoryError as error:
            raise InferError(str(error), ErrorCode.UNAVAILABLE) from None
        self._on_their_way += 1
        while self._on_their_way >= LIMIT:
            self._room = trio.Event()
            await self._room.wait()

    def credit(self) -> None:
        """One was taken."""
        self._on_their_way -= 1
        self._room.set()
