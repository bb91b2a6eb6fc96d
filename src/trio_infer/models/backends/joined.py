"""Several requests as one call of a library: their inputs row by row, one below the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trio_infer.models.triton_messages import InferenceRequest
from trio_infer.protocol.values import Array

__all__ = ["joined", "parts"]


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
