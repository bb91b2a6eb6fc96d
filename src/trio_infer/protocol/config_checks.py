"""What is wrong with a configuration that the schema allows: each fault in words, and where it is in the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from trio_infer.protocol.config_schema import enum_name
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.worker_settings import fault_of_worker

__all__ = ["BY_CONFIG_NAME", "fault_of", "fault_of_cache", "fault_of_tensor"]

BY_CONFIG_NAME: Final = {datatype.config_name: datatype for datatype in Datatype}
"""Datatypes by the schema's names for them."""


def fault_of(message: Any) -> tuple[str, str] | None:
    """What is wrong with how requests are joined, answers kept or processes run; and a pattern that finds it."""
    given = {key: value.string_value for key, value in message.parameters.items()}
    return (
        _fault_of_batching(message)
        or fault_of_cache(message)
        or _fault_of_ragged(message)
        or fault_of_worker(given, stateful=message.HasField("sequence_batching"))
    )


def fault_of_cache(message: Any) -> tuple[str, str] | None:
    """Why answers can't be kept that are to be, Triton's words first; and a pattern that finds it in the text."""
    if not message.response_cache.enable:
        return None
    if message.model_transaction_policy.decoupled:
        what = "with 'decoupled' transaction policy"
    elif message.HasField("sequence_batching"):
        what = "with `sequence_batching`, where an answer depends on what was asked before"
    else:
        return None
    reason = f"Response Cache does not currently support model {message.name} {what}. Please disable the response cache"
    return reason, r"\bresponse_cache\b"


def _fault_of_batching(message: Any) -> tuple[str, str] | None:
    """What is wrong with `dynamic_batching`, and a pattern that finds it in the text."""
    if not message.HasField("dynamic_batching"):
        return None
    batching, most = message.dynamic_batching, message.max_batch_size
    for size in batching.preferred_batch_size:
        if not 0 < size <= most:
            reason = f"`preferred_batch_size` must be from 1 to `max_batch_size` ({most}), got {size}"
            return reason, r"\bpreferred_batch_size\b"
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 0 < default <= levels:
        reason = f"`default_priority_level` must be from 1 to `priority_levels` ({levels}), got {default}"
        return reason, r"\bdefault_priority_level\b" if default else r"\bpriority_levels\b"
    return None


def _fault_of_ragged(message: Any) -> tuple[str, str] | None:
    """What is wrong with `batch_input` and `batch_output`, and a pattern that finds it in the text."""
    inputs = {tensor.name: tensor for tensor in message.input}
    for field in ("batch_input", "batch_output"):
        for given in getattr(message, field):
            sources = list(given.source_input)
            if len(sources) != 1 or sources[0] not in inputs:
                reason = f"`{field}` must name one input as its `source_input`, got {sources}"
                return reason, rf"\b{field}\b"
    for given in message.batch_input:
        if enum_name(given, "data_type") not in BY_CONFIG_NAME:
            return f"`batch_input` {list(given.target_name)} has no `data_type`", r"\bbatch_input\b"
    for tensor in message.input:
        native = message.backend == "trio_infer"  # others get each request by itself
        if native and tensor.allow_ragged_batch and (message.max_batch_size < 1 or tensor.HasField("reshape")):
            what = "a `max_batch_size` of 1 or more, and no `reshape`"
            return f"`allow_ragged_batch` of input '{tensor.name}' needs {what}", r"\ballow_ragged_batch\b"
    return None


def fault_of_tensor(tensor: Any, seen: set[str]) -> str:
    """What is wrong with an input or output, or ""; `seen` are the names before it."""
    if not tensor.name:
        return "has no name"
    if tensor.name in seen:
        return "is there twice"
    if enum_name(tensor, "data_type") not in BY_CONFIG_NAME:
        return "has no `data_type`"
    if not tensor.dims:
        return "has no `dims`"
    if any(dim == 0 or dim < -1 for dim in tensor.dims):
        return f"has dims {list(tensor.dims)}; each must be 1 or more, or -1 for any size"
    if tensor.HasField("reshape") and not _fits(tensor.dims, tensor.reshape.shape):
        dims, shape = list(tensor.dims), list(tensor.reshape.shape)
        return f"can't `reshape` from {dims} to {shape}: both must have the same size, and as many -1"
    return ""


def _fits(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor of these dims can take this shape, whatever size each -1 has."""
    sizes = [math.prod(dim for dim in side if dim != -1) for side in (dims, shape)]
    variable = [sum(dim == -1 for dim in side) for side in (dims, shape)]
    return sizes[0] == sizes[1] and variable[0] == variable[1] and all(dim == -1 or dim > 0 for dim in shape)
