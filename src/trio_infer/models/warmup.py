"""Warm-up: requests that a model runs before anybody else's, so that the first client doesn't pay for lazy imports,
caches and compilers.

They are in the configuration (`model_warmup`), and every instance runs each of them, `count` times. A model that fails
on one isn't served: it would fail on its clients' requests, too. A runner whose instances come and go keeps them
(`KeepsSamples`), and has each new one run them before it serves.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import trio

from trio_infer.errors import InferError, ModelLoadError
from trio_infer.models.model_files import read_inside
from trio_infer.models.runner import Instance, Runner
from trio_infer.protocol.binary import bytes_to_array
from trio_infer.protocol.config_schema import enum_name
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.inputs import check_arrays
from trio_infer.protocol.values import Array, InferRequest, InferResponse

__all__ = ["KeepsSamples", "warm_up"]

DIRECTORY: Final = "warmup"
"""In the model's directory; where files of data are, as with Triton."""

LARGEST: Final = 2**30
"""Bytes of one input."""

POINTER: Final = 8
"""Bytes that an element of a BYTES tensor takes, even an empty one."""


@runtime_checkable
class KeepsSamples(Protocol):
    """A runner that starts instances anew while it serves.

    Attributes:
        samples: what each of them is to run first; filled here, when all that are there have.
    """

    samples: list[InferRequest]


async def warm_up(runner: Runner) -> None:
    """Run what the model's configuration asks for, on each instance. Call it when the model is loaded.

    Args:
        runner: loaded, with nothing else running.

    Raises:
        ModelLoadError: a sample can't be made, doesn't fit the model, or the model fails on it.

    Cancellation: leaves at once; the model stops as for a client that leaves.
    """
    signature = runner.signature
    for sample in runner.config.warm_ups:
        name = f"warm-up '{sample.name}'"
        try:
            inputs = await trio.to_thread.run_sync(_inputs, runner, sample, abandon_on_cancel=True)
            request = InferRequest(signature.name, signature.version, check_arrays(inputs, signature, sample.name))
            async with trio.open_nursery() as nursery:
                for index in range(runner.instances or 1):
                    nursery.start_soon(_run, runner, index, request, max(sample.count, 1))
            if isinstance(runner, KeepsSamples):
                runner.samples += [request] * max(sample.count, 1)
        except Exception as error:
            cause = _sole(error)
            what = str(cause) if isinstance(cause, InferError | OSError | ValueError) else repr(cause)
            reason = " ".join(f"{name}: {what}".split())  # one line, though a model's error has its place below it
            raise ModelLoadError(signature.name, reason, where=runner.config.where) from cause


def _sole(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(runner: Runner, index: int, request: InferRequest, count: int) -> None:
    for _ in range(count):
        await runner.run(Instance(index), request, _drop)


async def _drop(response: InferResponse) -> None:
    """Nobody needs it."""


def _inputs(runner: Runner, sample: Any) -> dict[str, Array]:
    batched = runner.signature.max_batch_size > 0
    lead = (max(sample.batch_size, 1),) if batched else ()
    return {name: _input(runner, name, given, lead) for name, given in sorted(sample.inputs.items())}


def _input(runner: Runner, name: str, given: Any, lead: tuple[int, ...]) -> Array:
    datatype = Datatype.__members__.get(enum_name(given, "data_type").removeprefix("TYPE_").replace("STRING", "BYTES"))
    if datatype is None:
        raise ValueError(f"input '{name}' has no `data_type`")
    dims = tuple(given.dims)
    if any(dim < 0 for dim in dims):
        raise ValueError(f"input '{name}' has dims {list(dims)}; each must be 0 or more")
    shape = (*lead, *dims)
    size = math.prod(shape) * (datatype.itemsize or POINTER)
    if size > LARGEST:
        raise ValueError(f"input '{name}' is of {size} bytes, more than {LARGEST}")
    kind = given.WhichOneof("input_data_type")
    if kind == "input_data_file":
        return _from_file(runner, name, given.input_data_file, datatype, shape)
    if datatype is Datatype.BYTES:
        array = np.empty(shape, object)
        array.fill(b"")
        return array
    if kind != "random_data":
        return np.zeros(shape, datatype.dtype)
    if datatype.dtype.kind == "f":
        return np.random.default_rng().random(shape).astype(datatype.dtype)
    return np.random.default_rng().integers(0, 2, shape).astype(datatype.dtype)  # fits every type, and any vocabulary


def _from_file(runner: Runner, name: str, path: str, datatype: Datatype, shape: tuple[int, ...]) -> Array:
    directory: Path | None = getattr(runner, "directory", None)
    if directory is None:
        raise ValueError(f"the data of input '{name}' is a file, but the model is not in a repository")
    rule = f"the file of input '{name}' must be in the model's directory '{DIRECTORY}'"
    content = read_inside(directory / DIRECTORY, path, most=LARGEST, rule=rule)
    return bytes_to_array(memoryview(content), datatype, shape, name, model=runner.signature.name, request_id="")
