"""Runs a `TokenModel`: the loop of steps, and who is in it.

How it works. The runner's *instances* are the model's slots. So who waits for a slot is the business of the same queue
as with any other model, and a slot that becomes free is granted in that instant. A request's task joins the loop, takes
its responses one by one, and leaves; the loop is a task of its own, there only while somebody has a slot:

    once around     whose prompt isn't through yet ── a thread: start, prefill ── first tokens are given out
                    whose is, and who has room     ── a thread: step           ── tokens are given out

What a departure does depends on where the request is, and takes effect there:

| the client leaves | then |
|---|---|
| while it waits for a slot | it never joins |
| before its prompt is in, or between two chunks of it | it isn't prefilled any further |
| between two steps | it isn't in the next one |
| during a call that it is part of | its token goes nowhere, and its slot is free when the call is over |

A slot is free when no call uses it any more, so it is never given to two. After each call that freed slots the loop
lets the tasks run that were granted them: they are in the next step already.

A client that doesn't read fast enough holds up nobody else: with `ROOM` responses waiting for it, its request stays out
of the steps, in its slot, until it has taken one.

What it rests on (trio 0.35, 2 cores): a trip to a thread and back costs 60 to 100 microseconds; a tick of the loop 10.
Steps of the packaged language model take some milliseconds.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import trio

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.models.native import NativeRunner
from trio_infer.models.runner import Instance, Stops
from trio_infer.models.token_model import Active, Generation, TokenModel
from trio_infer.protocol.values import Array, InferRequest, InferResponse, Send

__all__ = ["TokenRunner", "TokenStatistics"]

ROOM: Final = 16
"""Responses that wait for a slow client before its request pauses."""

log: logging.Logger = logging.getLogger("trio_infer.models")


@attrs.define
class TokenStatistics:
    """What the loop has done so far.

    Attributes:
        steps: calls of `step`.
        slot_steps: how many requests took part in them, added up: divided by `steps`, the mean batch.
        prefills, prefill_tokens: calls of `prefill`, and tokens of prompts that went through.
        departed_steps: of `slot_steps`, those whose client left during the step.
        tokens: how many were given to clients.
    """

    steps: int = 0
    slot_steps: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    departed_steps: int = 0
    tokens: int = 0


@attrs.define(eq=False)
class _Seat:
    """One request in the loop, as the trio thread knows it.

    Attributes:
        in_call: whether a call is using its slot now.
        left: nobody wants its tokens any more.
        done: it has had its last one, or has failed.
    """

    generation: Generation
    instance: Instance
    waiting: deque[InferResponse] = attrs.field(factory=deque)
    news: trio.Event = attrs.field(factory=trio.Event)
    in_call: bool = False
    left: bool = False
    done: bool = False
    error: Exception | None = None

    @property
    def prefilled(self) -> bool:
        return self.generation.prefilled > 0 and self.generation.prefilled >= len(self.generation.prompt)


@attrs.define
class _Said:
    """What a call gave for one request."""

    responses: list[InferResponse] = attrs.field(factory=list)
    done: bool = False
    error: Exception | None = None


class TokenRunner(NativeRunner):
    """Runs a `TokenModel`; see `NativeRunner` for the arguments.

    Raises:
        ModelLoadError: `max_slots` or `prefill_budget` is less than 1; and as `NativeRunner`.
    """

    model: TokenModel
    stops: Stops = "token"
    collects: bool = True

    def __init__(self, model: TokenModel, **options: Any) -> None:
        name = getattr(model, "name", "") or type(model).__name__
        for attribute in ("max_slots", "prefill_budget"):
            value = getattr(model, attribute)
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(str(name), f"`{attribute}` must be a whole number of 1 or more, got {value!r}")
        if not model.outputs:
            raise ModelLoadError(str(name), "it has no `outputs`, so its tokens can't be given to anybody")
        object.__setattr__(model, "instances", model.max_slots)  # also of a frozen attrs class
        super().__init__(model, **options)
        self._seats: list[_Seat] = []
        self._statistics = TokenStatistics()
        self._news = trio.Event()
        self._running = False
        self._over = trio.Event()  # of the loop that runs
        self._limiter = trio.CapacityLimiter(math.inf)  # its thread waits for nobody else's

    def check_infer(self) -> bool:
        """Its `infer` is this runner's own; it gives any number of responses."""
        return True

    def statistics(self) -> TokenStatistics:
        """What the loop has done so far."""
        return attrs.evolve(self._statistics)

    def collect(self, responses: Sequence[InferResponse]) -> InferResponse:
        """All responses to one request as one.

        Raises:
            InferError: INTERNAL: the model's `join` gives something else.
        """
        return self.response_of(self.model.join(responses))

    # ---- a request's task

    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        """Join the loop, and take one response after the other.

        Raises:
            InferError: the model refused the request.
            Exception: the model failed.

        Cancellation: leaves at once; the slot is free when no call uses it any more, at the end of this step at the
        latest.
        """
        instance.begin()
        seat = _Seat(Generation(self.to_model(request), instance.index), instance)
        self._seats.append(seat)
        self._wake()
        try:
            while True:
                if seat.waiting:
                    was_full = len(seat.waiting) >= ROOM
                    response = seat.waiting.popleft()
                    if was_full:
                        self._news.set()
                    await send(response)
                elif seat.error is not None:
                    raise seat.error
                elif seat.done:
                    return
                else:
                    seat.news = trio.Event()
                    await seat.news.wait()
        finally:
            seat.left = True
            if not seat.in_call:
                self._release(seat)

    def _release(self, seat: _Seat) -> None:
        """Its slot is free; once."""
        if seat in self._seats:
            self._seats.remove(seat)
            seat.instance.timing.infer_ended = time.perf_counter_ns()
            seat.instance.end()
            self._news.set()

    def _wake(self) -> None:
        self._news.set()
        if not self._running:
            self._running = True
            self._over = trio.Event()
            trio.lowlevel.spawn_system_task(self._loop, name=f"<token loop of {self.signature.name}>")

    # ---- the loop's task

    async def _loop(self) -> None:
        try:
            while self._seats:
                self._news = trio.Event()
                joining, active = self._joining(), self._active()
                if joining:
                    await self._call(self._prefill, joining)
                    active = self._active()
                if active:
                    await self._call(self._step, active)
                if not joining and not active:
                    await self._news.wait()
        except Exception as error:
            log.exception("the token loop of model '%s' ends by a bug in the server", self.signature.name)
            for seat in list(self._seats):
                self._apply(seat, _Said(done=True, error=InferError(str(error), ErrorCode.INTERNAL)))
        finally:
            self._running = False
            self._over.set()

    async def unload(self) -> None:
        """Wait until the step in progress is over, then let the model clean up.

        Cancellation: leaves at once; the model isn't cleaned up then, if it still computes.
        """
        if self._running:
            await self._over.wait()
        await super().unload()

    def _joining(self) -> list[_Seat]:
        """Whose prompt isn't through yet."""
        return [seat for seat in self._seats if not seat.prefilled and not seat.done]

    def _active(self) -> list[_Seat]:
        """Who takes part in the next step."""
        there = [seat for seat in self._seats if seat.prefilled and not seat.done and len(seat.waiting) < ROOM]
        return sorted(there, key=lambda seat: seat.generation.slot)

    async def _call(self, call: Callable[[Sequence[Generation]], Sequence[_Said]], seats: Sequence[_Seat]) -> None:
        """Have the thread do it, and give out what comes of it."""
        now = time.perf_counter_ns()
        for seat in seats:
            seat.in_call = True
            seat.instance.timing.infer_began = seat.instance.timing.infer_began or now
        generations = [seat.generation for seat in seats]
        if self.model.threaded:
            said = await trio.to_thread.run_sync(call, generations, abandon_on_cancel=True, limiter=self._limiter)
        else:
            said = call(generations)
        if call == self._step:
            self._statistics.departed_steps += sum(seat.left for seat in seats)
        freed = False
        for seat, what in zip(seats, said, strict=True):
            seat.in_call = False
            self._apply(seat, what)
            freed = freed or seat not in self._seats
        if freed or not self.model.threaded:  # whoever was granted a slot joins, before the next call is made up
            for _ in range(2):
                await trio.lowlevel.checkpoint()

    def _apply(self, seat: _Seat, said: _Said) -> None:
        if not seat.left:
            seat.waiting += said.responses
            self._statistics.tokens += len(said.responses)
            seat.error = said.error
        seat.done = said.done or said.error is not None
        seat.news.set()
        if seat.left or seat.done:
            self._release(seat)

    # ---- the model's thread

    def _prefill(self, generations: Sequence[Generation]) -> Sequence[_Said]:
        said = {generation: _Said() for generation in generations}
        begun = []
        for generation in generations:
            try:
                self._start(generation)
                begun.append(generation)
            except Exception as error:
                said[generation].error = error
        parts = portions(
            [len(generation.prompt) - generation.prefilled for generation in begun],
            self.model.prefill_budget,
            chunked=self.model.chunked,
        )
        now = []
        for generation, part in zip(begun, parts, strict=False):
            generation.upto = generation.prefilled + part
            now.append(generation)
        for generation, token in self._prefilled(now, said):
            self._statistics.prefill_tokens += generation.upto - generation.prefilled
            generation.prefilled = generation.upto
            if generation.prefilled >= len(generation.prompt):
                self._made(generation, token, said[generation])
        return list(said.values())

    def _start(self, generation: Generation) -> None:
        if generation.prompt.size:
            return
        prompt = _ask(self.model.start, generation.request)
        tokens = np.asarray(prompt.tokens, np.int64)
        if tokens.ndim != 1:
            raise InferError(f"`start` must give tokens in one dimension, got shape {list(tokens.shape)}")
        generation.prompt = tokens
        generation.max_tokens, generation.state = prompt.max_tokens, prompt.state
        if not generation.prompt.size or prompt.max_tokens < 1:
            got = f"{generation.prompt.size} and {prompt.max_tokens}"
            raise InferError(f"`start` must give at least one token and a `max_tokens` of at least 1, got {got}")

    def _prefilled(
        self, generations: Sequence[Generation], said: Mapping[Generation, _Said]
    ) -> Sequence[tuple[Generation, int]]:
        if not generations:
            return []
        self._statistics.prefills += 1
        try:
            tokens = _checked(_ask(self.model.prefill, generations), len(generations), "prefill")
            return list(zip(generations, tokens, strict=True))
        except Exception as error:
            if len(generations) > 1:
                return [pair for generation in generations for pair in self._prefilled([generation], said)]
            said[generations[0]].error = error
            return []

    def _step(self, generations: Sequence[Generation]) -> Sequence[_Said]:
        self._statistics.steps += 1
        self._statistics.slot_steps += len(generations)
        active = Active(
            np.array([generation.slot for generation in generations]),
            np.array([generation.tokens[-1] for generation in generations]),
            np.array([len(generation.prompt) + len(generation.tokens) - 1 for generation in generations]),
            generations,
        )
        try:
            tokens = _checked(_ask(self.model.step, active), len(generations), "step")
        except Exception as error:
            first = _Said(error=error)  # the log has its traceback once
            rest = [InferError(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL) for _ in generations[1:]]
            return [first, *(_Said(error=each) for each in rest)]
        said = [_Said() for _ in generations]
        for generation, token, what in zip(generations, tokens, said, strict=True):
            self._made(generation, token, what)
        return said

    def _made(self, generation: Generation, token: int, said: _Said) -> None:
        """A token was made: what is said of it, and whether it was the last."""
        try:
            ended = token == self.model.end_token
            if not ended:
                generation.tokens.append(token)
                self._say(_ask(self.model.output, generation, token), said)
            if ended or len(generation.tokens) >= generation.max_tokens:
                self._say(_ask(self.model.finish, generation), said)
                said.done = True
        except Exception as error:
            said.error = error

    def _say(self, output: Any, said: _Said) -> None:
        if output is not None:
            said.responses.append(self.response_of(output))


def portions(lengths: Sequence[int], budget: int, *, chunked: bool) -> list[int]:
    """How much of each prompt goes through the model in one call, in turn; at least something of the first.

    Args:
        lengths: what is left of each prompt, in tokens.
        budget: tokens in all.
        chunked: whether a prompt may be given in parts.

    Returns:
        tokens of the first ones; fewer than `lengths` if the budget doesn't reach further.
    """
    parts: list[int] = []
    for length in lengths:
        part = min(length, budget) if chunked else length
        if part <= 0 or (parts and part > budget):
            break
        parts.append(part)
        budget -= part
    return parts


def _ask(method: Callable[..., Any], *args: Any) -> Any:
    """Call the model's code. What `except Exception` lets pass, such as `sys.exit`, would stop trio in the loop's task.

    Raises:
        Exception: the model's; an InferError in place of what is none.
    """
    try:
        return method(*args)
    except Exception:
        raise
    except BaseException as error:
        text = f"`{method.__name__}` raised {type(error).__name__}: {error}"
        raise InferError(text, ErrorCode.INTERNAL) from error


def _checked(tokens: Array, count: int, method: str) -> list[int]:
    array = np.asarray(tokens)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        what = f"{array.dtype} of shape {list(array.shape)}"
        raise InferError(f"`{method}` must give {count} integers, one a request; got {what}", ErrorCode.INTERNAL)
    numbers: list[int] = array.tolist()
    return numbers
