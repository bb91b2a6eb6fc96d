"""`triton_python_backend_utils`, for unit tests of models and for whoever wants its names and types outside of a
server.

A Triton Python model imports `triton_python_backend_utils`, which no package index has: inside a server it is there,
and outside of one it is after

    import trio_infer.triton_utils

so a test file begins with that line, and then imports the model's code. Tensors, requests, responses, errors and the
helpers work as they do in the server. What needs a server (`exec`, `load_model`, `MetricFamily`, a response sender)
raises `TritonModelException` and says so. If a module of that name has been imported already (Triton's own, in its
process), it is left alone.

A top-level module of that name isn't installed: in a Python that Triton uses too, it could stand in front of Triton's.
"""

from __future__ import annotations

import sys

from trio_infer.models import triton_utils as _utils
from trio_infer.models.triton_imports import PB_UTILS as _PB_UTILS
from trio_infer.models.triton_utils import *  # noqa: F403 (its `__all__` is this one's)
from trio_infer.models.triton_utils import __all__ as __all__

sys.modules.setdefault(_PB_UTILS, _utils)
