"""What a model may ask of the server it runs in: other models, their loading, metrics.

A runner is given its `Host` when it loads, and calls it in the trio thread. Model code never sees it: Triton's Python
models ask through `pb_utils`, from any thread, or from a process of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import Life
from trio_infer.protocol.values import InferRequest, Send, Signature

__all__ = ["Host", "MetricKind", "NoHost"]

MetricKind = Literal["counter", "gauge", "histogram"]


class Host(Protocol):
    """What the server does for models. All calls are made in the trio thread."""

    async def infer(self, parent: Life, request: InferRequest, send: Send) -> None:
        """Run a request that a model makes, as a child of the request that it is running.

        Args:
            parent: the life of the request that the model is running.
            request: `model_name` and `model_version` ("" or "-1" for the newest) say who is asked; inputs are checked
                as a client's are.
            send: takes each response in turn.

        Raises:
            InferError: no such model, not ready, bad inputs, or the model's own error.
            Exception: the model failed.

        Cancellation: as that of a client's request; also happens by itself when `parent` is cancelled.
        """

    async def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model, as `/v2/repository/models/{name}/load` does.

        Raises:
            InferError: it can't be loaded, or models are not loaded on request.
        """

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model, as `/v2/repository/models/{name}/unload` does; returns when it is no longer ready.

        Raises:
            InferError: models are not unloaded on request.
        """

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a model answers; `version` may be "" for any."""

    def signature(self, name: str, version: str) -> Signature | None:
        """What a model takes and gives; `version` may be "" for the newest. None if it isn't served."""

    def stops(self, name: str, version: str) -> str:
        """Where a cancelled run of a model ends, as `Stops`; `version` may be "" for the newest. "" for none."""

    def register_metric(self, name: str, description: str, kind: MetricKind) -> None:
        """Declare a family of metrics of a model's own; again is harmless if it says the same.

        Raises:
            InferError: there is one of that name and another kind, or the name can't be a metric's.
        """

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Literal["create", "increment", "set", "observe", "value", "remove"],
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float:
        """Create, change or read one metric of a registered family.

        Args:
            buckets: of a histogram, ascending; with "create".

        Returns:
            the value after the change; 0 for a histogram.

        Raises:
            InferError: no such family or metric, or its kind has no such operation.
        """


class NoHost:
    """The host of a runner that runs outside any server, as in a test: it has no other model and keeps no metrics."""

    async def infer(self, parent: Life, request: InferRequest, send: Send) -> None:
        raise _nobody(f"model '{request.model_name}' can't be asked")

    async def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        raise _nobody(f"model '{name}' can't be loaded")

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        raise _nobody(f"model '{name}' can't be unloaded")

    def is_model_ready(self, name: str, version: str) -> bool:
        return False

    def signature(self, name: str, version: str) -> Signature | None:
        return None

    def stops(self, name: str, version: str) -> str:
        return ""

    def register_metric(self, name: str, description: str, kind: MetricKind) -> None:
        raise _nobody(f"metric '{name}' can't be kept")

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Literal["create", "increment", "set", "observe", "value", "remove"],
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float:
        raise _nobody(f"metric '{name}' can't be kept")


def _nobody(what: str) -> InferError:
    return InferError(f"{what}: this model runs outside a server", ErrorCode.UNAVAILABLE)
