"""Which request headers become parameters of an inference: `--http-header-forward-pattern`.

Triton matches header names with RE2: anywhere in the name, without regard to case, and in time that grows with the
name's length only. Python's `re` has another engine, which backtracks: with a pattern such as `(x+)+y` a client could
hold the server up for years by one header of forty letters. So the operator's pattern is compiled here, into a
non-deterministic automaton; all its states are followed at once, and each step, once taken, is remembered. What can't
be done that way, RE2 doesn't have either (back references, looking ahead and behind), and is refused at the start.

Names of headers consist of some fifty different characters in the end, so each class of characters is worked out
beforehand: which of the fifty are in it. Python's own `re` says that, asked about one character at a time.

Not done: word boundaries (`\\b`), Unicode classes (`\\p`), `\\Q...\\E`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from trio_infer.errors import SetupError
from trio_infer.protocol.values import ParameterValue

__all__ = ["HeaderPattern"]

_OPTION: Final = "--http-header-forward-pattern"

LONGEST: Final = 256
"""Characters of a header's name; longer ones are never forwarded."""

MOST_STATES: Final = 500
"""Of a pattern. A step costs at most so many, and a request has at most 16 KiB of headers (`--max-header-size`)."""

MOST_STEPS: Final = 20_000
"""That are remembered; then all are forgotten."""

RESERVED: Final = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"}
)
"""Parameters that mean something to the server. A header can't set them."""

_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~"
_POSIX: Final = {
    "[:alnum:]": "a-z0-9",
    "[:alpha:]": "a-z",
    "[:digit:]": "0-9",
    "[:lower:]": "a-z",
    "[:upper:]": "a-z",
    "[:punct:]": r"!#$%&'*+\-.^_`|~",
    "[:word:]": r"\w",
    "[:xdigit:]": "0-9a-f",
}

_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*\]")
_ESCAPE: Final = re.compile(r"\\(?:[dDwWsSafnrtv]|x[0-9A-Fa-f]{2}|[^0-9A-Za-z])", re.ASCII)
_REPEAT: Final = re.compile(r"(?:([*+?])|\{([0-9]{1,4})(?:(,)([0-9]{1,4})?)?\})\??")
_GROUP: Final = re.compile(r"\((?:\?(?:P?<[A-Za-z_]\w*>|[imsU]*(?:-[imsU]+)?:|(?P<flags>[imsU]+)(?P<end>\))))?")

_State: TypeAlias = "tuple[str, frozenset[str], tuple[int, ...]]"
"""What it waits for ("read", one of these characters; "start", "end", of the name; "go", nothing), and what follows."""

_NOTHING: Final[frozenset[str]] = frozenset()
_DONE: Final = 0


class HeaderPattern:
    """A compiled pattern.

    Args:
        pattern: a regular expression as RE2 has them.

    Raises:
        SetupError: it is none, or too large.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._states: list[_State] = [("done", _NOTHING, ())]
        compiler = _Compiler(pattern, self._states)
        self._first = compiler.compile()
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._start = self._closure([self._first], at_start=True)
        self.matches: Callable[[str], bool] = lru_cache(1024)(self._matches)

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, ParameterValue]:
        """The headers that are to be forwarded, as parameters.

        Args:
            headers: names, as the client writes them, and values; if a name comes several times, its values are joined,
                as HTTP allows.
        """
        forwarded: dict[str, ParameterValue] = {}
        for name, value in headers:
            if name.lower() not in RESERVED and self.matches(name.lower()):
                forwarded[name] = f"{forwarded[name]}, {value}" if name in forwarded else value
        return forwarded

    def _matches(self, name: str) -> bool:
        if len(name) > LONGEST:
            return False
        states = self._start
        for character in name:
            if _DONE in states:
                return True
            key = (states, character)
            following = self._steps.get(key)
            if following is None:
                if len(self._steps) >= MOST_STEPS:
                    self._steps.clear()
                following = self._steps[key] = self._step(states, character)
            states = following
        return _DONE in self._closure(states, at_end=True)

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        after = [self._first]  # a match may begin anywhere
        for state in states:
            kind, characters, following = self._states[state]
            if kind == "read" and character in characters:
                after += following
        return self._closure(after)

    def _closure(self, states: Iterable[int], *, at_start: bool = False, at_end: bool = False) -> frozenset[int]:
        """What can be reached without reading."""
        reached: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state not in reached:
                reached.add(state)
                kind, _, following = self._states[state]
                if kind == "go" or (kind == "start" and at_start) or (kind == "end" and at_end):
                    waiting += following
        return frozenset(reached)


class _Compiler:
    """Reads a pattern from its end to its beginning, so to speak: what follows a state is there before the state.

    The text is parsed into a tree of tuples first, since it reads from left to right.
    """

    def __init__(self, pattern: str, states: list[_State]) -> None:
        self._text = pattern
        self._at = 0
        self._states = states

    def compile(self) -> int:
        """The first state."""
        tree = self._alternatives()
        if self._at < len(self._text):
            raise self._refuse("unexpected )")
        return self._emit(tree, _DONE)

    def _refuse(self, why: str) -> SetupError:
        return SetupError(f"{_OPTION}: {why} at character {self._at + 1} of {self._text!r}")

    # -- Parsing ----------------------------------------------------------------------------------------------------

    def _alternatives(self, depth: int = 0) -> tuple[object, ...]:
        if depth > 50:
            raise self._refuse("too deeply nested")
        branches: list[tuple[object, ...]] = [("sequence",)]
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                branches.append(("sequence",))
                continue
            atom = self._repeated(self._atom(depth))
            branches[-1] = (*branches[-1], atom)
        return ("either", *branches)

    def _atom(self, depth: int) -> tuple[object, ...]:
        text, at = self._text, self._at
        character = text[at]
        if character == "(":
            return self._group(depth)
        if character in "*+?":
            raise self._refuse(f"nothing to repeat before {character}")
        if character in "^$" or text.startswith((r"\A", r"\z"), at):
            self._at += 2 if character == "\\" else 1
            return ("start",) if text[at : self._at] in ("^", r"\A") else ("end",)
        if character == "[":
            match = _CLASS.match(text, at)
            if match is None:
                raise self._refuse("missing ]")
        elif character == "\\":
            match = _ESCAPE.match(text, at)
            if match is None:
                raise self._refuse(f"invalid escape sequence {text[at : at + 2]}")
        else:
            self._at += 1
            return ("read", frozenset(_ALPHABET) if character == "." else frozenset(character.lower()))
        characters = self._characters(match[0])
        self._at = match.end()
        return ("read", characters)

    def _characters(self, text: str) -> frozenset[str]:
        for name, inside in _POSIX.items():
            text = text.replace(name, inside)
        if "[:" in text:
            raise self._refuse("unknown class")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of set operations that Python may have one day
                one = re.compile(text, re.IGNORECASE | re.ASCII)
        except re.error as error:
            raise self._refuse(str(error.msg)) from None
        return frozenset(filter(one.fullmatch, _ALPHABET))

    def _group(self, depth: int) -> tuple[object, ...]:
        match = _GROUP.match(self._text, self._at)
        if match is None or (match[0] == "(" and self._text.startswith("(?", self._at)):
            raise self._refuse(f"invalid group {self._text[self._at : self._at + 3]}")
        self._at = match.end()
        if match["end"]:
            return ("sequence",)  # flags; names are matched without regard to case anyway
        inside = self._alternatives(depth + 1)
        if self._at == len(self._text):
            raise self._refuse("missing )")
        self._at += 1
        return inside

    def _repeated(self, atom: tuple[object, ...]) -> tuple[object, ...]:
        match = _REPEAT.match(self._text, self._at)
        if match is None:
            return atom
        sign, low, comma, high = match.groups()
        if sign:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        else:
            least = int(low)
            most = int(high) if high else None if comma else least
            if most is not None and most < least:
                raise self._refuse("invalid repeat count")
        self._at = match.end()
        if _REPEAT.match(self._text, self._at):
            raise self._refuse("bad repetition operator")
        return ("repeat", least, most, atom)

    # -- States -----------------------------------------------------------------------------------------------------

    def _add(self, kind: str, following: tuple[int, ...], characters: frozenset[str] = _NOTHING) -> int:
        if len(self._states) == MOST_STATES:
            raise SetupError(f"{_OPTION}: {self._text!r} is too large")
        self._states.append((kind, characters, following))
        return len(self._states) - 1

    def _emit(self, tree: tuple[object, ...], after: int) -> int:
        """The state in which what `tree` says is still to come, and then `after`."""
        match tree:
            case ("read", frozenset() as characters):
                return self._add("read", (after,), characters)
            case ("either", *branches):
                firsts = tuple(self._emit(branch, after) for branch in branches)  # type: ignore[arg-type]  # trees all
                return firsts[0] if len(firsts) == 1 else self._add("go", firsts)
            case ("sequence", *parts):
                for part in reversed(parts):
                    after = self._emit(part, after)  # type: ignore[arg-type]  # likewise
                return after
            case ("repeat", int() as least, most, tuple() as atom):
                return self._emit_repeat(least, most, atom, after)  # type: ignore[arg-type]  # int or None
            case (str() as kind,):
                return self._add(kind, (after,))
        raise AssertionError(tree)

    def _emit_repeat(self, least: int, most: int | None, atom: tuple[object, ...], after: int) -> int:
        if most is None:
            loop = self._add("go", ())
            again = self._emit(atom, loop)
            self._states[loop] = ("go", _NOTHING, (again, after))
            first = loop
        else:
            first = after
            for _ in range(most - least):
                first = self._add("go", (self._emit(atom, first), after))
        for _ in range(least):
            first = self._emit(atom, first)
        return first
