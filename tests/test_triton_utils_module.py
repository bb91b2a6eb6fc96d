"""`trio_infer.triton_utils`: models in plain Python processes, without a server and without trio."""

from __future__ import annotations

import subprocess
import sys

from trio_infer import triton_utils
from trio_infer.models import triton_utils as inner


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_it_has_every_name_and_lets_models_be_imported_in_a_plain_process() -> None:
    assert set(triton_utils.__all__) == set(inner.__all__) <= set(dir(triton_utils))
    out = run(
        """
import trio_infer.triton_utils
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x.as_numpy() + 1)]) for x in inputs]

request = pb_utils.InferenceRequest(inputs=[pb_utils.Tensor("IN", np.array([1, 2]))], request_id="r")
(response,) = TritonPythonModel().execute([request])
print(response.output_tensors()[0].as_numpy(), request.is_cancelled())
"""
    )
    assert out == "[2 3] False\n"


def test_a_module_of_that_name_that_is_there_already_is_left_alone() -> None:
    assert (
        run(
            "import sys; sys.modules['triton_python_backend_utils'] = sys; import trio_infer.triton_utils\n"
            "import triton_python_backend_utils; print(triton_python_backend_utils is sys)"
        )
        == "True\n"
    )


def test_what_runs_model_code_does_not_need_trio() -> None:
    # `trio_infer` itself imports the server, so its package is stood in for.
    out = run(
        "import sys, types, importlib.util\n"
        "package = types.ModuleType('trio_infer')\n"
        "package.__path__ = importlib.util.find_spec('trio_infer').submodule_search_locations\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] in ('trio_infer', 'trio')]:\n"
        "    del sys.modules[name]\n"
        "sys.modules['trio_infer'] = package\n"
        "import trio_infer.models.triton_execute, trio_infer.models.triton_loading, trio_infer.models.triton_utils\n"
        "print('trio' in sys.modules)"
    )
    assert out == "False\n"
