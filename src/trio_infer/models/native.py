"""Models written for this server: an async function, under trio's own cancellation.

A model is an object. What it takes and gives is said by plain attributes, so that attrs classes, dataclasses and
ordinary classes all do; what it does is `infer`, either `async def ... return` (one response) or `async def ...
yield` (any number). Cancellation is trio's: when the client leaves, the `await` that `infer` is in raises
`trio.Cancelled`, and an async generator is closed, in the task that iterates it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import attrs

from trio_infer.errors import ErrorCode, InferError, ModelLoadError, RunCancelled
from trio_infer.models.host import Host
from trio_infer.models.joining import begin_joined, join, split
from trio_infer.models.runner import Attend, Instance, Stops
from trio_infer.models.triton_current import request_flag
from trio_infer.models.triton_tensors import reshaped
from trio_infer.protocol.model_config import ModelConfig, Ragged
from trio_infer.protocol.queueing import Batching, Queueing
from trio_infer.protocol.values import Array, InferRequest, InferResponse, Send, Signature, TensorSpec

__all__ = ["Model", "ModelOutput", "NativeRunner"]

ModelOutput: TypeAlias = "InferResponse | Mapping[str, Array]"
"""What `infer` gives: a response, or just its outputs by name."""


class Model:
    """Base class of native models: subclass it, say what it takes and gives, write `infer`.

    Attributes:
        name: in URLs; required.
        version: a positive number, as text.
        inputs, outputs: tensors with their datatypes and shapes (without the batch dimension).
        max_batch_size: 0 for no batch dimension; else the most rows a request may have.
        instances: how many runs of `infer` may go on at once; None (the default) for any number. Others wait, by
            priority, and first come first served.
        queueing: how long requests may wait and how many may, and how many priority levels there are; None (the
            default) for no limits and no levels.
        batching: how requests are joined, so that one run of `infer` answers several; None (the default) if each runs
            by itself. Needs a `max_batch_size`; without a number of `instances` there is one.
        response_cache: whether answers are kept, and identical requests share one run, if the server has a cache; only
            for a model that returns, and that answers the same question in the same way.
        on_disconnect: `"cancel"` or `"finish"`; None (the default) leaves it to the server.
    """

    name: str
    version: str = "1"
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    max_batch_size: int = 0
    instances: int | None = None
    queueing: Queueing | None = None
    batching: Batching | None = None
    response_cache: bool = False
    on_disconnect: Literal["cancel", "finish"] | None = None

    def infer(self, request: InferRequest) -> Awaitable[ModelOutput] | AsyncIterator[ModelOutput]:
        """Answer one request: write it as `async def`, with `return` for one response or with `yield` for any number.

        Args:
            request: its inputs are checked against `inputs`; arrays may be read-only. With `batching` it may be several
                requests' rows in one, and each output must have as many; its `parts` are theirs.

        Raises:
            InferError: to choose the code and the words that the client gets.

        Cancellation: the client's leaving raises `trio.Cancelled` at the next checkpoint. Clean-up in `finally` that
        awaits is cancelled too, unless it is shielded; a shield must have a time limit.
        """
        raise NotImplementedError  # never reached: a runner takes only models whose `infer` is `async def`

    async def load(self) -> None:
        """Called once, before the first request. An exception here stops the server from starting."""

    async def unload(self) -> None:
        """Called once, after the last request."""


class NativeRunner:
    """Runs a `Model` in the task of its request.

    Args:
        model: its attributes are read once, here.
        config: from a repository; None if its code says everything.
        directory: the model's, in a repository.
        forget: undoes the import of its code.

    Raises:
        ModelLoadError: no name, a name given twice, an `infer` that is not async.
    """

    stops: Stops = "checkpoint"

    def __init__(
        self,
        model: Model,
        *,
        config: ModelConfig | None = None,
        directory: Path | None = None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.directory = directory
        self.forget = forget
        name = getattr(model, "name", "")
        if not name or not isinstance(name, str):
            raise ModelLoadError(type(model).__name__, "it has no `name`; set one on the class or the instance")
        self._streams = self.check_infer()
        for specs in (model.inputs, model.outputs):
            names = [spec.name for spec in specs]
            if len(set(names)) < len(names):
                raise ModelLoadError(name, f"a tensor name is given twice in {names}")
        if model.instances is not None and model.instances < 1:
            raise ModelLoadError(name, f"`instances` must be at least 1 or None, got {model.instances}")
        if model.batching is not None and (self._streams or model.max_batch_size < 1):
            what = (
                "an `infer` that returns, not one that yields" if self._streams else "a `max_batch_size` of 1 or more"
            )
            raise ModelLoadError(name, f"`batching` needs {what}")
        self.instances: int | None = model.instances
        self.signature: Signature = Signature(
            name=name,
            version=str(model.version),
            inputs=tuple(model.inputs),
            outputs=tuple(model.outputs),
            max_batch_size=model.max_batch_size,
            decoupled=self._streams,
        )
        self.config: ModelConfig = (
            ModelConfig.of_signature(self.signature, instances=model.instances)
            if config is None
            else config.with_code(self.signature, instances=model.instances)
        ).with_scheduling(model.queueing, model.batching)
        if model.response_cache:
            self.config = self.config.with_response_cache()
        joining = None if config is None else config.batching or config.sequencing
        asked = model.batching is not None or joining is not None
        self.joins: bool = asked and not self._streams
        if self.joins and self.instances is None:
            self.instances = 1
        self._reshapes = self.config.reshapes
        self._ragged = Ragged() if self._streams else self.config.ragged

    def check_infer(self) -> bool:
        """Whether the model gives any number of responses, and not just one.

        Raises:
            ModelLoadError: it can't be run.
        """
        infer = self.model.infer
        streams = inspect.isasyncgenfunction(infer)
        if not streams and not inspect.iscoroutinefunction(infer):
            raise ModelLoadError(self.model.name, f"`{type(self.model).__name__}.infer` must be `async def`")
        return streams

    @property
    def on_disconnect(self) -> Literal["cancel", "finish"] | None:
        return self.model.on_disconnect

    async def load(self, host: Host) -> None:
        try:
            await self.model.load()
        except Exception as error:
            raise ModelLoadError(self.signature.name, f"{type(error).__name__}: {error}") from error

    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        instance.begin()
        try:
            if not self._streams:
                response = await self._infer(request)
            else:
                await self._stream(request, send)
        except SystemExit as error:  # the server isn't one model's to end
            raise InferError(f"the model left by SystemExit: {error}", ErrorCode.INTERNAL) from error
        finally:
            instance.end()
        if not self._streams:
            await send(response)

    async def _stream(self, request: InferRequest, send: Send) -> None:
        with _OnBehalf(request):
            stream = cast("AsyncGenerator[ModelOutput, None]", self.model.infer(self.to_model(request)))
            async with aclosing(stream):
                async for output in stream:
                    await send(self.response_of(output))

    def begin_batch(self, batch: Sequence[tuple[Instance, InferRequest]]) -> Sequence[Attend]:
        """Join them, and run them as one; see `joining`."""
        return begin_joined(self._infer, batch, self.signature.name, self._ragged)

    async def _infer(self, request: InferRequest) -> InferResponse:
        if self._ragged and not request.parts:  # the model sees one form, whether it is alone or not
            (response,) = split(await self._infer(join([request], self._ragged)), [request], self._ragged)
            return response
        with _OnBehalf(request):
            return self.response_of(await cast("Awaitable[ModelOutput]", self.model.infer(self.to_model(request))))

    def to_model(self, request: InferRequest) -> InferRequest:
        """The request with inputs in the shapes that the model sees."""
        if not self._reshapes:
            return request
        return attrs.evolve(request, inputs=self._reshaped(request.inputs, to_model=True))

    async def unload(self) -> None:
        try:
            await self.model.unload()
        finally:
            self.forget()

    async def ready(self) -> bool:
        """Always."""
        return True

    def kill(self) -> bool:
        """Nothing to do: its runs end with their tasks."""
        return False

    def response_of(self, output: Any) -> InferResponse:
        """What the model gave, as a response with outputs in the shapes that clients see.

        Raises:
            InferError: INTERNAL: it is neither a response nor a mapping.
        """
        response = InferResponse(output) if isinstance(output, Mapping) else output
        if isinstance(response, InferResponse):
            if not self._reshapes:
                return response
            return attrs.evolve(response, outputs=self._reshaped(response.outputs, to_model=False))
        raise InferError(
            f"`{type(self.model).__name__}.infer` must give a mapping of outputs or an InferResponse, "
            f"got {type(output).__name__}",
            ErrorCode.INTERNAL,
        )

    def _reshaped(self, arrays: Mapping[str, Array], *, to_model: bool) -> dict[str, Array]:
        """Between the shapes that clients see and those that the model sees."""
        changed = dict(arrays)
        for name in self._reshapes.keys() & changed.keys():
            dims, model_dims = self._reshapes[name]
            shapes = (dims, model_dims) if to_model else (model_dims, dims)
            changed[name] = reshaped(changed[name], *shapes, batched=self.signature.max_batch_size > 0)
        return changed


class _OnBehalf:
    """Within this, `trio_infer.is_cancelled` speaks of a request, in this task and in threads that it starts."""

    __slots__ = ("_request", "_token")

    def __init__(self, request: InferRequest) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._token = request_flag.set(self._request.is_cancelled)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        request_flag.reset(self._token)
        if kind is RunCancelled:  # which must not get further than this: nobody catches it
            raise InferError("the model left its run, as nobody wanted it any more", ErrorCode.CANCELLED) from None
