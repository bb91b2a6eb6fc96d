"""A small decoder-only transformer in numpy, with a key-value cache that has a slot for each request.

Each layer is attention over what came before, then a hidden layer of four times the width with squared ReLU; both read
a normalised copy (RMS) of the stream and add to it. There are no biases; the embedding is also the output.

*The same answer alone and together.* Floating-point sums depend on their order, and a matrix product picks an order by
its shape. So the shapes here never depend on who else is there: a step always multiplies all slots, whether anybody is
in them or not, and attention always looks at the whole context, with what is out of sight masked; a prompt is taken in
by itself, `CHUNK` tokens at a time. What a slot gets is then bit for bit the same in any company and in any slot
(a test draws companies at random). Empty slots cost little: with weights of 1.4 million numbers, a step is mostly the
reading of weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from trio_infer.protocol.values import Array

__all__ = ["Transformer"]

CHUNK: Final = 32
EPSILON: Final = 1e-5


class Transformer:
    """Weights and caches.

    Args:
        weights: by the names that training gave them.
        heads: of attention.
        slots: how many requests have a place in the caches.

    Attributes:
        context: tokens that a prompt and its answer may have together.
    """

    def __init__(self, weights: Mapping[str, Array], heads: int, slots: int) -> None:
        self._weights = {name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}
        # `x @ w.T` as training has it; here in the layout that is multiplied fastest.
        self._matrices = {name: np.ascontiguousarray(array.T) for name, array in self._weights.items()}
        self._layers = range(sum(name.endswith(".qkv") for name in weights))
        self._heads = heads
        context, width = self._weights["places"].shape
        self.context: int = context
        shape = (len(self._layers), slots, heads, self.context, width // heads)
        self._keys = np.zeros(shape, np.float32)
        self._values = np.zeros(shape, np.float32)
        self._slots = np.arange(slots)
        self._sight = np.arange(self.context)

    def prefill(self, slot: int, tokens: Array) -> Array:
        """Take in a prompt, into a slot whose past is forgotten.

        Args:
            tokens: int array, at least one.

        Returns:
            float array [vocabulary]: what comes next.
        """
        logits = np.empty(0, np.float32)
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            padded = np.zeros(CHUNK, np.int64)
            padded[: len(part)] = part
            logits = self._take_in(slot, padded, start, len(part))
        return logits

    def step(self, tokens: Array, positions: Array) -> Array:
        """One token further, in all slots.

        Args:
            tokens, positions: int arrays [slots]; of an empty slot any, such as 0.

        Returns:
            float array [slots, vocabulary]: what comes next in each.
        """
        x = self._weights["tokens"][tokens] + self._weights["places"][positions]
        hidden = np.where(self._sight > positions[:, None], -np.inf, 0.0).astype(np.float32)[:, None, None]
        for layer in self._layers:
            q, k, v = self._qkv(layer, x)
            self._keys[layer, self._slots, :, positions] = k
            self._values[layer, self._slots, :, positions] = v
            scores = q[:, :, None] @ self._keys[layer].swapaxes(2, 3) + hidden
            seen = (_softmax(scores) @ self._values[layer])[:, :, 0]
            x = self._after(layer, x, seen)
        return self._logits(x)

    def _take_in(self, slot: int, tokens: Array, start: int, count: int) -> Array:
        positions = np.minimum(start + np.arange(CHUNK), self.context - 1)
        x = self._weights["tokens"][tokens] + self._weights["places"][positions]
        hidden = np.where(self._sight > positions[:, None], -np.inf, 0.0).astype(np.float32)
        for layer in self._layers:
            q, k, v = self._qkv(layer, x)
            self._keys[layer, slot, :, start : start + count] = k[:count].swapaxes(0, 1)
            self._values[layer, slot, :, start : start + count] = v[:count].swapaxes(0, 1)
            scores = q.swapaxes(0, 1) @ self._keys[layer, slot].swapaxes(1, 2) + hidden
            seen = (_softmax(scores) @ self._values[layer, slot]).swapaxes(0, 1)
            x = self._after(layer, x, seen)
        logits: Array = self._logits(x)[count - 1]
        return logits

    def _qkv(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values, each [rows, heads, size]."""
        normed = _norm(x) * self._weights[f"blocks.{layer}.norm1"]
        parts = (normed @ self._matrices[f"blocks.{layer}.qkv"]).reshape(len(x), 3, self._heads, -1)
        q, k, v = parts[:, 0], parts[:, 1], parts[:, 2]
        return q / math.sqrt(q.shape[-1]), k, v

    def _after(self, layer: int, x: Array, seen: Array) -> Array:
        """The rest of a layer, after attention."""
        x = x + seen.reshape(len(x), -1) @ self._matrices[f"blocks.{layer}.out"]
        up = (_norm(x) * self._weights[f"blocks.{layer}.norm2"]) @ self._matrices[f"blocks.{layer}.up"]
        result: Array = x + np.square(np.maximum(up, 0)) @ self._matrices[f"blocks.{layer}.down"]
        return result

    def _logits(self, x: Array) -> Array:
        result: Array = (_norm(x) * self._weights["last"]) @ self._matrices["tokens"]
        return result


def _norm(x: Array) -> Array:
    result: Array = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(EPSILON))
    return result


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Array = powers / powers.sum(axis=-1, keepdims=True)
    return result
