"""A model's configuration: `config.pbtxt`, what the server fills in, and the JSON that `/config` and the model read.

Order of events: `parse` reads and normalises; a Python model's `auto_complete_config` may then change the JSON, which
comes back through `of_json`; `check_tensors` says whether what came of it can be served. Only the last step insists on
datatypes and dims, because until then a model may still supply them.

What this does not do: it does not judge whether the server acts on a field. Each field of the schema is read, kept and
shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

import attrs
import orjson

from trio_infer.errors import ModelLoadError
from trio_infer.protocol.config_checks import BY_CONFIG_NAME, fault_of, fault_of_cache, fault_of_tensor
from trio_infer.protocol.config_defaults import normalise
from trio_infer.protocol.config_schema import SchemaError, enum_name, from_json, from_text, new_config, plain
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.queueing import Batching, Needs, Queueing
from trio_infer.protocol.sequencing import Sequencing
from trio_infer.protocol.values import Signature, TensorSpec
from trio_infer.protocol.worker_settings import WORKER_PARAMETERS, WorkerSettings

__all__ = ["BatchInput", "EnsembleStep", "ModelConfig", "Ragged", "VersionPolicy"]

_OWN_PARAMETERS: Final = {
    "on_disconnect": ("cancel|finish", "'cancel' or 'finish'"),
    "cancel_tasks": ("true|false", "'true' or 'false'"),
    "execution": ("process|thread", "'process' or 'thread'"),
    **WORKER_PARAMETERS,
    "max_slots": ("[1-9][0-9]{0,4}", "a whole number from 1 to 99999"),
    "prefill_budget": ("[1-9][0-9]{0,8}", "a whole number of tokens, 1 or more"),
}
"""The keys of `parameters` that the server itself reads: what they may be, as a pattern and in words."""


@attrs.frozen
class VersionPolicy:
    """Which of a model's versions are served.

    Args:
        latest: that many with the highest numbers; 0 if the policy is another.
        specific: exactly these.
        every: all there are.
    """

    latest: int = 0
    specific: tuple[int, ...] = ()
    every: bool = False

    def pick(self, found: Iterable[int]) -> tuple[int, ...]:
        """The versions to serve among those found, lowest first. A specific version that wasn't found is not in it."""
        versions = sorted(set(found))
        if self.every:
            return tuple(versions)
        if self.specific:
            return tuple(version for version in versions if version in self.specific)
        return tuple(versions[-self.latest :])


@attrs.frozen
class BatchInput:
    """A tensor that tells a model how a ragged batch is made up.

    Args:
        kind: what it tells; one of `KINDS`.
        targets: what the model calls it.
        datatype: of it.
        source: the input that it tells of.
    """

    KINDS: ClassVar[tuple[str, ...]] = (
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
        "BATCH_ITEM_SHAPE",
        "BATCH_ITEM_SHAPE_FLATTEN",
    )

    kind: str
    targets: tuple[str, ...]
    datatype: Datatype
    source: str


@attrs.frozen
class Ragged:
    """What differs in shape within a batch.

    Args:
        inputs: whose elements are laid end to end.
        batch_inputs: what tells of them.
        scattered: outputs that are taken apart like an input, by name, and that input.
    """

    inputs: frozenset[str] = frozenset()
    batch_inputs: tuple[BatchInput, ...] = ()
    scattered: Mapping[str, str] = MappingProxyType({})

    def __bool__(self) -> bool:
        return bool(self.inputs or self.batch_inputs or self.scattered)


@attrs.frozen
class EnsembleStep:
    """One step of an ensemble.

    Args:
        model, version: who is asked; less than 1 for the newest version.
        inputs, outputs: the ensemble's tensors, by the names that they have with the model.
    """

    model: str
    version: int
    inputs: dict[str, str]
    outputs: dict[str, str]


@attrs.frozen(eq=False)
class ModelConfig:
    """One model's configuration, normalised: what was left out has the value it stands for.

    Args:
        message: the protobuf message; nobody changes it any more.
        where: the file it came from, for error messages; None if it came from code.
        has_instance_group: whether it said how many instances there are, or was given the usual one.
    """

    message: Any = attrs.field(repr=False)
    where: Path | None = None
    has_instance_group: bool = False

    @classmethod
    def parse(cls, text: str, *, name: str, where: Path) -> ModelConfig:
        """Read a `config.pbtxt`.

        Args:
            text: protobuf text; may be empty, and may leave out `name`.
            name: the model's directory.
            where: the file, for error messages.

        Raises:
            ModelLoadError: with the line: an unknown field, a value that can't be, a name that isn't the directory's.
        """
        try:
            message = from_text(text)
        except SchemaError as error:
            raise ModelLoadError(name, error.reason, where=where, line=error.line) from None
        return cls._checked(message, name, where, lambda pattern: _line_of(text, pattern))

    @classmethod
    def of_json(cls, data: Mapping[str, Any], *, name: str, where: Path | None = None) -> ModelConfig:
        """Take a configuration from JSON values, as `as_json` gives them; numbers may also be strings.

        Raises:
            ModelLoadError: a field that doesn't exist, a value that can't be.
        """
        try:
            message = from_json(data)
        except SchemaError as error:
            raise ModelLoadError(name, error.reason, where=where) from None
        return cls._checked(message, name, where, lambda _: None)

    @classmethod
    def of_signature(cls, signature: Signature, *, instances: int | None) -> ModelConfig:
        """The configuration of a model that says everything in code.

        Args:
            signature: its name, tensors, batching.
            instances: how many requests it takes at once; None (any number) shows as 1.
        """
        message = new_config()
        message.name = signature.name
        message.backend = "trio_infer"
        _write_tensors(message, signature)
        if signature.decoupled:
            message.model_transaction_policy.decoupled = True
        message.instance_group.add(count=1 if instances is None else instances)
        normalise(message)
        return cls(message)

    def with_code(self, signature: Signature, *, instances: int | None) -> ModelConfig:
        """The same, with what a native model's code says and the file doesn't.

        Args:
            signature, instances: as for `of_signature`; where the file says something, they say the same.
        """
        message = new_config()
        message.CopyFrom(self.message)
        if not message.input and not message.output:
            _write_tensors(message, signature)
        if signature.decoupled or message.HasField("model_transaction_policy"):
            message.model_transaction_policy.decoupled = signature.decoupled
        if not self.has_instance_group:
            message.instance_group[0].count = 1 if instances is None else instances
        return attrs.evolve(self, message=message)

    @classmethod
    def _checked(cls, message: Any, name: str, where: Path | None, line_of: Callable[[str], int | None]) -> ModelConfig:
        def broken(reason: str, pattern: str) -> ModelLoadError:
            return ModelLoadError(name, reason, where=where, line=line_of(pattern))

        if message.name not in {"", name}:
            reason = (
                f"it is named '{message.name}' but its directory is '{name}'; make them the same or leave `name` out"
            )
            raise broken(reason, r"\bname\s*:\s*[\"']" + re.escape(message.name))
        message.name = name
        if message.max_batch_size < 0:
            raise broken(f"`max_batch_size` must be 0 or more, got {message.max_batch_size}", r"\bmax_batch_size\b")
        if any(group.count < 0 for group in message.instance_group):
            raise broken("the `count` of an `instance_group` must be 1 or more", r"\bcount\s*:\s*-")
        for key, allowed in _OWN_PARAMETERS.items():
            value = message.parameters[key].string_value if key in message.parameters else None
            if value is not None and not re.fullmatch(allowed[0], value):
                raise broken(f"parameter `{key}` must be {allowed[1]}, got '{value}'", rf"\b{key}\b")
        policy = message.version_policy
        if policy.HasField("latest") and policy.latest.num_versions < 1:
            raise broken("`version_policy` must keep at least 1 of the `latest`", r"\blatest\b")
        if policy.HasField("specific") and not all(version > 0 for version in [*policy.specific.versions] or [0]):
            raise broken("`version_policy` must list `specific` versions, each 1 or more", r"\bspecific\b")
        fault = fault_of(message)
        if fault is not None:
            raise broken(*fault)
        has_instance_group = bool(message.instance_group)
        ensemble = message.platform == "ensemble" or message.HasField("ensemble_scheduling")
        if ensemble and has_instance_group:
            raise broken(f"instance group should not be specified for ensemble '{name}'", r"\binstance_group\b")
        normalise(message)
        config = cls(message, where, has_instance_group)
        try:
            _ = config.sequencing
        except ValueError as error:
            raise broken(str(error), r"\bsequence_batching\b") from None
        return config

    @property
    def name(self) -> str:
        return str(self.message.name)

    @property
    def backend(self) -> str:
        return str(self.message.backend)

    @property
    def platform(self) -> str:
        return str(self.message.platform)

    @property
    def is_ensemble(self) -> bool:
        return self.platform == "ensemble" or bool(self.message.HasField("ensemble_scheduling"))

    @property
    def ensemble_steps(self) -> tuple[EnsembleStep, ...]:
        """The steps of an ensemble, in the order of the configuration."""
        return tuple(
            EnsembleStep(step.model_name, step.model_version, dict(step.input_map), dict(step.output_map))
            for step in self.message.ensemble_scheduling.step
        )

    def with_decoupled(self, decoupled: bool) -> ModelConfig:
        """The same for a model that has any number of responses, or just one."""
        message = new_config()
        message.CopyFrom(self.message)
        message.model_transaction_policy.decoupled = decoupled
        return attrs.evolve(self, message=message)

    @property
    def max_batch_size(self) -> int:
        return int(self.message.max_batch_size)

    @property
    def decoupled(self) -> bool:
        return bool(self.message.model_transaction_policy.decoupled)

    @property
    def default_model_filename(self) -> str:
        return str(self.message.default_model_filename)

    @property
    def parameters(self) -> dict[str, str]:
        return {key: value.string_value for key, value in sorted(self.message.parameters.items())}

    @property
    def on_disconnect(self) -> Literal["cancel", "finish"] | None:
        """Our own parameter; None leaves it to the server."""
        choice = self.parameters.get("on_disconnect")
        return None if choice is None else "finish" if choice == "finish" else "cancel"

    @property
    def cancel_tasks(self) -> bool:
        """Our own parameter: whether the coroutine of an `async def execute` is cancelled when its client leaves."""
        return self.parameters.get("cancel_tasks") == "true"

    @property
    def token_loop(self) -> dict[str, int]:
        """Our own parameters of token models: `max_slots` (or as many as there are instances), `prefill_budget`."""
        given = {"max_slots": self.instance_count} if self.has_instance_group else {}
        wanted = self.parameters
        return given | {key: int(wanted[key]) for key in ("max_slots", "prefill_budget") if key in wanted}

    @property
    def execution(self) -> Literal["process", "thread"] | None:
        """Our own parameter: where a Python model runs; None leaves it to the server."""
        choice = self.parameters.get("execution")
        return None if choice is None else "thread" if choice == "thread" else "process"

    @property
    def worker(self) -> WorkerSettings:
        """How its worker processes are run."""
        stateful = bool(self.message.HasField("sequence_batching"))
        return WorkerSettings.of_parameters(self.parameters, stateful=stateful)

    @property
    def cancel_grace(self) -> float | None:
        """In seconds: how long a cancelled request may go on before its process is killed; None for any time."""
        return self.worker.grace

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """As clients see them: `dims`, whatever `reshape` says. Needs `check_tensors` to have passed."""
        return tuple(
            TensorSpec(tensor.name, _datatype(tensor), tuple(tensor.dims), optional=tensor.optional)
            for tensor in self.message.input
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """As clients see them. Needs `check_tensors` to have passed."""
        return tuple(TensorSpec(tensor.name, _datatype(tensor), tuple(tensor.dims)) for tensor in self.message.output)

    @property
    def reshapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """By tensor name: the dims that clients see, and those that the model sees; only tensors with a `reshape`."""
        return {
            tensor.name: (tuple(tensor.dims), tuple(tensor.reshape.shape))
            for tensor in (*self.message.input, *self.message.output)
            if tensor.HasField("reshape")
        }

    @property
    def instance_count(self) -> int:
        """How many requests may run at once: all instance groups together."""
        return sum(_size(group) for group in self.message.instance_group)

    @property
    def batching(self) -> Batching | None:
        """How requests are joined to batches; None if each runs by itself."""
        if self.max_batch_size < 1 or not self.message.HasField("dynamic_batching"):
            return None
        return Batching.of_message(self.message.dynamic_batching)

    @property
    def queueing(self) -> Queueing:
        """Who waits in front of whom, for how long, and how many may."""
        has_queues = self.message.HasField("dynamic_batching")
        return Queueing.of_message(self.message.dynamic_batching) if has_queues else Queueing()

    def with_scheduling(self, queueing: Queueing | None, batching: Batching | None) -> ModelConfig:
        """The same with what a native model's code says of its queue; what the file says goes before it."""
        if (queueing is None and batching is None) or self.message.HasField("dynamic_batching"):
            return self
        message = new_config()
        message.CopyFrom(self.message)
        (batching or Batching()).write(message.dynamic_batching)
        (queueing or Queueing()).write(message.dynamic_batching)
        normalise(message)
        return attrs.evolve(self, message=message)

    @property
    def response_cache(self) -> bool:
        """Whether answers are to be kept, if the server has a cache."""
        return bool(self.message.response_cache.enable)

    @property
    def cache_fault(self) -> str:
        """Why answers can't be kept although they are to be; "" if they can."""
        fault = fault_of_cache(self.message)
        return "" if fault is None else fault[0]

    def with_response_cache(self) -> ModelConfig:
        """The same for a native model whose code says that it is to be cached; what the file says goes before it."""
        if self.message.HasField("response_cache"):
            return self
        message = new_config()
        message.CopyFrom(self.message)
        message.response_cache.enable = True
        return attrs.evolve(self, message=message)

    @property
    def ragged_inputs(self) -> frozenset[str]:
        """Inputs whose shapes may differ within a batch."""
        return frozenset(tensor.name for tensor in self.message.input if tensor.allow_ragged_batch)

    @property
    def ragged(self) -> Ragged:
        """What differs in shape within a batch, and how that is told and undone."""
        return Ragged(
            self.ragged_inputs,
            tuple(
                BatchInput(enum_name(given, "kind"), tuple(given.target_name), _datatype(given), given.source_input[0])
                for given in self.message.batch_input
            ),
            {name: taken.source_input[0] for taken in self.message.batch_output for name in taken.target_name},
        )

    @property
    def version_policy(self) -> VersionPolicy:
        policy = self.message.version_policy
        return VersionPolicy(
            latest=policy.latest.num_versions if policy.HasField("latest") else 0,
            specific=tuple(policy.specific.versions),
            every=policy.HasField("all"),
        )

    def with_promise(self, stops: str) -> ModelConfig:
        """The same with the parameter `stops`: where a cancelled run ends, which only the server knows."""
        return self.with_parameters({"stops": stops})

    def with_parameters(self, parameters: Mapping[str, str]) -> ModelConfig:
        """The same with more parameters, or others in place of those of that name."""
        message = new_config()
        message.CopyFrom(self.message)
        for key, value in parameters.items():
            message.parameters[key].string_value = value
        return attrs.evolve(self, message=message)

    def renamed(self, name: str) -> ModelConfig:
        """The same for a model that is served under another name than its directory's."""
        return self._changed(name=name)

    def with_backend(self, backend: str, filename: str) -> ModelConfig:
        """The same with the backend, and the name of the model's file, that were found out."""
        return self._changed(backend=backend, default_model_filename=filename)

    def _changed(self, **fields: str) -> ModelConfig:
        message = new_config()
        message.CopyFrom(self.message)
        for name, value in fields.items():
            setattr(message, name, value)
        normalise(message)
        return attrs.evolve(self, message=message)

    @property
    def sequencing(self) -> Sequencing | None:
        """How requests of sequences are served; None if requests have nothing to do with each other."""
        if not self.message.HasField("sequence_batching"):
            return None
        return Sequencing.of_message(self.message.sequence_batching, self.max_batch_size)

    @property
    def warm_ups(self) -> tuple[Any, ...]:
        """The samples of `model_warmup`, as the schema has them."""
        return tuple(self.message.model_warmup)

    @property
    def label_files(self) -> dict[str, str]:
        """By output: the file of its labels, in the model's directory; only outputs that have one."""
        return {tensor.name: tensor.label_filename for tensor in self.message.output if tensor.label_filename}

    def instance_name(self, index: int) -> str:
        """What the instance is called: its group and its number there.

        Args:
            index: from 0, counted through all groups in their order.

        Raises:
            IndexError: there are not so many.
        """
        group, number = self._place(index)
        return f"{group.name}_{number}"

    def instance_device(self, index: int) -> tuple[str, int]:
        """Kind (`"CPU"`, `"GPU"`, `"MODEL"`) and device number of an instance."""
        group, number = self._place(index)
        kind = enum_name(group, "kind").removeprefix("KIND_")
        return kind, group.gpus[number % len(group.gpus)] if kind == "GPU" and group.gpus else 0

    def instance_kind(self, index: int) -> Hashable:
        """What instances have in common that can stand in for each other: their group and device."""
        return (self._place(index)[0].name, self.instance_device(index))

    @property
    def spare_names(self) -> dict[int, list[str]]:
        """The names of spare instances, by the index of the first instance that they can stand in for.

        An instance can be stood in for by one of the same group and device.
        """
        kinds: dict[Hashable, int] = {}
        for index in range(self.instance_count):
            kinds.setdefault(self.instance_kind(index), index)
        names: dict[int, list[str]] = {}
        numbers = {group.name: _size(group) for group in self.message.instance_group}
        for index in kinds.values():
            group = self._place(index)[0].name
            count = self.worker.spares
            names[index] = [f"{group}_{numbers[group] + spare}" for spare in range(count)]
            numbers[group] += count
        return names

    def instance_needs(self, index: int) -> Needs:
        """What an instance needs while it runs."""
        group, _ = self._place(index)
        return Needs.of_message(group.rate_limiter, self.instance_device(index)[1])

    def _place(self, index: int) -> tuple[Any, int]:
        number = index
        for group in self.message.instance_group:
            if number < _size(group):
                return group, number
            number -= _size(group)
        raise IndexError(f"'{self.name}' has {self.instance_count} instances, no number {index}")

    def signature(self, version: str, labels: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> Signature:
        """What requests for this version are checked against.

        Args:
            labels: of the classes of those outputs that have some.
        """
        outputs = (attrs.evolve(spec, labels=labels.get(spec.name, ())) for spec in self.outputs)
        return Signature(
            self.name,
            version,
            self.inputs,
            tuple(outputs),
            max_batch_size=self.max_batch_size,
            decoupled=self.decoupled,
        )

    def check_tensors(self) -> None:
        """Whether each tensor is complete.

        Raises:
            ModelLoadError: a tensor without a name, datatype or dims, a dim that can't be, a name given twice.
        """
        for kind, tensors in (("input", self.message.input), ("output", self.message.output)):
            seen: set[str] = set()
            for number, tensor in enumerate(tensors):
                reason = fault_of_tensor(tensor, seen)
                if reason:
                    which = f"'{tensor.name}'" if tensor.name else f"number {number + 1}"
                    raise ModelLoadError(self.name, f"{kind} {which} {reason}", where=self.where)
                seen.add(tensor.name)

    def as_json(self) -> dict[str, Any]:
        """The configuration as `/config` shows it: every plain field, and messages if they are set.

        Returns:
            a new dict of plain values, in the schema's order; 64-bit integers are numbers.
        """
        result: dict[str, Any] = plain(self.message)
        return result

    @property
    def json_text(self) -> str:
        """`as_json` as text: what a model is given as `model_config`."""
        return orjson.dumps(self.as_json()).decode()


def _write_tensors(message: Any, signature: Signature) -> None:
    message.max_batch_size = signature.max_batch_size
    for target, specs in ((message.input, signature.inputs), (message.output, signature.outputs)):
        for spec in specs:
            tensor = target.add(name=spec.name, data_type=spec.datatype.config_name, dims=spec.shape)
            if spec.optional and target is message.input:
                tensor.optional = True


def _size(group: Any) -> int:
    by_gpu = enum_name(group, "kind") == "KIND_GPU" and len(group.gpus)
    return int(group.count * (by_gpu or 1))


def _datatype(tensor: Any) -> Datatype:
    return BY_CONFIG_NAME[enum_name(tensor, "data_type")]


def _line_of(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else text.count("\n", 0, found.start()) + 1
