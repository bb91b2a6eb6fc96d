"""What an ensemble's steps need and make: read from its configuration, checked, and put in order; no I/O.

An ensemble's steps exchange *tensors* by name: the request's inputs are there from the start, and each step takes some,
and makes others of them. So the steps form a graph, which must have no ring, and in which each tensor has one maker.

A step whose model is decoupled gives any number of responses. All that depends on it, the ensemble's own response
included, is done anew for each of them; all else is done once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import attrs

from trio_infer.errors import ModelLoadError
from trio_infer.protocol.model_config import EnsembleStep, ModelConfig
from trio_infer.protocol.values import Signature, TensorSpec

__all__ = ["EnsemblePlan", "Step"]


@attrs.frozen
class Step:
    """One step.

    Args:
        number: from 1, as errors name it.
        model, version: who is asked; "" for the newest version.
        inputs: tensors by the names of the model's inputs.
        outputs: tensors by the names of the model's outputs.
    """

    number: int
    model: str
    version: str
    inputs: Mapping[str, str] = attrs.field(hash=False)
    outputs: Mapping[str, str] = attrs.field(hash=False)

    @property
    def label(self) -> str:
        return f"step {self.number} model '{self.model}'"


@attrs.frozen
class EnsemblePlan:
    """All steps, those that others depend on first.

    Args:
        name: the ensemble's.
        inputs, outputs: the ensemble's own tensors.
        steps: in an order in which they could run one by one.
        most_in_flight: responses of one decoupled step that may be on their way at once; 0 for any number.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    most_in_flight: int = 0

    @classmethod
    def of_config(cls, config: ModelConfig) -> EnsemblePlan:
        """Read the steps.

        Raises:
            ModelLoadError: there are none, a tensor has no maker or two, a step depends on itself, an input isn't used.
        """

        steps = [_step(number, step) for number, step in enumerate(config.ensemble_steps, 1)]
        try:
            makers = _makers(config, steps)
            _check_uses(config, steps, makers)
            graph = {step: {makers[tensor] for tensor in step.inputs.values()} - {None} for step in steps}
            order = tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            ring = " -> ".join(str(step.number) for step in error.args[1])
            reason = f"its steps depend on each other in a ring: {ring}"
            raise ModelLoadError(config.name, reason, where=config.where) from None
        except ValueError as error:
            raise ModelLoadError(config.name, str(error), where=config.where) from None
        steps = [step for step in order if step is not None]
        most = int(config.message.ensemble_scheduling.max_inflight_requests)
        return cls(config.name, config.inputs, config.outputs, tuple(steps), most)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that its steps ask, each once."""
        return tuple(dict.fromkeys(step.model for step in self.steps))

    def needed(self, outputs: Iterable[str]) -> tuple[Step, ...]:
        """The steps that these tensors depend on; in order."""
        wanted = set(outputs)
        needed = []
        for step in reversed(self.steps):
            if wanted & set(step.outputs.values()):
                needed.append(step)
                wanted |= set(step.inputs.values())
        return tuple(reversed(needed))

    def check(self, signatures: Mapping[Step, Signature], *, max_batch_size: int) -> None:
        """Whether the models fit each other and the ensemble's own tensors.

        Args:
            signatures: of each step's model.
            max_batch_size: the ensemble's own; 0 if its tensors have no batch dimension.

        Raises:
            ModelLoadError: a name that the model doesn't have, a required input that nothing goes to, other datatypes
                or dims, smaller batches than the ensemble takes, two decoupled steps of which neither depends on the
                other.
        """
        batched = max_batch_size > 0
        known = {spec.name: ("the ensemble", spec, batched) for spec in self.inputs}
        for step in self.steps:
            signature = signatures[step]
            has_batch = signature.max_batch_size > 0
            if has_batch and signature.max_batch_size < max_batch_size:
                raise self._broken(
                    f"ensemble '{self.name}' allows maximum batch size {max_batch_size}, but it contains model "
                    f"'{step.model}' which only allows maximum batch size to be {signature.max_batch_size}"
                )
            inputs = {spec.name: spec for spec in signature.inputs}
            for name, tensor in step.inputs.items():
                if name not in inputs:
                    raise self._broken(f"{step.label} has no input '{name}'; it has {', '.join(inputs)}")
                self._fit(tensor, known[tensor], (step.label, inputs[name], has_batch))
            missing = [spec.name for spec in signature.inputs if not spec.optional and spec.name not in step.inputs]
            if missing:
                raise self._broken(f"{step.label} has no tensor for its input '{missing[0]}' in `input_map`")
            outputs = {spec.name: spec for spec in signature.outputs}
            for name, tensor in step.outputs.items():
                if name not in outputs:
                    raise self._broken(f"{step.label} has no output '{name}'; it has {', '.join(outputs)}")
                known[tensor] = (step.label, outputs[name], has_batch)
        for spec in self.outputs:
            self._fit(spec.name, known[spec.name], ("the ensemble", spec, batched))
        streams = [step for step in self.steps if signatures[step].decoupled]
        for first, second in pairwise(streams):
            if second not in self.after(first, self.steps):
                raise self._broken(f"{first.label} and {second.label} are decoupled, and neither depends on the other")

    def after(self, step: Step, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Those of the steps that depend on one of them, at any distance; in order."""
        made = set(step.outputs.values())
        found = []
        for other in steps:
            if made & set(other.inputs.values()):
                found.append(other)
                made |= set(other.outputs.values())
        return tuple(found)

    def _broken(self, reason: str) -> ModelLoadError:
        return ModelLoadError(self.name, reason)

    def _fit(self, tensor: str, made: tuple[str, TensorSpec, bool], taken: tuple[str, TensorSpec, bool]) -> None:
        (maker, out, batch_out), (taker, into, batch_into) = made, taken
        if out.datatype is not into.datatype:
            raise self._broken(
                f"tensor '{tensor}' is {out.datatype.value} from {maker}, but {into.datatype.value} for {taker}"
            )
        dims_out, dims_into = list(out.shape), list(into.shape)
        if batch_out != batch_into:  # for the other side the batch is an ordinary dimension, of any size
            dims_out, dims_into = [-1] * batch_out + dims_out, [-1] * batch_into + dims_into
        alike = len(dims_out) == len(dims_into) and all(
            one == other or -1 in (one, other) for one, other in zip(dims_out, dims_into, strict=True)
        )
        if not alike:
            batch = "" if batch_out == batch_into else ", with the batch dimension that only one of them has"
            raise self._broken(
                f"tensor '{tensor}' has dims {dims_out} from {maker}, but {dims_into} for {taker}{batch}"
            )


def _step(number: int, step: EnsembleStep) -> Step:
    version = "" if step.version < 1 else str(step.version)
    return Step(number, step.model, version, step.inputs, step.outputs)


def _makers(config: ModelConfig, steps: Sequence[Step]) -> dict[str, Step | None]:
    """Which step makes each tensor; None for the ensemble's own inputs. Raises ValueError."""
    if not steps:
        raise ValueError("must specify 'step' in its `ensemble_scheduling`: there is none")
    makers: dict[str, Step | None] = {spec.name: None for spec in config.inputs}
    for step in steps:
        if not step.model:
            raise ValueError(f"must specify 'model_name' in step {step.number} of ensemble '{config.name}'")
        for tensor in step.outputs.values():
            if tensor in makers:
                first = makers[tensor]
                other = "an input of the ensemble" if first is None else f"made by step {first.number}"
                raise ValueError(f"tensor '{tensor}' is made by step {step.number}, but it is {other}")
            makers[tensor] = step
    return makers


def _check_uses(config: ModelConfig, steps: Sequence[Step], makers: Mapping[str, Step | None]) -> None:
    """Whether all that is taken is made, and all that comes in is taken. Raises ValueError."""
    for step in steps:
        for name, tensor in step.inputs.items():
            if tensor not in makers:
                raise ValueError(f"{step.label} takes tensor '{tensor}' as its input '{name}', but nothing makes that")
    for spec in config.outputs:
        if makers.get(spec.name) is None:
            raise ValueError(f"output '{spec.name}' of ensemble '{config.name}' is made by none of its steps")
    used = {tensor for step in steps for tensor in step.inputs.values()}
    for spec in config.inputs:
        if spec.name not in used:
            raise ValueError(f"input '{spec.name}' for ensemble '{config.name}' is not used by any of its steps")
