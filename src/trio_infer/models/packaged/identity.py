"""`identity`: gives back what it was given. For trying a client, and for measuring what the server itself costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trio_infer.errors import InferError
from trio_infer.models.native import Model
from trio_infer.protocol.values import Array, InferRequest, TensorSpec

__all__ = ["Identity"]

OUTPUT_OF: Final = {"INPUT": "OUTPUT", "BYTES_INPUT": "BYTES_OUTPUT"}


class Identity(Model):
    """Each input comes back, unchanged, as the output of the matching name; at least one must be there."""

    name = "identity"
    inputs: Sequence[TensorSpec] = (
        TensorSpec("INPUT", "FP32", (-1,), optional=True),
        TensorSpec("BYTES_INPUT", "BYTES", (-1,), optional=True),
    )
    outputs: Sequence[TensorSpec] = (TensorSpec("OUTPUT", "FP32", (-1,)), TensorSpec("BYTES_OUTPUT", "BYTES", (-1,)))

    async def infer(self, request: InferRequest) -> dict[str, Array]:
        """Answer at once.

        Raises:
            InferError: there is no input.

        Cancellation: none; it doesn't wait.
        """
        if not request.inputs:
            raise InferError(f"model 'identity' gives back its inputs: send {' or '.join(OUTPUT_OF)}, or both")
        return {OUTPUT_OF[name]: array for name, array in request.inputs.items()}
