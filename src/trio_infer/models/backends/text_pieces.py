"""From tokens, one after the other, to text that can be sent: whole characters, and nothing of a stop string.

A token isn't a piece of text. It may be one byte of a character that has four, and what it reads as depends on what
came before it (tokenizers of the SentencePiece kind drop the space before the first word). So a token is decoded
together with those before it, and its text is what that adds to theirs alone; text that ends with U+FFFD, the sign for
bytes that are no character, waits for more tokens. Only the tokens since the last text that went out are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["TextPieces"]

CONTEXT: Final = 8
"""Tokens of the prompt that the first ones of the answer are decoded after."""

NO_CHARACTER: Final = "\ufffd"


class TextPieces:
    """The text of one answer.

    Args:
        decode: from tokens to text.
        prompt: its tokens.
        stops: strings that end the answer, and are not part of it.

    Attributes:
        stopped: whether one of `stops` has come.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._told = list(prompt[-CONTEXT:])  # whose text went out last
        self._told_text = decode(self._told)
        self._new: list[int] = []
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped: bool = False

    def add(self, token: int) -> str:
        """The text that may go out with one more token; "" if there is none yet."""
        self._new.append(token)
        text = self._decode([*self._told, *self._new])
        if len(text) <= len(self._told_text) or text.endswith(NO_CHARACTER):
            return ""
        added = text[len(self._told_text) :]
        self._told, self._new = self._new, []
        self._told_text = self._decode(self._told)
        return self._checked(added)

    def rest(self) -> str:
        """What was held back, when there are no more tokens."""
        if self._new:
            text = self._decode([*self._told, *self._new])[len(self._told_text) :]
            self._new = []
            text = self._checked(text)
        else:
            text = ""
        held, self._held = self._held, ""
        return text + held

    def _checked(self, added: str) -> str:
        if self.stopped:
            return ""
        text = self._held + added
        # Of several the one that ends first counts, so that it doesn't matter how tokens cut the text.
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
