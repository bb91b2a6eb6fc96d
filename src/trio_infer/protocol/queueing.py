"""How requests may wait for a model, and how they may be joined: plain values, from a configuration or from code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import attrs

from trio_infer.protocol.config_schema import enum_name

__all__ = ["Batching", "Needs", "Pool", "QueuePolicy", "Queueing"]

MICRO: Final = 1e6
Pool: TypeAlias = "tuple[str, int | None]"
"""A resource's name, and the device that it is of; None for one pool for all."""

FOR_EVER: Final = 2**63
"""Microseconds; a float takes no integer of any size."""


def seconds(microseconds: int) -> float:
    """A time limit as the protocol gives it, in seconds; infinite for 0 and less, which stand for none."""
    return min(microseconds, FOR_EVER) / MICRO if microseconds > 0 else math.inf


def _microseconds(limit: float) -> int:
    return 0 if limit == math.inf else round(limit * MICRO)


@attrs.frozen
class QueuePolicy:
    """How long requests may wait, and how many may; Triton's `ModelQueuePolicy`.

    Args:
        max_queue_size: requests that may wait; 0 for any number. One more is refused at once (503).
        default_timeout: seconds that one may wait; infinite if there is no limit.
        timeout_action: of one that has waited for so long: "reject" answers 503; "delay" lets it wait behind all others
            of its priority level.
        allow_timeout_override: whether a request's own `timeout` may be shorter than the default. Where there is no
            default, a request's own counts in any case.
    """

    max_queue_size: int = 0
    default_timeout: float = math.inf
    timeout_action: Literal["reject", "delay"] = "reject"
    allow_timeout_override: bool = False

    def timeout(self, own: int) -> float:
        """Seconds that a request may wait.

        Args:
            own: its `timeout`, in microseconds; 0 if it has none.
        """
        if self.default_timeout == math.inf or self.allow_timeout_override:
            return min(self.default_timeout, seconds(own))
        return self.default_timeout

    def write(self, message: Any) -> None:
        """Into the configuration's `ModelQueuePolicy`."""
        message.max_queue_size = self.max_queue_size
        message.default_timeout_microseconds = _microseconds(self.default_timeout)
        message.timeout_action = 1 if self.timeout_action == "delay" else 0
        message.allow_timeout_override = self.allow_timeout_override

    @classmethod
    def of_message(cls, message: Any) -> QueuePolicy:
        """From the configuration's `ModelQueuePolicy`."""
        return cls(
            message.max_queue_size,
            seconds(message.default_timeout_microseconds),
            "delay" if enum_name(message, "timeout_action") == "DELAY" else "reject",
            message.allow_timeout_override,
        )


NO_POLICY: Final = QueuePolicy()


@attrs.frozen
class Queueing:
    """Who waits in front of whom.

    Args:
        default: the policy of levels that have none of their own.
        priority_levels: how many there are, 1 being served first; 0 if all requests are equal.
        default_priority_level: of requests that name none, or one that there isn't.
        by_level: policies of certain levels.
    """

    default: QueuePolicy = NO_POLICY
    priority_levels: int = 0
    default_priority_level: int = 0
    by_level: Mapping[int, QueuePolicy] = attrs.field(default=MappingProxyType({}))

    def level(self, priority: object) -> int:
        """The level that a request waits in; 0 if there are no levels.

        Args:
            priority: its parameter; 0 or any other number that is no level stands for the default.
        """
        if not self.priority_levels:
            return 0
        known = type(priority) is int and 0 < priority <= self.priority_levels
        return priority if known else self.default_priority_level  # type: ignore[return-value]  # `known` says so

    def policy(self, level: int) -> QueuePolicy:
        """The policy of a level."""
        return self.by_level.get(level, self.default)

    def write(self, message: Any) -> None:
        """Into the configuration's `ModelDynamicBatching`."""
        message.priority_levels = self.priority_levels
        message.default_priority_level = self.default_priority_level
        self.default.write(message.default_queue_policy)
        for level, policy in self.by_level.items():
            policy.write(message.priority_queue_policy[level])

    @classmethod
    def of_message(cls, message: Any) -> Queueing:
        """From the configuration's `ModelDynamicBatching`."""
        return cls(
            QueuePolicy.of_message(message.default_queue_policy),
            message.priority_levels,
            message.default_priority_level,
            {level: QueuePolicy.of_message(policy) for level, policy in message.priority_queue_policy.items()},
        )


@attrs.frozen
class Batching:
    """How requests are joined to batches; Triton's `dynamic_batching`, without its queues.

    Args:
        preferred: batch sizes, in rows, that are run at once; none stands for the model's largest.
        max_queue_delay: seconds that a request may wait for others to join it while an instance is free.
        preserve_ordering: whether answers are given in the order in which requests came, also if several instances
            finish in another.
        enough: rows that run at once though more could join; 0 if only full batches and time end the waiting.
    """

    preferred: tuple[int, ...] = ()
    max_queue_delay: float = 0.0
    preserve_ordering: bool = False
    enough: int = 0

    def write(self, message: Any) -> None:
        """Into the configuration's `ModelDynamicBatching`."""
        message.preferred_batch_size[:] = self.preferred
        message.max_queue_delay_microseconds = _microseconds(self.max_queue_delay)
        message.preserve_ordering = self.preserve_ordering

    @classmethod
    def of_message(cls, message: Any) -> Batching:
        """From the configuration's `ModelDynamicBatching`."""
        return cls(
            tuple(sorted(set(message.preferred_batch_size))),
            min(message.max_queue_delay_microseconds, FOR_EVER) / MICRO,
            message.preserve_ordering,
        )


@attrs.frozen
class Needs:
    """What an instance needs while it runs; Triton's `rate_limiter`.

    Args:
        pools: how much of which.
        priority: how much each run counts where instances wait for one another: with 2 it has half as many as with 1.
    """

    pools: Mapping[Pool, int] = attrs.field(default=MappingProxyType({}))
    priority: int = 1

    @classmethod
    def of_message(cls, limiter: Any, device: int) -> Needs:
        """From the configuration's `ModelRateLimiter`, for an instance on a device."""
        pools: dict[Pool, int] = {}
        for resource in limiter.resources:
            if resource.count:
                pool = (resource.name, None if getattr(resource, "global") else device)
                pools[pool] = pools.get(pool, 0) + resource.count
        return cls(pools, max(limiter.priority, 1))
