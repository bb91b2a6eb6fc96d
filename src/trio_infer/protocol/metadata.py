"""What the server and its models say about themselves: the bodies of `/v2` and `/v2/models/{name}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trio_infer.protocol.values import Signature, TensorSpec

__all__ = ["model_metadata", "server_metadata"]


def server_metadata(name: str, version: str, extensions: Sequence[str]) -> dict[str, Any]:
    """The body of `/v2`.

    Args:
        name: the server's, for clients to tell servers apart.
        version: the server's own.
        extensions: the protocol's names of what this server really does, beyond the core.
    """
    return {"name": name, "version": version, "extensions": list(extensions)}


def model_metadata(signature: Signature, versions: Sequence[str], platform: str) -> dict[str, Any]:
    """The body of `/v2/models/{name}[/versions/{version}]`.

    Args:
        signature: the model's.
        versions: those that are ready, or the one that was asked for.
        platform: what runs the model.

    Returns:
        The metadata; shapes have -1 in front if the model has a batch dimension.
    """

    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {"name": spec.name, "datatype": spec.datatype.value, "shape": list(signature.wire_shape(spec))}
            for spec in specs
        ]

    return {
        "name": signature.name,
        "versions": list(versions),
        "platform": platform,
        "inputs": tensors(signature.inputs),
        "outputs": tensors(signature.outputs),
    }
