"""What a request may ask of a text: its parameters, checked, with what the model's files say where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from trio_infer.errors import InferError
from trio_infer.protocol.fields import found

__all__ = ["TextOptions", "read_options"]

MOST_STOPS: Final = 16
LONGEST_STOP: Final = 1024


@attrs.frozen
class TextOptions:
    """How one answer is made.

    Args:
        max_tokens: how many tokens it has at most; None if nobody says.
        temperature: 0 takes the most likely token each time; above that, tokens are drawn.
        top_k: only that many of the most likely tokens are drawn from; 0 for all.
        top_p: only the most likely ones that together have this probability; 1 for all.
        min_p: only those with at least this part of the likeliest one's probability; 0 for all.
        repetition_penalty: divides the scores of tokens that have come before; 1 for none.
        seed: of the random numbers; None for others each time.
        stop: strings that end the answer.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@attrs.frozen
class _Number:
    """A number that a request may give.

    Args:
        kind: of its type.
        low, high: from where to where it may be.
        words: that say so.
        off: means that it is not to count; may lie outside.
    """

    kind: type[int] | type[float]
    low: float
    high: float
    words: str
    off: float | None = None

    def read(self, name: str, value: Any) -> Any:
        """The value, of the type.

        Raises:
            InferError: it is of another type, or lies outside; so does NaN.
        """
        good = isinstance(value, int if self.kind is int else (int, float)) and not isinstance(value, bool)
        if not (good and (value == self.off or self.low <= value <= self.high)):
            raise InferError(f"`{name}` must be {self.words}, got {found(value)}")
        return self.kind(value)


_NUMBERS: Final = {
    # Of the small numbers that are not allowed, scores overflow, and no token has a probability any more.
    "temperature": _Number(float, 0.01, 100, "0, or a number from 0.01 to 100", off=0),
    "top_k": _Number(int, 0, 2**31 - 1, "a whole number of tokens, 1 or more; 0 or -1 for all", off=-1),
    "top_p": _Number(float, 1e-6, 1, "a number above 0, at most 1"),
    "min_p": _Number(float, 0, 1, "a number from 0 to 1"),
    "repetition_penalty": _Number(float, 0.01, 100, "a number from 0.01 to 100"),
    "seed": _Number(int, 0, 2**63 - 1, "a whole number from 0 to 2^63 - 1"),
}


def read_options(
    parameters: Mapping[str, Any], stop: Sequence[bytes], defaults: TextOptions, context: int | None
) -> TextOptions:
    """What a request asks for.

    Args:
        parameters: the request's. `max_new_tokens`, the library's name, is `max_tokens`; unknown ones are passed over,
            as a server may make parameters of headers.
        stop: strings that end the answer; none for the defaults'.
        defaults: for what isn't given.
        context: how many tokens the model can take; None if there is no limit.

    Raises:
        InferError: one of them can't be; says which, what it must be, and what it is.
    """
    changes = {name: number.read(name, parameters[name]) for name, number in _NUMBERS.items() if name in parameters}
    if "top_k" in changes:
        changes["top_k"] = max(changes["top_k"], 0)
    names = [name for name in ("max_tokens", "max_new_tokens") if name in parameters]
    if len(names) > 1:
        raise InferError("`max_tokens` and `max_new_tokens` are the same: give one of them")
    if names:
        most = 2**31 - 1 if context is None else context
        words = f"a whole number from 1 to {most}" + (
            "" if context is None else ", which is all that the model can take"
        )
        changes["max_tokens"] = _Number(int, 1, most, words).read(names[0], parameters[names[0]])
    if len(stop):
        changes["stop"] = _read_stops(stop)
    return attrs.evolve(defaults, **changes)


def _read_stops(stop: Sequence[bytes]) -> tuple[str, ...]:
    if len(stop) > MOST_STOPS:
        raise InferError(f"`stop` must have at most {MOST_STOPS} strings, got {len(stop)}")
    try:
        stops = tuple(each.decode() for each in stop)
    except UnicodeDecodeError as error:
        raise InferError(f"`stop` must be UTF-8: {error}") from None
    for each in stops:
        if not 1 <= len(each) <= LONGEST_STOP:
            raise InferError(f"each string of `stop` must have from 1 to {LONGEST_STOP} characters, got {len(each)}")
    return stops
