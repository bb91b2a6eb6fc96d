"""An inference server on trio and h11: when the client leaves, the work stops.

`Server` serves models inside any trio program; `cancel_on_disconnect` is the mechanism alone, for any trio stream.
"""

from trio_infer._version import __version__
from trio_infer.api.fronts import Front
from trio_infer.api.sagemaker import SageMaker
from trio_infer.api.vertex_ai import VertexAI
from trio_infer.errors import ErrorCode, InferError, ModelLoadError, SetupError
from trio_infer.lifecycle import CancelReason, Life, LifeWatcher, Outcome, Phase
from trio_infer.limits import DisconnectPolicy, Keepalive, Limits
from trio_infer.models.native import Model
from trio_infer.models.repository import find_models
from trio_infer.observe.metrics_policy import MetricsPolicy
from trio_infer.observe.statistics import RequestStatistics
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.values import InferRequest, InferResponse, TensorSpec
from trio_infer.scheduling.ticket import QueueStatistics
from trio_infer.server import Address, ListenError, Server, ServerStatistics
from trio_infer.wire.primitive import DisconnectWatch, cancel_on_disconnect

__all__ = [
    "Address",
    "CancelReason",
    "Datatype",
    "DisconnectPolicy",
    "DisconnectWatch",
    "ErrorCode",
    "Front",
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
    "Outcome",
    "Phase",
    "QueueStatistics",
    "RequestStatistics",
    "SageMaker",
    "Server",
    "ServerStatistics",
    "SetupError",
    "TensorSpec",
    "VertexAI",
    "__version__",
    "cancel_on_disconnect",
    "find_models",
]
