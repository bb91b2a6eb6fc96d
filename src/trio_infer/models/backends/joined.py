"""Several requests as one call of a library: their inputs row by row, one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trio_infer.models.triton_messages import InferenceRequest
from trio_infer.protocol.values import Array

__all__ = ["joined", "parts", "split"]


def joined(requests: Sequence[InferenceRequest]) -> list[list[InferenceRequest]]:
    """Which requests can be computed together: those that have the same inputs, alike but for their first dimension."""
    batches: dict[object, list[InferenceRequest]] = {}
    for request in requests:
        shapes = tuple((tensor.name(), tensor.as_numpy().shape[1:]) for tensor in request.inputs())
        batches.setdefault(shapes, []).append(request)
    return [*batches.values()]


def parts(batch: Sequence[InferenceRequest]) -> dict[str, Array]:
    """The inputs of a batch by name: of one request as they are, of several in one new array."""
    if len(batch) == 1:
        return {tensor.name(): tensor.as_numpy() for tensor in batch[0].inputs()}
    columns = zip(*(request.inputs() for request in batch), strict=True)
    return {column[0].name(): np.concatenate([tensor.as_numpy() for tensor in column]) for column in columns}


def split(batch: Sequence[InferenceRequest], outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Each request's rows of the outputs, as views.

    Raises:
        ValueError: an output has not a row for each row of the inputs; says which.
    """
    if len(batch) == 1:
        return [dict(outputs)]
    rows = [request.inputs()[0].as_numpy().shape[0] for request in batch]
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != sum(rows):
            raise ValueError(f"output '{name}' has the shape {list(array.shape)} for {sum(rows)} rows")
    ends = np.cumsum(rows)
    return [
        {name: array[end - count : end] for name, array in outputs.items()}
        for count, end in zip(rows, ends, strict=True)
    ]
