"""What a configuration that leaves something out means by that; as Triton fills it in."""

from __future__ import annotations

from typing import Any

from trio_infer.protocol.config_schema import enum_name

__all__ = ["normalise"]


def normalise(message: Any) -> None:
    """Fill in what is left out."""
    if not message.version_policy.WhichOneof("policy_choice"):
        message.version_policy.latest.num_versions = 1
    for memory in (message.optimization.input_pinned_memory, message.optimization.output_pinned_memory):
        if not memory.ListFields():
            memory.enable = True
    if message.HasField("ensemble_scheduling"):
        message.platform = "ensemble"
    if not message.instance_group and message.platform != "ensemble":
        message.instance_group.add(name=message.name)
    for number, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{number}"
        group.count = max(group.count, 1)
        if enum_name(group, "kind") == "KIND_AUTO":
            group.kind = "KIND_GPU" if group.gpus else "KIND_CPU"
    if message.backend == "python" and not message.default_model_filename:
        message.default_model_filename = "model.py"
    _normalise_batchers(message)


def _normalise_batchers(message: Any) -> None:
    batchers = []
    if message.HasField("dynamic_batching"):
        batchers.append(message.dynamic_batching)
    if message.HasField("sequence_batching"):
        sequences = message.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or 1_000_000
        if sequences.HasField("oldest"):
            batchers.append(sequences.oldest)
    for batcher in batchers:
        if not batcher.preferred_batch_size and message.max_batch_size:
            batcher.preferred_batch_size.append(message.max_batch_size)
