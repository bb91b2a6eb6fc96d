"""The contract between whoever schedules a request and whatever runs it.

A `Runner` is one loaded version of one model. It promises how it stops (`stops`), and it is honest about it: an
`Instance` is taken from `begin` to `end` of the work itself, not of the task that waits for the work. A task can
leave a thread that ignores its cancellation; the instance can't be given to the next request until that thread is
done.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from trio_infer.lifecycle import Life, Timing
from trio_infer.models.host import Host
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, InferResponse, Send, Signature

__all__ = ["PROMISES", "Attend", "Batches", "Collects", "Instance", "Runner", "Stops"]

Stops: TypeAlias = Literal["checkpoint", "callback", "token", "operator", "process", "never"]
"""Where a cancelled run ends; see `PROMISES`."""

PROMISES: Final[dict[Stops, str]] = {
    "checkpoint": "at trio's next checkpoint",
    "callback": "when the model next asks whether it is cancelled",
    "token": "with the token that is being computed",
    "operator": "with the operator, or the block of a network, that is being computed",
    "process": "when the model next asks, or when its process is killed after cancel_grace_ms",
    "never": "at its own end only",
}
"""What each word promises, from the soonest to the latest."""

Attend: TypeAlias = Callable[[Send], Awaitable[None]]
"""Takes part in a batch for one of its requests, in that request's task; else as `Runner.run`."""


@attrs.define(eq=False)
class Instance:
    """One request's place among those that may run at once; made anew for each. Those of a batch have one index.

    Args:
        index: from 0; a runner that keeps a state for each instance finds it by this. All are 0 if their number is
            unlimited.
        life: of the request that runs, for what its model asks of others.
        on_end: called once, in the trio thread, when the work has really ended; the scheduler's.

    Attributes:
        working: whether work is going on in it. Only the trio thread may read or change this.
        timing: of the work; a runner that can tell the model's own code from the rest sets `infer_began` and
            `infer_ended`.
    """

    index: int
    life: Life | None = None
    on_end: Callable[[], None] | None = None
    working: bool = attrs.field(init=False, default=False)
    timing: Timing = attrs.field(init=False, factory=Timing)

    def begin(self) -> None:
        """The runner says that work starts; call it in the trio thread."""
        self.working = True
        self.timing.begun = time.perf_counter_ns()
        if self.life is not None:
            self.life.timing = self.timing

    def end(self) -> None:
        """The runner says that the work has really ended; call it in the trio thread, once.

        From then on another run may be given the same index, also if this one still has responses to give.
        """
        self.working = False
        self.timing.ended = time.perf_counter_ns()
        if self.life is not None:
            self.life.work_over()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()


class Runner(Protocol):
    """One loaded version of one model.

    Attributes:
        signature: what requests are checked against.
        config: what `/config` answers.
        instances: how many requests may run at once; None for any number.
        stops: where a cancelled run ends.
        on_disconnect: what happens when the client leaves; None leaves it to the server.
    """

    @property
    def signature(self) -> Signature: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def instances(self) -> int | None: ...
    @property
    def stops(self) -> Stops: ...
    @property
    def on_disconnect(self) -> Literal["cancel", "finish"] | None: ...

    async def load(self, host: Host) -> None:
        """Make ready to run.

        Args:
            host: what the model may ask of the server.

        Raises:
            ModelLoadError: with the model's own words for why not.

        Cancellation: leaves at once; what was begun is undone by `unload`.
        """

    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        """Run one request; `await send(response)` for each of its responses, in order.

        Args:
            instance: granted to this run; `instance.begin()` and `instance.end()` bracket the work itself.

        Raises:
            InferError: the model says so, with its code.
            Exception: the model failed; the client gets a 500 with its message, the log its traceback.

        Cancellation: leaves at the next checkpoint; the work itself stops as `stops` says, and `instance` tells when.
        """

    async def unload(self) -> None:
        """Let the model clean up; called once, after the last run has left.

        Cancellation: leaves at once, and the clean-up may go on in its thread.
        """

    async def ready(self) -> bool:
        """Whether it can run a request now: something of it lives, and its model says so, if it has a say.

        Cancellation: just stops waiting.
        """

    def kill(self) -> bool:
        """Stop what still runs; its requests fail, and `unload` follows.

        Returns:
            whether that is possible: a process is, a thread isn't.
        """


@runtime_checkable
class Batches(Protocol):
    """A runner that can run several requests at once.

    Attributes:
        joins: whether it is to be asked to, where the configuration says how.
    """

    @property
    def joins(self) -> bool: ...

    def begin_batch(self, batch: Sequence[tuple[Instance, InferRequest]]) -> Sequence[Attend]:
        """Begin to run several requests together; doesn't block, and doesn't raise.

        Args:
            batch: two or more requests whose shapes fit, each with its instance, all of the same index. Each instance
                is begun and ended by itself.

        Returns:
            for each request what its task awaits, once. Its cancellation leaves the batch: the others go on, and the
            last one to leave stops it, as `stops` says.
        """


@runtime_checkable
class Collects(Protocol):
    """A runner of a model with any number of responses that can make one of them all.

    Attributes:
        collects: whether it can for this model.
    """

    @property
    def collects(self) -> bool: ...

    def collect(self, responses: Sequence[InferResponse]) -> InferResponse:
        """All responses to a request, in their order, as one.

        Raises:
            InferError: INTERNAL: the model makes of them what it must not.
        """
