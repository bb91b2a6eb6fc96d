"""ONNX Runtime: runs `model.onnx`, and stops it with the operator that is being computed.

How a run is stopped. Each call has a `RunOptions` of its own, and `terminate = True` in it, set from another thread,
makes `session.run` raise before the next node, also inside the body of a Loop; a run that is told before its first node
ends there. So what is left of the work is the rest of one operator, and about half a millisecond. There is no class for
that error, and its text differs by place, so whether a run was stopped is decided by the fact that it was told to; one
that came to its end all the same was stopped, too.

Facts (onnxruntime 1.32, 2 cores, CPU provider): 100 products of 256x1024x1024 stop after 4.6 ms (median; one takes 7),
4,000 small ones after 0.8, a Loop's body after 0.7. One product of 3000^3 runs to its end, whatever it is told: such a
model belongs in a process (`execution` `process`), which is killed. A session is good for the next run after each of
these. `session.run` releases the GIL. A `RunOptions` costs 0.2 microseconds.

Measured and not done: binding outputs to arrays made beforehand (`run_with_iobinding`) saves nothing on a CPU. 16 MiB
in and out take 0.65 ms with it and 0.62 without, 64 bytes 6.6 microseconds and 3.3. `run_async` saves no thread worth
having, and refuses a session that has only one.

Not destroyed under a run: whoever runs holds on to the session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped, unused-ignore]  # it has no types

from trio_infer.errors import ErrorCode, ModelLoadError, RunCancelled
from trio_infer.models.backends import BackendModel
from trio_infer.models.backends.joined import joined, parts, split
from trio_infer.models.triton_autocomplete import AutoCompleteConfig
from trio_infer.models.triton_current import check_cancelled, when_cancelled
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_messages import InferenceRequest, InferenceResponse
from trio_infer.models.triton_tensors import Tensor, TritonError
from trio_infer.protocol.values import Array

__all__ = ["Model"]

DEFAULT_MAX_BATCH_SIZE: Final = 4
"""What a model may batch that can, if its configuration doesn't say; Triton's `default-max-batch-size`."""

_QUIET: Final = 4
"""Only fatal errors: a run that is stopped would write a line for each node that it was in."""

_DATATYPES: Final = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}
_LEVELS: Final = {
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
"""Of `optimization { graph { level } }`; the numbers are Triton's."""


class Model(BackendModel):
    """One instance: a session of its own, as in Triton. Threads of the session's are this instance's."""

    _session: Any = None

    @classmethod
    def auto_complete_config(cls, config: AutoCompleteConfig) -> None:
        """Take what the configuration leaves out from the model's file."""
        settings = config.as_dict()
        cls._session = session = _open(cls.code, settings)
        tensors = {"input": _described(session.get_inputs()), "output": _described(session.get_outputs())}
        known = {name: dims for found in tensors.values() for name, (_, dims) in found.items()}
        if not settings["max_batch_size"] and _may_batch(settings, known):
            settings["max_batch_size"] = DEFAULT_MAX_BATCH_SIZE
            config.set_dynamic_batching()
        batched = settings["max_batch_size"] > 0
        for kind, add in (("input", config.add_input), ("output", config.add_output)):
            given = {tensor["name"]: tensor for tensor in settings[kind]}
            for name, (datatype, dims) in tensors[kind].items():
                wanted = list(given[name]["dims"]) if name in given else []
                if kind == "output" and given and name not in given:
                    continue  # the configuration names those that it wants
                if datatype not in _DATATYPES.values():
                    reason = f"{kind} '{name}' is {datatype}, which has no place in the protocol"
                    raise ModelLoadError(cls.code.model, reason, where=cls.code.file)
                add({"name": name, "data_type": datatype, "dims": wanted or dims[batched:] or [1]})
                if not wanted and not dims[batched:]:  # a scalar for each row: one element
                    next(one for one in settings[kind] if one["name"] == name)["reshape"] = {"shape": []}

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        on_gpu = args["model_instance_kind"] == "GPU"
        ready, type(self)._session = type(self)._session, None
        self._session = ready if ready and not on_gpu else _open(self.code, config, on_gpu=on_gpu)
        self._batched = config["max_batch_size"] > 0
        self._check(config, "input", _described(self._session.get_inputs()))
        self._check(config, "output", _described(self._session.get_outputs()))
        self._outputs = [tensor["name"] for tensor in config["output"]]
        self._strings = {tensor["name"] for tensor in config["input"] if tensor["data_type"] == "TYPE_STRING"}

    def _check(self, config: Mapping[str, Any], kind: str, known: Mapping[str, tuple[str, list[int]]]) -> None:
        given = {tensor["name"]: tensor for tensor in config[kind]}
        for name, tensor in given.items():
            if name not in known:
                raise self._fault(f"the configuration has the {kind} '{name}', the model has {sorted(known)}")
            datatype, dims = known[name]
            if tensor["data_type"] != datatype:
                raise self._fault(
                    f"{kind} '{name}' is {tensor['data_type']} in the configuration and {datatype} in the model"
                )
            shape = tensor["reshape"]["shape"] if "reshape" in tensor else tensor["dims"]
            whole = [-1, *shape] if self._batched else list(shape)
            if len(whole) != len(dims) or any(-1 not in (a, b) and a != b for a, b in zip(whole, dims, strict=True)):
                rows = " (with the batch dimension)" if self._batched else ""
                raise self._fault(
                    f"{kind} '{name}' has the shape {whole}{rows} in the configuration and {dims} in the model"
                )
            if self._batched and dims[0] != -1:
                most = config["max_batch_size"]
                raise self._fault(f"`max_batch_size` is {most}, but {kind} '{name}' of the model has {dims[0]} rows")
        missing = sorted(set(known) - set(given)) if kind == "input" else []
        if missing:
            raise self._fault(f"the configuration lacks the inputs {missing}, which the model needs")

    def _fault(self, reason: str) -> ModelLoadError:
        return ModelLoadError(self.code.model, reason, where=self.code.file)

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        batches = joined(requests) if self._batched else [[request] for request in requests]
        responses: dict[int, InferenceResponse] = {}
        for batch in batches:
            check_cancelled()
            for request, response in zip(batch, self._run(batch), strict=True):
                responses[id(request)] = response
        return [responses[id(request)] for request in requests]

    def _run(self, batch: Sequence[InferenceRequest]) -> Sequence[InferenceResponse]:
        wanted = {name for request in batch for name in request.requested_output_names()}
        names = [name for name in self._outputs if name in wanted] or self._outputs
        try:
            feeds = {name: self._fed(name, array) for name, array in parts(batch).items()}
            outputs = _stoppable_run(self._session, names, feeds)
        except (ort.capi.onnxruntime_pybind11_state.InvalidArgument, ValueError) as error:
            fault = TritonError(
                f"model '{self.code.model}' can't take this: {_first_line(error)}", ErrorCode.INVALID_ARG
            )
            return [InferenceResponse(error=fault) for _ in batch]
        try:
            answers = split(batch, dict(zip(names, map(_given, outputs), strict=True)))
        except ValueError as error:
            fault = TritonError(
                f"{error}, so it can't be told whose is whose; model '{self.code.model}' needs `max_batch_size: 0`"
            )
            return [InferenceResponse(error=fault) for _ in batch]
        return [InferenceResponse([Tensor(name, array) for name, array in answer.items()]) for answer in answers]

    def _fed(self, name: str, array: Array) -> Array:
        if name not in self._strings:
            return array
        return np.array([_text(item) for item in array.flat], dtype=object).reshape(array.shape)

    def finalize(self) -> None:
        self._session = None


def _stoppable_run(session: Any, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Any]:
    """Run, until nobody wants it any more.

    Raises:
        RunCancelled: it was told to stop.
    """
    options = ort.RunOptions()
    options.log_severity_level = _QUIET
    told = []

    def stop() -> None:
        told.append(True)
        options.terminate = True

    when_cancelled(stop)
    try:
        outputs: list[Any] = session.run(names, feeds, options)
    except Exception:
        if told:
            raise RunCancelled from None
        raise
    if told:
        raise RunCancelled
    return outputs


def _open(code: ModelCode, config: Mapping[str, Any], *, on_gpu: bool = False) -> Any:
    """A session.

    Raises:
        ModelLoadError: the file or an option of it can't be used.
    """

    def fault(reason: str) -> ModelLoadError:
        return ModelLoadError(code.model, reason, where=code.file)

    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    # Threads that wait by spinning take a core from the other sessions and from the server.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    if level not in _LEVELS:
        raise fault(f"the graph's optimization level must be one of {sorted(_LEVELS)}, got {level}")
    options.graph_optimization_level = _LEVELS[level]
    for key, value in config.get("parameters", {}).items():
        text = value["string_value"]
        try:
            _set(options, key, text)
        except ValueError as error:
            raise fault(f"parameter `{key}` must be {error}, got '{text}'") from None
    providers = ["CPUExecutionProvider"]
    if on_gpu:
        providers = ["CUDAExecutionProvider", *providers]
        if providers[0] not in ort.get_available_providers():
            raise fault("its instance group is KIND_GPU, and the onnxruntime that is installed has no CUDA")
    try:
        return ort.InferenceSession(str(code.file), options, providers=providers)
    except Exception as error:
        raise fault(f"ONNX Runtime can't load it: {_first_line(error)}") from None


def _set(options: Any, key: str, value: str) -> None:
    """One of the configuration's parameters, by Triton's names.

    Raises:
        ValueError: what it must be.
    """
    if key in {"intra_op_thread_count", "inter_op_thread_count"}:
        if not value.isdecimal() or int(value) > 1024:
            raise ValueError("a number of threads from 0 (for ONNX Runtime's own choice) to 1024")
        setattr(options, key.replace("_thread_count", "_num_threads"), int(value))
    elif key == "execution_mode":
        _one_of(value, "0", "1")
        parallel, sequential = ort.ExecutionMode.ORT_PARALLEL, ort.ExecutionMode.ORT_SEQUENTIAL
        options.execution_mode = parallel if value == "1" else sequential
    elif key in {"enable_mem_arena", "enable_mem_pattern"}:
        _one_of(value, "0", "1")
        setattr(options, key.replace("enable_mem_arena", "enable_cpu_mem_arena"), value == "1")
    elif key.startswith(("session.", "optimization.", "ep.")):
        options.add_session_config_entry(key, value)


def _one_of(value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(" or ".join(f"'{each}'" for each in allowed))


def _described(tensors: Sequence[Any]) -> dict[str, tuple[str, list[int]]]:
    """By name: the datatype, by the configuration's names, and the dims; -1 for any."""
    return {
        tensor.name: (
            _DATATYPES.get(tensor.type, tensor.type),
            [dim if isinstance(dim, int) and dim >= 0 else -1 for dim in tensor.shape],
        )
        for tensor in tensors
    }


def _may_batch(config: Mapping[str, Any], known: Mapping[str, list[int]]) -> bool:
    """Whether each tensor has a first dimension of any size, and the configuration has not counted that as its own."""
    if not all(dims and dims[0] == -1 for dims in known.values()):
        return False
    given = [tensor for kind in ("input", "output") for tensor in config[kind] if tensor["dims"]]
    return all(tensor["name"] in known and len(tensor["dims"]) < len(known[tensor["name"]]) for tensor in given)


def _given(output: Any) -> Array:
    array = np.asarray(output)
    if array.dtype == object:  # strings: text here, bytes on the wire
        items = [item.encode() if isinstance(item, str) else item for item in array.flat]
        array = np.array(items, dtype=object).reshape(array.shape)
    return array


def _text(item: Any) -> str:
    return item.decode() if isinstance(item, bytes) else str(item)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
