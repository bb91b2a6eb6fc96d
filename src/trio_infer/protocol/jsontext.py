"""JSON text to values and back, at orjson's speed, with the things that orjson won't do.

- *Bare NaN, Infinity and -Infinity.* Triton reads and writes them and so do its clients, orjson refuses to read them
  and writes null. A text that orjson refuses is tried once more with these tokens covered by numbers of the same
  length: if orjson then takes it, it is well-formed in all other respects (UTF-8, surrogates, range of numbers), and
  only then the standard library reads the original. So the two readers never disagree about anything but the tokens.
  (The cover goes over the words in strings, too: it is only looked at, and a string stays a string.) Written, they go
  in as fragments.
- *Depth.* A text of 250,000 brackets must cost nothing, whatever the parser's own limit is (orjson's is 1,024, with
  another message). Brackets are counted first; only a text with more of them than the limit, such as a nested tensor,
  has its depth measured, in blocks and without a Python loop over its bytes: 3 ms a MiB.
- *Millions of small arrays.* While they are made, CPython's collector goes over them again and again, for nothing: a
  parser makes no garbage. 16 MiB of `[],` take 3.6 s with it and 0.5 s without, so it rests during a large text.
- *Integers that need more than 64 bits.* Reading gives a float, which then fails where an integer is wanted. Writing
  puts the digits.

Both readers take the last of two equal keys.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import orjson

from trio_infer.errors import BadJSONError, InferError

__all__ = ["dumps", "error_json", "loads"]

_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY

_BLOCK: Final = 2**18
_IRRELEVANT: Final = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_STEP: Final = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1

_MANY: Final = 10_000  # brackets; fewer cost the collector less than a millisecond


def loads(data: bytes | bytearray | memoryview, *, max_depth: int) -> Any:
    """The value that a JSON text stands for.

    Args:
        data: UTF-8, without a byte order mark.
        max_depth: most arrays and objects that may be open at once.

    Raises:
        InferError: nested too deep (400).
        BadJSONError: not JSON; the message says where, counted from 0.
    """
    text = bytes(data)
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > max_depth and _deeper_than(text, max_depth):
        raise InferError(f"JSON nesting depth exceeds maximum allowed limit ({max_depth})")
    if brackets < _MANY:
        return _parse(text)
    with _collector_at_rest():
        return _parse(text)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if b"NaN" not in text and b"Infinity" not in text:
            raise _bad_json(error) from None
    try:
        orjson.loads(text.replace(b"NaN", b"1.0").replace(b"Infinity", b"1.000000"))
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise _bad_json(error) from None


def _bad_json(error: Exception) -> BadJSONError:
    # The first half is Triton's, word for word (its tests look for it); the second is the parser's reason.
    position = error.pos if isinstance(error, json.JSONDecodeError) else 0
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return BadJSONError(f"failed to parse the request JSON buffer: Invalid value. at {position} ({reason})")


def _deeper_than(text: bytes, limit: int) -> bool:
    """Whether more than `limit` brackets are ever open at once, those in strings not counted.

    Right for everything up to the first error in the text, and no parser reads on from there.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    depth = 0
    in_string = False
    for start in range(0, len(text), _BLOCK):
        signs = np.frombuffer(text[start : start + _BLOCK].translate(None, _IRRELEVANT), np.uint8)
        if not signs.size:
            continue
        inside = np.bitwise_xor.accumulate(signs == ord('"')) ^ in_string
        steps = _STEP[signs]
        steps[inside] = 0
        depths = np.cumsum(steps, dtype=np.int64)
        if depth + int(depths.max()) > limit:
            return True
        depth += int(depths[-1])
        in_string = bool(inside[-1])
    return False


def dumps(value: Any) -> bytes:
    """JSON text: UTF-8 above ASCII left as it is, no spaces, NaN and infinities bare.

    Args:
        value: dicts with str keys, lists, str, numbers, bool, None, numpy arrays and scalars, `orjson.Fragment`s.

    Raises:
        TypeError: something in it has no JSON form.
    """
    try:
        text = orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        return orjson.dumps(_with_fragments(value), option=_OPTIONS)
    # orjson writes null for NaN; the word may as well be a None, or in a string, so look.
    return orjson.dumps(_with_fragments(value), option=_OPTIONS) if b"null" in text else text


def _with_fragments(value: Any) -> Any:
    """`value` with everything that orjson can't write put in as text."""
    if isinstance(value, dict):
        return {key: _with_fragments(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_fragments(item) for item in value]
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        return orjson.Fragment(json.dumps(float(value)))
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(int(value)))
    return value


def error_json(message: str) -> bytes:
    """The body of every error answer: `{"error": message}`.

    Args:
        message: any text; lone surrogates, which UTF-8 doesn't have, are shown as escapes.
    """
    return orjson.dumps({"error": message.encode("utf-8", "backslashreplace").decode()})
