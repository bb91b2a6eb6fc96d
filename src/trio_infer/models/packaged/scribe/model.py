"""`scribe`: a language model small enough to be packaged, for trying out what leaving does to a token loop.

It has read one book, the Bible in the English of 1611, and goes on writing in its manner; it knows nothing else. See
`bench/language_model/train.py` for how its weights were made.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import trio

from trio_infer.errors import InferError
from trio_infer.models.packaged.scribe.tokens import Vocabulary
from trio_infer.models.packaged.scribe.transformer import Transformer
from trio_infer.models.token_model import Active, Generation, Prompt, TokenModel
from trio_infer.protocol.values import Array, InferRequest, TensorSpec

__all__ = ["Scribe"]

WEIGHTS: Final = Path(__file__).with_name("weights.npz")
NEWLINE: Final = 10


@attrs.define
class _State:
    """Of one request: how it samples, and the bytes that are no whole character yet."""

    temperature: float
    random: np.random.Generator
    decoder: codecs.IncrementalDecoder = attrs.field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Scribe(TokenModel):
    """Goes on with a text, to the end of its line.

    `temperature` 0 takes the most likely token each time; above that the next token is drawn, with random numbers that
    depend on `seed` alone. So one request has one answer, whoever else is there.
    """

    name = "scribe"
    max_slots: int = 8
    end_token: int | None = NEWLINE
    inputs: Sequence[TensorSpec] = (
        TensorSpec("text_input", "BYTES", [1]),
        TensorSpec("max_tokens", "INT32", [1], optional=True),
        TensorSpec("temperature", "FP32", [1], optional=True),
        TensorSpec("seed", "INT64", [1], optional=True),
    )
    outputs: Sequence[TensorSpec] = (TensorSpec("text_output", "BYTES", [1]),)

    async def load(self) -> None:
        """Read the weights: 2.5 MB, some 50 ms."""
        await trio.to_thread.run_sync(self._load)

    def _load(self) -> None:
        with np.load(WEIGHTS, allow_pickle=False) as file:
            arrays: Mapping[str, Array] = dict(file)
        weights = {name: array for name, array in arrays.items() if name not in {"merges", "heads"}}
        self._vocabulary = Vocabulary([(int(first), int(second)) for first, second in arrays["merges"]])
        self._transformer = Transformer(weights, int(arrays["heads"]), self.max_slots)

    def start(self, request: InferRequest) -> Prompt:
        text = request.inputs["text_input"].ravel()[0]
        tokens = self._vocabulary.encode(text)
        room = self._transformer.context - len(tokens)
        if not tokens or room < 1:
            size = f"{len(tokens)} tokens" if tokens else "no text"
            raise InferError(f"`text_input` must have from 1 to {self._transformer.context - 1} tokens, got {size}")
        wanted = int(_given(request, "max_tokens", room))
        temperature = float(_given(request, "temperature", 0.0))
        if wanted < 1:
            raise InferError(f"`max_tokens` must be 1 or more, got {wanted}")
        if not 0 <= temperature <= 100:
            raise InferError(f"`temperature` must be from 0 to 100, got {temperature:g}")
        random = np.random.default_rng(abs(int(_given(request, "seed", 0))))
        return Prompt(tokens, min(wanted, room), _State(temperature, random))

    def prefill(self, generations: Sequence[Generation]) -> Array:
        return np.array(
            [
                _sample(self._transformer.prefill(generation.slot, generation.prompt), generation.state)
                for generation in generations
            ]
        )

    def step(self, active: Active) -> Array:
        tokens, positions = np.zeros((2, self.max_slots), np.int64)
        tokens[active.slots], positions[active.slots] = active.tokens, active.positions
        logits = self._transformer.step(tokens, positions)
        return np.array([_sample(logits[each.slot], each.state) for each in active.generations])

    def output(self, generation: Generation, token: int) -> Any:
        return _text(generation.state.decoder.decode(self._vocabulary.pieces[token]))

    def finish(self, generation: Generation) -> Any:
        return _text(generation.state.decoder.decode(b"", final=True))


def _given(request: InferRequest, name: str, default: float) -> float:
    array = request.inputs.get(name)
    return default if array is None else array.ravel()[0]


def _sample(logits: Array, state: _State) -> int:
    if state.temperature == 0:
        return int(logits.argmax())
    powers = np.exp((logits - logits.max()).astype(np.float64) / state.temperature)
    return int(np.searchsorted(np.cumsum(powers), state.random.random() * powers.sum(), side="right"))


def _text(text: str) -> dict[str, Array] | None:
    return {"text_output": np.array([text.encode()], object)} if text else None
