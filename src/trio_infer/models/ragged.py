"""Ragged batches of native models: requests whose inputs differ in size, joined all the same.

A *ragged* input (`allow_ragged_batch`) has no common shape to be stacked in. So its elements are laid end to end, those
of one request after those of the other, in one flat tensor; and *batch inputs* tell the model where one ends and the
next begins. An output that has an element for each of those elements is taken apart in the same way, and given the
shape that the input had (`batch_output`). The model sees this form also when a request runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from trio_infer.protocol.model_config import BatchInput, Ragged
from trio_infer.protocol.values import Array

__all__ = ["batch_inputs", "flat", "scatter"]


def flat(arrays: Sequence[Array]) -> Array:
    """The elements of all, in one dimension."""
    return np.concatenate([array.ravel() for array in arrays])


def batch_inputs(ragged: Ragged, requests: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """What tells the model how its batch is made up.

    Args:
        requests: the inputs of each, with a batch dimension.
    """
    told: dict[str, Array] = {}
    for given in ragged.batch_inputs:
        arrays = [request[given.source] for request in requests if given.source in request]
        value = _KINDS[given.kind](arrays).astype(given.datatype.dtype)
        told |= dict.fromkeys(given.targets, value)
    return told


def scatter(output: Array, sources: Sequence[Array]) -> list[Array]:
    """The parts of an output that has an element for each element of an input; views.

    Args:
        output: with as many elements as all of `sources` together, or ValueError.
        sources: the input of each request, whose shape its part is given.
    """
    elements = output.reshape(-1)
    ends = np.cumsum([source.size for source in sources]).tolist()
    if len(elements) != (ends[-1] if ends else 0):
        raise ValueError(f"{len(elements)} elements for an input of {ends[-1] if ends else 0}")
    return [elements[end - source.size : end].reshape(source.shape) for source, end in zip(sources, ends, strict=True)]


def _counts(arrays: Sequence[Array]) -> Array:
    return np.array([array.size for array in arrays], np.int64)


def _item_shapes(arrays: Sequence[Array]) -> Array:
    """Of each row of each request, without the batch dimension."""
    return np.array([array.shape[1:] for array in arrays for _ in range(len(array))], np.int64)


_KINDS: Final[dict[str, Callable[[Sequence[Array]], Array]]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda arrays: np.cumsum(_counts(arrays)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda arrays: np.cumsum([0, *_counts(arrays)]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda arrays: np.zeros(_counts(arrays).max(initial=0), np.int64),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda arrays: _item_shapes(arrays).ravel(),
}
assert set(_KINDS) == set(BatchInput.KINDS)
