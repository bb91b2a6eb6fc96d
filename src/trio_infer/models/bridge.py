"""What Triton's Python model code asks the server for, in any thread: one interface, whether the server is in the same
process or at the other end of a socket.

`pb_utils` is written against `Bridge`; `ModelCode.bridge` is the one that an instance's code uses. All values that pass
are plain (requests, responses, text, numbers), so that they can pass between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from trio_infer.errors import InferError
from trio_infer.models.host import MetricKind
from trio_infer.protocol.values import InferRequest, InferResponse

__all__ = ["Bridge", "Replies"]


class Replies(Protocol):
    """The responses to a request that a model made; may be used from any thread."""

    def next(self) -> InferResponse | InferError | None:
        """The next response, or the error that ends them; None after the last. Blocks until there is one."""

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back, in whatever thread, as soon as `next` would not block; at once if that is now."""

    def cancel(self) -> None:
        """The rest is not wanted: the request is cancelled, and `next` gives None or an error soon."""


class Bridge(Protocol):
    """The server, as model code reaches it. Every call may block, except where it says otherwise."""

    def infer(self, request: InferRequest) -> Replies:
        """Ask another model. The request is cancelled when the one that this model is running is.

        Doesn't block. Which request that is, is known by context (`triton_current`), or if the calling thread has none,
        it is all that the instance has in hand: then the inner one is cancelled when the last of them is.
        """

    def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model. Raises InferError."""

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model. Raises InferError."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a model answers."""

    def register_metric(self, name: str, description: str, kind: MetricKind) -> None:
        """As `Host.register_metric`."""

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Literal["create", "increment", "set", "observe", "value", "remove"],
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float:
        """As `Host.change_metric`. Only "create" and "value" wait for the server's answer."""

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """Write to the server's log under the model's name; `level` is `logging`'s. Doesn't block."""
