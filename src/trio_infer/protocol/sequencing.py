"""Sequences as a configuration has them (`sequence_batching`), and what a model is given for them: plain values.

A model is told of a request's place in its sequence by *control inputs*, which clients don't send: whether the sequence
starts or ends here, whether there is a request at all, and which sequence it is. With *implicit state* it is also given
what it made of the sequence's last request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import attrs
import numpy as np

from trio_infer.errors import InferError
from trio_infer.protocol.config_checks import BY_CONFIG_NAME
from trio_infer.protocol.config_schema import enum_name
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.queueing import Batching
from trio_infer.protocol.values import Array, InferRequest

__all__ = ["Control", "Sequencing", "State", "sequence_of"]

_BOUNDS: Final = {"UINT32": (0, 2**32), "INT32": (-(2**31), 2**31), "UINT64": (0, 2**64), "INT64": (-(2**63), 2**63)}


@attrs.frozen
class Control:
    """One control input.

    Args:
        name: the model's input.
        kind: what it tells.
        datatype: of the tensor.
        false, true: how it says no and yes; not for "corrid".
    """

    name: str
    kind: Literal["start", "ready", "end", "corrid"]
    datatype: Datatype
    false: float = 0
    true: float = 1


@attrs.frozen
class State:
    """One tensor that goes from each request of a sequence to the next.

    Args:
        input, output: what the model calls it.
        datatype, shape: of the tensor, without a batch dimension.
        file: of its first value, in the model's directory `initial_state`; "" for zeros.
    """

    input: str
    output: str
    datatype: Datatype
    shape: tuple[int, ...]
    file: str = ""


@attrs.frozen
class Sequencing:
    """How requests of sequences are served; Triton's `sequence_batching`.

    Args:
        slots: sequences that an instance has in hand at once; others wait.
        idle: seconds after which a sequence that nobody asks for any more loses its slot.
        batching: how requests of several sequences are joined.
        controls, states: see there.
        iterative: whether the model may have a request come again.
    """

    slots: int
    idle: float
    batching: Batching
    controls: tuple[Control, ...] = ()
    states: tuple[State, ...] = ()
    iterative: bool = False

    @classmethod
    def of_message(cls, message: Any, max_batch_size: int) -> Sequencing:
        """From the configuration's `ModelSequenceBatching`.

        Raises:
            ValueError: a control or a state that can't be.
        """
        rows = max(max_batch_size, 1)
        if message.HasField("oldest"):
            oldest = message.oldest
            if oldest.max_candidate_sequences < 0:
                raise ValueError(f"`max_candidate_sequences` can't be negative, got {oldest.max_candidate_sequences}")
            for size in oldest.preferred_batch_size:
                if not 0 < size <= rows:
                    raise ValueError(f"`preferred_batch_size` must be from 1 to `max_batch_size` ({rows}), got {size}")
            slots = oldest.max_candidate_sequences or rows
            delay = oldest.max_queue_delay_microseconds / 1e6
            batching = Batching(tuple(sorted(set(oldest.preferred_batch_size))), delay, oldest.preserve_ordering)
        else:
            slots, share = rows, message.direct.minimum_slot_utilization
            if not 0 <= share <= 1:
                raise ValueError(f"`minimum_slot_utilization` must be from 0 to 1, got {share:g}")
            enough = max(math.ceil(share * rows), 1)
            batching = Batching((), message.direct.max_queue_delay_microseconds / 1e6, enough=enough)
        controls = tuple(_control(given.name, control) for given in message.control_input for control in given.control)
        states = tuple(map(_state, message.state))
        inputs = [*(control.name for control in controls), *(state.input for state in states)]
        for names in (inputs, [state.output for state in states]):
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"tensor '{name}' is named twice by control inputs and states")
        return cls(
            slots, message.max_sequence_idle_microseconds / 1e6, batching, controls, states, message.iterative_sequence
        )

    def inputs(self, key: int | str, *, start: bool, end: bool, batched: bool) -> dict[str, Array]:
        """The control inputs of one request.

        Args:
            key: of its sequence.
            batched: whether tensors have a batch dimension.

        Raises:
            InferError: the model has no tensor for such a key.
        """
        told: dict[str, float | bytes | int] = {}
        said = {"start": start, "end": end, "ready": True}
        for control in self.controls:
            if control.kind == "corrid":
                told[control.name] = _key(key, control)
            else:
                told[control.name] = control.true if said[control.kind] else control.false
        shape = (1, 1) if batched else (1,)
        dtypes = {control.name: control.datatype.dtype for control in self.controls}
        return {name: np.array([value], dtypes[name]).reshape(shape) for name, value in told.items()}

    def first_states(self, read: Callable[[State], Array], *, batched: bool) -> dict[str, Array]:
        """What a sequence's first request is given as state.

        Args:
            read: gives the first value of a state that has a file.
        """
        states = {state.input: read(state) if state.file else _zeros(state) for state in self.states}
        return {name: array[None] if batched else array for name, array in states.items()}


def sequence_of(request: InferRequest) -> tuple[int | str, bool, bool]:
    """A request's sequence ("" or 0 for none), and whether it starts and ends with it."""
    parameters: Mapping[str, Any] = request.parameters
    key = parameters.get("sequence_id", 0)
    known = key if isinstance(key, int | str) and not isinstance(key, bool) else 0
    return known, parameters.get("sequence_start") is True, parameters.get("sequence_end") is True


def _control(name: str, message: Any) -> Control:
    kind: Any = enum_name(message, "kind").removeprefix("CONTROL_SEQUENCE_").lower()
    if kind == "corrid":
        datatype = BY_CONFIG_NAME.get(enum_name(message, "data_type"), Datatype.UINT64)
        if datatype is not Datatype.BYTES and datatype.value not in _BOUNDS:
            raise ValueError(f"control input '{name}' must have a `data_type` of 32 or 64 bit integers, or TYPE_STRING")
        return Control(name, kind, datatype)
    for field, datatype in (
        ("int32_false_true", Datatype.INT32),
        ("fp32_false_true", Datatype.FP32),
        ("bool_false_true", Datatype.BOOL),
    ):
        values = getattr(message, field)
        if len(values) == 2:
            return Control(name, kind, datatype, *values)
    raise ValueError(f"control input '{name}' must say what is false and what is true, such as int32_false_true [0, 1]")


def _state(message: Any) -> State:
    datatype = BY_CONFIG_NAME.get(enum_name(message, "data_type"))
    if datatype is None or not (message.input_name and message.output_name and message.dims):
        name = message.input_name or message.output_name
        raise ValueError(f"state '{name}' must have an `input_name`, an `output_name`, a `data_type` and `dims`")
    dims, file = tuple(message.dims), ""
    for initial in message.initial_state:
        dims, file = tuple(initial.dims) or dims, initial.data_file
    return State(message.input_name, message.output_name, datatype, tuple(max(dim, 1) for dim in dims), file)


def _zeros(state: State) -> Array:
    array = np.zeros(state.shape, state.datatype.dtype)
    if state.datatype is Datatype.BYTES:
        array.fill(b"")
    return array


def _key(key: int | str, control: Control) -> int | bytes:
    if control.datatype is Datatype.BYTES:
        return str(key).encode()
    low, beyond = _BOUNDS[control.datatype.value]
    if isinstance(key, str) or not low <= key < beyond:
        kind = "a string" if isinstance(key, str) else str(key)
        raise InferError(f"the sequence id must be a number that fits {control.datatype.value}, got {kind}")
    return key
