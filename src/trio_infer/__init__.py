"""An inference server on trio and h11: when the client leaves, the work stops.

`Server` serves models inside any trio program; `cancel_on_disconnect` is the mechanism alone, for any trio stream.

Names are imported when they are first used. A worker process of a Python model imports little of this package, and must
start as fast as the model itself allows.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trio_infer._version import __version__

if TYPE_CHECKING:
    from trio_infer.api.fronts import Front
    from trio_infer.api.sagemaker import SageMaker
    from trio_infer.api.vertex_ai import VertexAI
    from trio_infer.errors import ErrorCode, InferError, ModelLoadError, SetupError, UnknownModelError
    from trio_infer.lifecycle import CancelReason, Life, LifeWatcher, Outcome, Phase
    from trio_infer.limits import ControlPolicy, DisconnectPolicy, Keepalive, Limits, RateLimit
    from trio_infer.models.native import Model
    from trio_infer.models.repository import ModelRepository, find_models
    from trio_infer.models.token_model import Active, Generation, Prompt, TokenModel
    from trio_infer.models.triton_current import check_cancelled, is_cancelled
    from trio_infer.observe.metrics_policy import MetricsPolicy
    from trio_infer.observe.statistics import RequestStatistics
    from trio_infer.protocol.datatypes import Datatype
    from trio_infer.protocol.queueing import Batching, Queueing, QueuePolicy
    from trio_infer.protocol.values import InferRequest, InferResponse, TensorSpec
    from trio_infer.scheduling.response_cache import CacheStatistics
    from trio_infer.scheduling.ticket import QueueStatistics
    from trio_infer.server import Address, ListenError, Server, ServerStatistics
    from trio_infer.wire.primitive import DisconnectWatch, cancel_on_disconnect

__all__ = [
    "Active",
    "Address",
    "Batching",
    "CacheStatistics",
    "CancelReason",
    "ControlPolicy",
    "Datatype",
    "DisconnectPolicy",
    "DisconnectWatch",
    "ErrorCode",
    "Front",
    "Generation",
    "InferError",
    "InferRequest",
    "InferResponse",
    "Keepalive",
    "Life",
    "LifeWatcher",
    "Limits",
    "ListenError",
    "MetricsPolicy",
    "Model",
    "ModelLoadError",
    "ModelRepository",
    "Outcome",
    "Phase",
    "Prompt",
    "QueuePolicy",
    "QueueStatistics",
    "Queueing",
    "RateLimit",
    "RequestStatistics",
    "SageMaker",
    "Server",
    "ServerStatistics",
    "SetupError",
    "TensorSpec",
    "TokenModel",
    "UnknownModelError",
    "VertexAI",
    "__version__",
    "cancel_on_disconnect",
    "check_cancelled",
    "find_models",
    "is_cancelled",
]

_HOMES = {
    "Front": "trio_infer.api.fronts",
    "SageMaker": "trio_infer.api.sagemaker",
    "VertexAI": "trio_infer.api.vertex_ai",
    "ErrorCode": "trio_infer.errors",
    "InferError": "trio_infer.errors",
    "ModelLoadError": "trio_infer.errors",
    "SetupError": "trio_infer.errors",
    "UnknownModelError": "trio_infer.errors",
    "CancelReason": "trio_infer.lifecycle",
    "Life": "trio_infer.lifecycle",
    "LifeWatcher": "trio_infer.lifecycle",
    "Outcome": "trio_infer.lifecycle",
    "Phase": "trio_infer.lifecycle",
    "ControlPolicy": "trio_infer.limits",
    "DisconnectPolicy": "trio_infer.limits",
    "Keepalive": "trio_infer.limits",
    "Limits": "trio_infer.limits",
    "RateLimit": "trio_infer.limits",
    "Model": "trio_infer.models.native",
    "Active": "trio_infer.models.token_model",
    "Generation": "trio_infer.models.token_model",
    "Prompt": "trio_infer.models.token_model",
    "TokenModel": "trio_infer.models.token_model",
    "ModelRepository": "trio_infer.models.repository",
    "find_models": "trio_infer.models.repository",
    "check_cancelled": "trio_infer.models.triton_current",
    "is_cancelled": "trio_infer.models.triton_current",
    "MetricsPolicy": "trio_infer.observe.metrics_policy",
    "RequestStatistics": "trio_infer.observe.statistics",
    "Datatype": "trio_infer.protocol.datatypes",
    "Batching": "trio_infer.protocol.queueing",
    "QueuePolicy": "trio_infer.protocol.queueing",
    "Queueing": "trio_infer.protocol.queueing",
    "InferRequest": "trio_infer.protocol.values",
    "InferResponse": "trio_infer.protocol.values",
    "TensorSpec": "trio_infer.protocol.values",
    "CacheStatistics": "trio_infer.scheduling.response_cache",
    "QueueStatistics": "trio_infer.scheduling.ticket",
    "Address": "trio_infer.server",
    "ListenError": "trio_infer.server",
    "Server": "trio_infer.server",
    "ServerStatistics": "trio_infer.server",
    "DisconnectWatch": "trio_infer.wire.primitive",
    "cancel_on_disconnect": "trio_infer.wire.primitive",
}


if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
