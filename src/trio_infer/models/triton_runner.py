"""What the two ways of running a Triton Python model, in threads and in processes, have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from trio_infer.models.backends import BACKENDS
from trio_infer.models.runner import Stops
from trio_infer.models.triton_work import Work
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferResponse, Signature

__all__ = ["TritonRunner"]


class TritonRunner:
    """One version of a Triton Python model.

    Args:
        config: from its `config.pbtxt`; empty but for the name if it has none.
        directory: the model's directory.
        version: the number that its version directory is named after.
        auto_complete: whether the model's `auto_complete_config` is asked.
        deaf_after: seconds after which the log mentions a run that goes on without its client. A second is long for
            a model that asks `is_cancelled()` once a step, and short for whoever looks for a lost instance.
        labels: of the classes of those outputs that have some.

    Attributes:
        signature, config: after `load`, with what the model completed; before it, what the file says.
    """

    joins: bool = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        directory: Path,
        version: int,
        auto_complete: bool = True,
        deaf_after: float = 1.0,
        labels: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self.directory: Path = directory.absolute()
        self.version = version
        self._auto_complete = auto_complete
        self._deaf_after = deaf_after
        self._labels = labels
        self._works: set[Work] = set()
        self.config: ModelConfig
        self.signature: Signature
        self.on_disconnect: Literal["cancel", "finish"] | None
        self.configure(config)

    def configure(self, config: ModelConfig) -> None:
        """Go by another configuration: one that the model has completed."""
        self.config = config
        self.on_disconnect = config.on_disconnect
        try:
            self.signature = config.signature(str(self.version), self._labels)
        except KeyError:  # a tensor without a datatype, which the model may still complete
            self.signature = Signature(config.name, str(self.version), (), ())

    @property
    def program(self) -> Mapping[str, str]:
        """What is to be run; see `import_class`."""
        return {"backend": self.config.backend} if self.config.backend in BACKENDS else {}

    @property
    def stops(self) -> Stops:
        """Where a cancelled run ends, as far as the model or its backend sees to it."""
        backend = BACKENDS.get(self.config.backend)
        return "callback" if backend is None else backend.stops_in_thread(self.file.name)

    @property
    def collects(self) -> bool:
        """Whether its backend says how a request's responses are one."""
        return bool(self._pieces)

    def collect(self, responses: Sequence[InferResponse]) -> InferResponse:
        """All responses to a request as one: the pieces joined, and of anything else what came last."""
        outputs = {name: value for response in responses for name, value in response.outputs.items()}
        for name in self._pieces:
            if name in outputs:
                parts = [np.asarray(response.outputs[name]) for response in responses if name in response.outputs]
                text = b"".join(element for part in parts for element in part.ravel())
                outputs[name] = np.array([text], object).reshape(parts[0].shape)
        return InferResponse(outputs, {name: value for each in responses for name, value in each.parameters.items()})

    @property
    def _pieces(self) -> tuple[str, ...]:
        backend = BACKENDS.get(self.config.backend)
        return () if backend is None else backend.pieces

    @property
    def instances(self) -> int:
        return self.config.instance_count

    @property
    def abandoned(self) -> int:
        """Requests that have left, while the model's senders go on with them in no instance."""
        return sum(work.abandoned for work in self._works)

    @property
    def file(self) -> Path:
        """The model's code."""
        return self.directory / str(self.version) / (self.config.default_model_filename or "model.py")
