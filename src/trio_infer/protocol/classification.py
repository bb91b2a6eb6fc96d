"""The classification extension: of an output's elements the largest ones, as text with their places in the tensor.

`12.500000:3:cat` is the value, as C's `%f` (integers plainly), the index, and the label if the model has one. What
Triton leaves open is settled here: of equal values the first comes first, and NaN comes after all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from trio_infer.errors import InferError
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.tensors import object_array
from trio_infer.protocol.values import Array

__all__ = ["check_classifiable", "classify"]

MOST_ELEMENTS: Final = 1_000_000
"""That are sorted for one row (Triton's bound)."""

_UNSUPPORTED: Final = frozenset({Datatype.BYTES, Datatype.BOOL, Datatype.FP16, Datatype.BF16})


def check_classifiable(datatype: Datatype, name: str) -> None:
    """Refuse classification of what has no numbers that Triton writes.

    Args:
        datatype: of the output.
        name: the output's, for the message.

    Raises:
        InferError: it is of such a type.
    """
    if datatype in _UNSUPPORTED:
        raise InferError(
            f"class result not available for output due to unsupported type '{datatype.value}' (output '{name}')"
        )


def classify(array: Array, name: str, most: int, labels: Sequence[str], *, batched: bool) -> Array:
    """The largest elements of an output, or of each of its rows.

    Args:
        array: of numbers.
        name: the output's, for messages.
        most: how many elements are wanted.
        labels: by index; there may be fewer than elements, and empty ones are none.
        batched: whether the first dimension is the batch.

    Returns:
        BYTES, of shape [batch, classes], or [classes] if it is not batched.

    Raises:
        InferError: a row has more than a million elements.
    """
    rows = array.shape[0] if batched and array.ndim else 1
    count = array.size // rows if rows else 0
    if count > MOST_ELEMENTS:
        raise InferError(
            f"classification output tensor too large (output '{name}' has {count} elements, at most {MOST_ELEMENTS})"
        )
    classes = min(most, count)
    texts: list[bytes] = []
    for row in array.reshape(rows, count):
        largest = _descending(row)[:classes]
        for index, value in zip(largest.tolist(), row[largest].tolist(), strict=True):
            text = f"{value:f}:{index}" if isinstance(value, float) else f"{value}:{index}"
            if index < len(labels) and labels[index]:
                text = f"{text}:{labels[index]}"
            texts.append(text.encode())
    return object_array(texts).reshape((rows, classes) if batched else (classes,))


def _descending(row: Array) -> Array:
    if row.dtype.kind == "f":
        return np.argsort(-row, kind="stable")
    # Integers can't all be negated. Backwards twice keeps equal ones in their order.
    return row.size - 1 - np.argsort(row[::-1], kind="stable")[::-1]
