"""PyTorch: runs an `nn.Module`, a TorchScript file or an exported program.

An eager module is stopped between two of its modules, by the hooks of `torch_hooks`. TorchScript, exported programs and
modules that are compiled as a whole call no hook: Python isn't asked while they run. Those that are files are run in
processes unless the configuration says otherwise, where they can be killed; of one that a `model.py` makes, a warning
says so when it is loaded. (Blocks that are compiled one by one, `for block in blocks: block.compile()`, are still
called by Python, and stop between blocks.)

Inputs become tensors on the same memory where it may be written to, and are copied where it may not: a module is free
to change its arguments, and what is read-only belongs to somebody else.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.models.backends import BackendModel
from trio_infer.models.backends.joined import joined, parts, split
from trio_infer.models.backends.torch_hooks import StopHooks, asking, stop_points, torch
from trio_infer.models.triton_autocomplete import AutoCompleteConfig
from trio_infer.models.triton_current import check_cancelled, is_cancelled
from trio_infer.models.triton_messages import InferenceRequest, InferenceResponse
from trio_infer.models.triton_tensors import Tensor, TritonError
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.outputs import as_tensor
from trio_infer.protocol.values import Array, TensorSpec

__all__ = ["Model"]

GRAINS: Final = ("all", "parts", "blocks", "none")
THREADS: Final = {"INTRA_OP_THREAD_COUNT": "set_num_threads", "INTER_OP_THREAD_COUNT": "set_num_interop_threads"}
"""Triton's names, and PyTorch's functions; they hold for the whole process."""

log: logging.Logger = logging.getLogger("trio_infer.models")

_KINDS: Final = {
    datatype.config_name: getattr(torch, name)
    for datatype, name in {
        Datatype.BOOL: "bool",
        Datatype.UINT8: "uint8",
        Datatype.UINT16: "uint16",
        Datatype.UINT32: "uint32",
        Datatype.UINT64: "uint64",
        Datatype.INT8: "int8",
        Datatype.INT16: "int16",
        Datatype.INT32: "int32",
        Datatype.INT64: "int64",
        Datatype.FP16: "float16",
        Datatype.FP32: "float32",
        Datatype.FP64: "float64",
        Datatype.BF16: "bfloat16",
    }.items()
}


class Model(BackendModel):
    """One instance: a module of its own."""

    @classmethod
    def auto_complete_config(cls, config: AutoCompleteConfig) -> None:
        """An exported program says what it takes and gives; nothing else does."""
        settings = config.as_dict()
        if cls.code.file.suffix == ".pt2" and not (settings["input"] and settings["output"]):
            program = _read(cls.code.model, cls.code.file, lambda: torch.export.load(cls.code.file))
            for add, kind, tensors in zip(
                (config.add_input, config.add_output), ("input", "output"), _signature(program), strict=True
            ):
                for name, tensor in tensors if not settings[kind] else ():
                    dims = [dim if isinstance(dim, int) else -1 for dim in tensor.shape]
                    add({"name": name, "data_type": _config_name(tensor.dtype), "dims": dims or [1]})

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        if not config["input"] or not config["output"]:
            raise self._fault("PyTorch doesn't tell what a model takes and gives: its config.pbtxt must name them all")
        for tensor in (*config["input"], *config["output"]):
            if tensor["data_type"] not in _KINDS:
                raise self._fault(f"tensor '{tensor['name']}' is {tensor['data_type']}, which PyTorch doesn't have")
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._set_threads(parameters)
        self._device = self._find_device(args)
        self._batched = config["max_batch_size"] > 0
        self._kinds = {tensor["name"]: _KINDS[tensor["data_type"]] for tensor in config["input"]}
        self._outputs = [
            TensorSpec(tensor["name"], _DATATYPES[tensor["data_type"]], tensor["dims"]) for tensor in config["output"]
        ]
        self._module = self._load()
        self._arguments = _arguments(self._module, list(self._kinds))
        grain = parameters.get("cancel_hooks", "all")
        if grain not in GRAINS:
            raise self._fault(f"parameter `cancel_hooks` must be one of {', '.join(GRAINS)}, got '{grain}'")
        self._hooks = StopHooks(stop_points(self._module, grain) if self._is_eager() else ())
        if not len(self._hooks) and self.code.file.suffix == ".py":
            log.warning(
                "nothing stops a run of model '%s' between its modules: %s; with the parameter execution 'process' it "
                "is killed",
                self.code.model,
                "cancel_hooks is 'none'" if self._is_eager() else f"it is a {type(self._module).__name__}",
            )

    def _fault(self, reason: str) -> ModelLoadError:
        return ModelLoadError(self.code.model, reason, where=self.code.file)

    def _set_threads(self, parameters: Mapping[str, str]) -> None:
        for key, function in THREADS.items():
            value = parameters.get(key)
            if value is None:
                continue
            if not re.fullmatch("[1-9][0-9]{0,3}", value):
                raise self._fault(f"parameter `{key}` must be a number of threads from 1 to 9999, got '{value}'")
            try:
                getattr(torch, function)(int(value))
            except RuntimeError:
                raise self._fault(f"parameter `{key}` comes too late: another model's work has begun here") from None

    def _find_device(self, args: Mapping[str, str]) -> str:
        if args["model_instance_kind"] != "GPU":
            return "cpu"
        number = int(args["model_instance_device_id"])
        if number >= torch.cuda.device_count():
            raise self._fault(f"its instance group is KIND_GPU, and PyTorch finds no GPU number {number}")
        return f"cuda:{number}"

    def _load(self) -> Any:
        file = self.code.file
        if file.suffix == ".pt":
            return _read(self.code.model, file, lambda: torch.jit.load(file, map_location=self._device).eval())
        if file.suffix == ".pt2":
            return _read(self.code.model, file, lambda: torch.export.load(file).module().to(self._device))
        module = self.code.load()
        make = getattr(module, "load_model", None)
        if make is not None:
            made = make(self.code.version_directory)
        else:
            classes = [
                value
                for value in vars(module).values()
                if isinstance(value, type)
                and issubclass(value, torch.nn.Module)
                and value.__module__ == module.__name__
            ]
            if len(classes) != 1:
                names = ", ".join(kind.__name__ for kind in classes) or "none"
                raise self._fault(
                    "its code must define `load_model(directory)`, or one subclass of torch.nn.Module that is made "
                    f"without arguments; it defines {names}"
                )
            made = classes[0]()
        if not isinstance(made, torch.nn.Module):
            raise self._fault(f"`load_model` must give a torch.nn.Module, got {type(made).__name__}")
        return made.to(self._device).eval()

    def _is_eager(self) -> bool:
        module = self._module
        compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        return self.code.file.suffix == ".py" and not (compiled or isinstance(module, torch.jit.ScriptModule))

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        batches = joined(requests) if self._batched else [[request] for request in requests]
        responses: dict[int, InferenceResponse] = {}
        for batch in batches:
            check_cancelled()
            try:
                answers = [
                    InferenceResponse([Tensor(name, array) for name, array in answer.items()])
                    for answer in self._split(batch, self._run(parts(batch)))
                ]
            except InferError as error:
                answers = [InferenceResponse(error=TritonError(error.message, error.code)) for _ in batch]
            responses.update(zip(map(id, batch), answers, strict=True))
        return [responses[id(request)] for request in requests]

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        tensors = {name: self._tensor(name, array) for name, array in inputs.items()}
        with asking(is_cancelled), torch.inference_mode():
            given = self._arguments(self._module, tensors)
        check_cancelled()
        return self._read_outputs(given)

    def _tensor(self, name: str, array: Array) -> Any:
        array = np.ascontiguousarray(array)
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.to(self._device, self._kinds[name])

    def _read_outputs(self, given: Any) -> dict[str, Array]:
        specs = self._outputs
        if isinstance(given, torch.Tensor):
            given = (given,)
        if isinstance(given, Mapping):
            missing = [spec.name for spec in specs if spec.name not in given]
            if missing:
                raise _wrong(self.code.model, f"gave no output '{missing[0]}'; it gave {list(given)}")
            given = [given[spec.name] for spec in specs]
        if not isinstance(given, (tuple, list)) or len(given) != len(specs):
            got = f"{len(given)}" if isinstance(given, (tuple, list)) else type(given).__name__
            raise _wrong(
                self.code.model, f"must give {len(specs)} tensors ({[spec.name for spec in specs]}), got {got}"
            )
        return {spec.name: self._array(spec, value) for spec, value in zip(specs, given, strict=True)}

    def _array(self, spec: TensorSpec, value: Any) -> Array:
        if not isinstance(value, torch.Tensor):
            raise _wrong(self.code.model, f"must give a tensor for output '{spec.name}', got {type(value).__name__}")
        value = value.detach().cpu()
        return as_tensor((value.float() if value.dtype == torch.bfloat16 else value).numpy(), spec, self.code.model)

    def _split(self, batch: Sequence[InferenceRequest], outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        try:
            return split(batch, outputs)
        except ValueError as error:
            raise _wrong(self.code.model, f"can't be batched: {error}") from None

    def finalize(self) -> None:
        self._hooks.remove()
        del self._module, self._arguments


_DATATYPES: Final = {datatype.config_name: datatype for datatype in Datatype}


def _wrong(model: str, what: str) -> InferError:
    return InferError(f"model '{model}' {what}", ErrorCode.INTERNAL)


def _read(model: str, file: Any, load: Callable[[], Any]) -> Any:
    """Load a program from a file.

    Raises:
        ModelLoadError: PyTorch can't; often it has a `state_dict`, of which PyTorch says that it is corrupted.
    """
    try:
        return load()
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        writer = "torch.jit.save" if file.suffix == ".pt" else "torch.export.save"
        what = f"it isn't what `{writer}` writes (weights alone are for a model.py to load)"
        raise ModelLoadError(model, f"{what}; PyTorch says: {reason}", where=file) from None


def _arguments(module: Any, names: Sequence[str]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """How the module is called: by Triton's numbers (`INPUT__0`), by the names of its arguments, or in their order."""
    numbers = [re.fullmatch(r".+__(\d+)", name) for name in names]
    if all(numbers):
        order = [
            name
            for _, name in sorted((int(found[1]), name) for found, name in zip(numbers, names, strict=True) if found)
        ]
        return lambda module, tensors: module(*(tensors[name] for name in order if name in tensors))
    known: Container[str] = ()
    with suppress(TypeError, ValueError):  # those of a script can't be read, those of an exported program can't be used
        known = () if isinstance(module, torch.fx.GraphModule) else inspect.signature(module.forward).parameters
    if all(name in known for name in names):
        return lambda module, tensors: module(**tensors)
    return lambda module, tensors: module(*(tensors[name] for name in names if name in tensors))


def _signature(program: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Names of an exported program's inputs and outputs, each with a tensor like it."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [(str(name), values[name]) for name in signature.user_inputs]
    outputs = [(f"OUTPUT__{number}", values[name]) for number, name in enumerate(signature.user_outputs)]
    return inputs, outputs


def _config_name(kind: Any) -> str:
    return next(name for name, known in _KINDS.items() if known == kind)
