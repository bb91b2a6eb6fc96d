"""Text to tokens and back: byte pairs, merged in the order in which training found them most often.

A token is a few bytes that belong together. Numbers below 256 are the bytes themselves, so that any text has tokens;
each further number stands for two others, joined. A word is taken with the blank in front of it, and nothing is merged
across words, so each word is worked out once and remembered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

__all__ = ["Vocabulary", "words"]

_WORD: Final = re.compile(rb" ?[A-Za-z]+| ?[^\sA-Za-z]+|\s")


def words(text: bytes) -> Iterator[bytes]:
    """What text is cut into before anything is merged; joined, it is the text again."""
    return (match.group() for match in _WORD.finditer(text))


class Vocabulary:
    """Which tokens there are.

    Args:
        merges: pairs of tokens, the first of which became token 256.

    Attributes:
        pieces: each token's bytes.
    """

    def __init__(self, merges: Sequence[tuple[int, int]]) -> None:
        self._ranks = {(first, second): rank for rank, (first, second) in enumerate(merges)}
        self.pieces: list[bytes] = [bytes([number]) for number in range(256)]
        for first, second in merges:
            self.pieces.append(self.pieces[first] + self.pieces[second])
        self._encode_word = lru_cache(4096)(self._merge)

    def encode(self, text: bytes) -> list[int]:
        """Tokens of a text; costs about a microsecond a byte for words that haven't been seen before."""
        return [token for word in words(text) for token in self._encode_word(word)]

    def _merge(self, word: bytes) -> tuple[int, ...]:
        tokens = list(word)
        while len(tokens) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(tokens)]
            best = min(ranks)
            if best == len(self._ranks):
                break
            at = ranks.index(best)
            tokens[at : at + 2] = [256 + best]
        return tuple(tokens)
