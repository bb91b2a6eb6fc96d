"""The front that Amazon SageMaker calls: `/ping`, `/invocations`, and `/models` for endpoints of many models.

A request to `/invocations` is one of the protocol's own, without a path that says which model and which action: the
operator says that once. Endpoints of many models name the model in the path; they load and unload models themselves,
from directories that the platform has put on disk, and expect its statuses: 409 for a model that is loaded, 404 for one
that is not, 507 when there is no memory for another.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

import attrs
import trio

from trio_infer.api.bodies import read_body
from trio_infer.api.cloud import ByContentType, bad_json_is_400, check_method, default_model
from trio_infer.api.generate import answer_generate, answer_generate_stream
from trio_infer.api.infer import answer_infer
from trio_infer.api.v2 import V2
from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.fields import clip, found
from trio_infer.protocol.infer import read_document
from trio_infer.protocol.jsontext import dumps
from trio_infer.wire.serve import JSON, Exchange

__all__ = ["InferenceType", "ModelDirectories", "SageMaker"]

MIME: Final = "application/vnd.sagemaker-triton.binary+json"

InferenceType: TypeAlias = Literal["infer", "generate", "generate_stream"]

DEFAULT_MODEL: Final = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"

_MODELS: Final = re.compile(r"/models(?:/(?P<name>[^/]+)(?P<invoke>/invoke)?)?/?")

_NO_MEMORY: Final = re.compile(r"out of memory|MemoryError|cannot allocate memory", re.IGNORECASE)


class ModelDirectories(Protocol):
    """Loads models from directories that are named on request, under any name."""

    async def load_directory(self, name: str, directory: Path) -> None:
        """Load the model in `directory`, and return when it is ready.

        Raises:
            InferError: it can't be loaded.
        """

    async def unload(self, name: str) -> None:
        """Unload the model; return when it answers no more.

        Raises:
            InferError: there is none.
        """


@attrs.define
class SageMaker:
    """The application of the port that SageMaker calls.

    Args:
        v2: knows the models.
        model: that `/invocations` asks; None if there is only one.
        inference_type: what it asks of it.
        directories: loads models for endpoints of many models; None if models are not loaded on request.

    Attributes:
        urls: of the models that the platform has had loaded, by name.
    """

    v2: V2
    model: str | None = attrs.field(default=None, kw_only=True)
    inference_type: InferenceType = attrs.field(default="infer", kw_only=True)
    directories: ModelDirectories | None = attrs.field(default=None, kw_only=True)
    urls: dict[str, str] = attrs.field(init=False, factory=dict)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request, or raise the error that is to be answered."""
        path = exchange.target.partition("?")[0]
        if path == "/ping":
            exchange.target = "/v2/health/ready"
            await self.v2(exchange)
            return
        if path == "/invocations":
            check_method(exchange, "POST")
            await self._infer(exchange, default_model(self.v2, self.model, DEFAULT_MODEL))
            return
        match = _MODELS.fullmatch(path)
        if match is None:
            raise InferError("Not Found", ErrorCode.NOT_FOUND)
        if match["invoke"]:
            check_method(exchange, "POST")
            await self._infer(exchange, match["name"])
            return
        self.v2.restrictions.check("model-repository", exchange.header)
        if match["name"]:
            check_method(exchange, "GET", "DELETE")
            await (self._show if exchange.method == "GET" else self._unload)(exchange, match["name"])
        else:
            check_method(exchange, "GET", "POST")
            await (self._list if exchange.method == "GET" else self._load)(exchange)

    async def _infer(self, exchange: Exchange, name: str) -> None:
        model, limits = self.v2.find(exchange, name, None), self.v2.limits
        with bad_json_is_400():
            if self.inference_type == "infer":
                await answer_infer(
                    exchange, model, limits, ByContentType(MIME), compressed=False, forwarded=self.v2.forwarded
                )
            elif self.inference_type == "generate":
                await answer_generate(exchange, model, limits)
            else:
                await answer_generate_stream(exchange, model, limits)

    # -- Endpoints of many models -----------------------------------------------------------------------------------

    async def _list(self, exchange: Exchange) -> None:
        await _respond(exchange, {"models": [_entry(name, url) for name, url in self.urls.items()]})

    async def _show(self, exchange: Exchange, name: str) -> None:
        await _respond(exchange, _entry(name, self._url(name)))

    async def _load(self, exchange: Exchange) -> None:
        if self.directories is None:
            raise InferError(
                "models are not loaded on request: start the server with --model-control-mode=explicit",
                ErrorCode.UNSUPPORTED,
            )
        name, url = await self._read(exchange)
        if name in self.urls:
            raise InferError(f"model '{clip(name)}' is already loaded", status=409)
        self.urls[name] = url  # before it is loaded, so that a second request for it hears of the first
        loaded = False
        try:
            with exchange.guard("finish"):
                await self._load_directory(name, trio.Path(url))
            loaded = True
        finally:
            if not loaded:
                del self.urls[name]
        await _respond(exchange, _entry(name, url))

    async def _load_directory(self, name: str, directory: trio.Path) -> None:
        assert self.directories is not None
        try:
            if not await directory.is_dir():
                raise InferError(f"'url' must be a directory on this machine, got {found(str(directory))}")
            await self.directories.load_directory(name, Path(directory))
        except OSError as error:  # too long for a path
            raise InferError(f"'url' can't be read: {error.strerror}") from error
        except InferError as error:
            if _NO_MEMORY.search(error.message):
                raise InferError(error.message, status=507) from error
            raise

    async def _unload(self, exchange: Exchange, name: str) -> None:
        self._url(name)
        assert self.directories is not None
        with exchange.guard("finish"):
            await self.directories.unload(name)
        self.urls.pop(name, None)
        await _respond(exchange, {})

    def _url(self, name: str) -> str:
        if name not in self.urls:
            raise InferError(f"model '{clip(name)}' is not loaded", ErrorCode.NOT_FOUND)
        return self.urls[name]

    async def _read(self, exchange: Exchange) -> tuple[str, str]:
        body = await read_body(exchange, self.v2.limits)
        with bad_json_is_400():
            document = read_document(body, self.v2.limits)
        values = []
        for key in ("model_name", "url"):
            value = document.get(key)
            if not isinstance(value, str) or not value or "\0" in value:
                got = found(value) if key in document else "none"
                raise InferError(f"'{key}' must be a string that is not empty, got {got}")
            values.append(value)
        return values[0], values[1]


def _entry(name: str, url: str) -> dict[str, str]:
    return {"modelName": name, "modelUrl": url}


async def _respond(exchange: Exchange, value: object) -> None:
    await exchange.respond(200, [JSON], [dumps(value)])
