"""Models that make one token after the other, for many requests at once: iteration-level (continuous) batching.

A batch that is made when requests come and broken up when all of it is done has two faults where answers are long: who
comes a moment late waits for the longest of the others, and who leaves early keeps a place in it to its end. So here a
batch is made anew for each token. There are `max_slots` places, the *slots*; a request that gets one is *prefilled*
(its prompt goes through the model), then each *step* gives one token to each request that has a slot. Between two steps
requests join and leave:

    slot 0   A A A A A A A A ┆ D D D D D        A is done, and D has been waiting
    slot 1   B B B ✗ ┆ C C C C C C C C C        B's client leaves: C takes over at the next step
    steps    1 2 3 4   5 6 7 ...

The author writes plain numpy code in two methods, `prefill` and `step`, whose arrays have a slot dimension. They run in
a thread, never two calls at the same time, so that the server goes on listening; what the model keeps for a slot (a KV
cache) is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from trio_infer.models.native import Model, ModelOutput
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.values import Array, InferRequest, InferResponse

__all__ = ["Active", "Generation", "Prompt", "TokenModel"]


@attrs.frozen(eq=False)
class Prompt:
    """What a request asks a token model for.

    Args:
        tokens: of the prompt; at least one.
        max_tokens: how many are made at most; at least one.
        state: anything the model keeps for this request, such as its random numbers.
    """

    tokens: Sequence[int]
    max_tokens: int
    state: Any = None


@attrs.define(eq=False)
class Generation:
    """One request in its slot.

    Attributes:
        request: as the client sent it.
        slot: from 0; nobody else has it until this request is done or has left.
        prompt: its tokens, an int array.
        max_tokens, state: see `Prompt`.
        prefilled: how many tokens of the prompt have been through the model.
        upto: in `prefill`: how many are to have been when the call is over.
        tokens: what has been made so far.
    """

    request: InferRequest
    slot: int
    prompt: Array = attrs.field(factory=lambda: np.empty(0, np.int64))
    max_tokens: int = 0
    state: Any = None
    prefilled: int = 0
    upto: int = 0
    tokens: list[int] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class Active:
    """Who takes part in a step, in the order of their slots; n of them.

    Attributes:
        slots: int array [n].
        tokens: int array [n]: the last token of each, which goes into the model now.
        positions: int array [n]: how many tokens came before it, the prompt's included.
        generations: all else that is known of each.
    """

    slots: Array
    tokens: Array
    positions: Array
    generations: Sequence[Generation]


class TokenModel(Model):
    """Base class of models that make tokens: say what it takes and gives, write `start`, `prefill` and `step`.

    It gives any number of responses, one for each token: `generate_stream` sends them as they are made, `generate` and
    `infer` send what `join` makes of all.

    Attributes:
        max_slots: how many requests are in the loop at once; others wait in the queue.
        prefill_budget: tokens of prompts that go through the model between two steps, so that a long prompt doesn't
            hold up those who are being answered. At least one prompt always does.
        chunked: whether `prefill` may be given a part of a prompt at a time (`Generation.prefilled` to `.upto`).
        end_token: ends an answer, and is not part of it; None if there is none.
        threaded: whether the model's code runs in a thread; False for code that takes less time than the trip there,
            some 100 microseconds.
    """

    max_slots: int = 8
    prefill_budget: int = 512
    chunked: bool = False
    end_token: int | None = None
    threaded: bool = True

    def start(self, request: InferRequest) -> Prompt:
        """Say what a request asks for. Called in the thread, when it has got a slot.

        Raises:
            InferError: to refuse it, in words.
        """
        raise NotImplementedError  # each subclass writes it

    def prefill(self, generations: Sequence[Generation]) -> Array:
        """Take in prompts, into their slots.

        Args:
            generations: of each, `prompt[prefilled:upto]` is to go through the model. A slot that starts at 0 is new:
                what was there before is nobody's.

        Returns:
            int array, of each the first token of its answer; ignored for those whose prompt isn't through yet.

        Raises:
            Exception: if there are several, each is then prefilled alone, so that only who is at fault fails.
        """
        raise NotImplementedError  # each subclass writes it

    def step(self, active: Active) -> Array:
        """Make the next token of each.

        Returns:
            int array [n].

        Raises:
            Exception: all of them fail; the model goes on with others.
        """
        raise NotImplementedError  # each subclass writes it

    def output(self, generation: Generation, token: int) -> ModelOutput | None:
        """The response for a token; None for none. Called after `token` was appended to `generation.tokens`.

        The default gives the token's number in the first output.
        """
        spec = self.outputs[0]
        return {spec.name: np.full([1] * max(len(spec.shape), 1), token, spec.datatype.dtype)}

    def finish(self, generation: Generation) -> ModelOutput | None:
        """A last response, when all tokens were made; None, the default, for none."""
        return None

    def join(self, responses: Sequence[InferResponse]) -> ModelOutput:
        """All responses to a request as one, for clients that don't stream.

        The default joins the bytes of BYTES outputs and the elements of others, along the first dimension.
        """
        joined: dict[str, Array] = {}
        for spec in self.outputs:
            parts = [response.outputs[spec.name] for response in responses if spec.name in response.outputs]
            if spec.datatype is Datatype.BYTES:
                joined[spec.name] = np.array([b"".join(element for part in parts for element in part.ravel())], object)
            else:
                empty = np.empty([0] * max(len(spec.shape), 1), spec.datatype.dtype)
                joined[spec.name] = np.concatenate(parts) if parts else empty
        return joined
