"""`summarize`: picks the sentences that say most of a text, and streams them. A real model, if a small one.

How it works. Each sentence is a bag of words, weighted by how rare a word is in this text (idf). Two sentences are as
similar as the angle between their vectors is small. A random walker who goes from sentence to similar sentence ends up
most often at the central ones (TextRank, Mihalcea & Tarau 2004: PageRank on that graph, damping 0.85). Of these the
best are chosen one after the other, each by its rank times its unlikeness to those chosen before (after maximal
marginal relevance, Carbonell & Goldstein 1998), since two central sentences often say the same thing. They are given in
the order of the text.

What it costs. Each word adds its share to the similarity of each two sentences that have it; a word that one sentence
has, or every one, adds nothing and is left out. There is a checkpoint after each sentence, each word and each step of
the walk, so no part holds up the event loop for long and the client's leaving is noticed between any two. The bounds on
the text keep the whole well under a second, so it needs no thread.

What it doesn't do: it writes no sentence of its own, knows no language but for the shape of its sentences, and a text
with a topic of its own in each sentence has no centre to find.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import numpy as np
import trio

from trio_infer.errors import InferError
from trio_infer.models.native import Model
from trio_infer.protocol.values import Array, InferRequest, TensorSpec

__all__ = ["Summarize", "split_sentences"]

MOST_BYTES: Final = 64 * 1024
MOST_SENTENCES: Final = 500
MOST_CHOSEN: Final = 20
DEFAULT_CHOSEN: Final = 3

DAMPING: Final = 0.85
"""The walker follows a similarity so often, and else jumps anywhere (Brin & Page 1998)."""
TOLERANCE: Final = 1e-6
MOST_ITERATIONS: Final = 100
"""With this damping the error is below 1e-7 after 100 steps whatever the graph."""

_END = re.compile(r"(?<=[.!?…])[\"'”’»)\]]*\s+|(?<=[。！？])\s*|\n\s*\n")
_ABBREVIATION = re.compile(r"(?:\b(?:[A-Za-z]|Dr|Mr|Mrs|Ms|Prof|St|vs|cf|approx|Fig|No|vol|pp)|\b(?:e\.g|i\.e))\.$")
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")


class Summarize(Model):
    """The most telling sentences of `text_input`, in the text's order; `max_sentences` (a parameter) of them, or 3."""

    name = "summarize"
    inputs: Sequence[TensorSpec] = (TensorSpec("text_input", "BYTES", (1,)),)
    outputs: Sequence[TensorSpec] = (TensorSpec("text_output", "BYTES", (1,)),)

    async def infer(self, request: InferRequest) -> AsyncGenerator[dict[str, Array], None]:
        """One response a sentence.

        Raises:
            InferError: the text is empty, too long or not UTF-8, or `max_sentences` is out of bounds.

        Cancellation: between any two of some milliseconds' work.
        """
        most = _max_sentences(request)
        sentences = split_sentences(_text(request))
        if not sentences:
            raise InferError("'text_input' is empty: there is nothing to summarise")
        if len(sentences) > MOST_SENTENCES:
            raise InferError(f"'text_input' must have at most {MOST_SENTENCES} sentences, got {len(sentences)}")
        await trio.lowlevel.checkpoint()
        similarity = await _similarities(sentences)
        ranks = await _ranks(similarity)
        for index in sorted(_choose(ranks, similarity, most)):
            yield {"text_output": np.array([sentences[index].encode()], object)}


def _max_sentences(request: InferRequest) -> int:
    value = request.parameters.get("max_sentences", DEFAULT_CHOSEN)
    if type(value) is not int or not 1 <= value <= MOST_CHOSEN:
        raise InferError(f"'max_sentences' must be a whole number from 1 to {MOST_CHOSEN}, got {value!r}")
    return value


def _text(request: InferRequest) -> str:
    data: bytes = request.inputs["text_input"][0]
    if len(data) > MOST_BYTES:
        raise InferError(f"'text_input' must have at most {MOST_BYTES} bytes, got {len(data)}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InferError(f"'text_input' must be UTF-8: {error.reason} at byte {error.start}") from error


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line.

    Args:
        text: sentences end at . ! ? … and their CJK likes, and at an empty line; not at initials and a few common
            abbreviations.
    """
    sentences: list[str] = []
    held = ""
    begin = 0
    for end in [*(match.end() for match in _END.finditer(text)), len(text)]:
        piece = " ".join(text[begin:end].split())
        begin = end
        held = f"{held} {piece}" if held and piece else held or piece
        if held and not _ABBREVIATION.search(held[-12:]):
            sentences.append(held)
            held = ""
    if held:
        sentences.append(held)
    return [sentence for sentence in sentences if _WORD.search(sentence)]


def _words(sentence: str) -> Counter[str]:
    return Counter(map(_fold, _WORD.findall(sentence.lower())))


def _fold(word: str) -> str:
    """Plural and singular are one word, roughly."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


async def _similarities(sentences: list[str]) -> Array:
    """Cosines between sentences' weighted words: (sentences, sentences), 0 on the diagonal."""
    count = len(sentences)
    bags: list[Counter[str]] = []
    for sentence in sentences:
        bags.append(_words(sentence))
        await trio.lowlevel.checkpoint()
    frequency = Counter(word for bag in bags for word in bag)
    idf = {word: math.log(count / times) for word, times in frequency.items()}
    postings: dict[str, tuple[list[int], list[float]]] = {}
    for row, bag in enumerate(bags):
        norm = math.sqrt(sum((times * idf[word]) ** 2 for word, times in bag.items())) or 1.0
        for word, times in bag.items():
            if 1 < frequency[word] < count:
                rows, values = postings.setdefault(word, ([], []))
                rows.append(row)
                values.append(times * idf[word] / norm)
    similarity = np.zeros((count, count))
    for rows, values in postings.values():
        similarity[np.ix_(rows, rows)] += np.outer(values, values)
        await trio.lowlevel.checkpoint()
    np.fill_diagonal(similarity, 0.0)
    return similarity


async def _ranks(similarity: Array) -> Array:
    """How often the walker is at each sentence, as a share of the most visited one's: (sentences,)."""
    count = len(similarity)
    totals = similarity.sum(axis=1, keepdims=True, dtype=np.float64)
    # From a sentence that is like no other, the walker may go anywhere.
    steps = np.where(totals > 0, similarity / np.where(totals > 0, totals, 1.0), 1.0 / count)
    ranks = np.full(count, 1.0 / count)
    for _ in range(MOST_ITERATIONS):
        before = ranks
        ranks = (1.0 - DAMPING) / count + DAMPING * (before @ steps)
        await trio.lowlevel.checkpoint()
        if np.abs(ranks - before).sum() < TOLERANCE:
            break
    share: Array = ranks / ranks.max()
    return share


def _choose(ranks: Array, similarity: Array, most: int) -> list[int]:
    """Indices of the chosen sentences, best first; of equals the earlier one."""
    chosen: list[int] = []
    left = np.ones(len(ranks), bool)
    likeness = np.zeros(len(ranks))
    while len(chosen) < min(most, len(ranks)):
        score = ranks * (1.0 - likeness)
        best = int(np.argmax(np.where(left, score, -np.inf)))
        chosen.append(best)
        left[best] = False
        likeness = np.maximum(likeness, similarity[best])
    return chosen
