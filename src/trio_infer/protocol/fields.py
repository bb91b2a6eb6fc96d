"""Typed access to the members of a JSON object, failing in the words that Triton's JSON reader uses.

Clients and tests look for those words (`attempt to access JSON non-string as string`), so they come first; what was
found instead follows.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from trio_infer.errors import BadJSONError, InferError

__all__ = ["clip", "found", "optional", "refuse", "required", "unsigned", "wrong_type"]

T = TypeVar("T")

_WORDS: Final[dict[type, str]] = {
    str: "string",
    bool: "boolean",
    list: "array",
    dict: "object",
    int: "unsigned-integer",
}


def clip(text: str, most: int = 256) -> str:
    """A client's own text for an error message, cut so that the answer stays small."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def found(value: Any) -> str:
    """A JSON value for an error message: short, whatever it is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return clip(repr(value[:60] if isinstance(value, str) else value), 60)


def wrong_type(what: str, word: str, value: Any, where: str = "") -> BadJSONError:
    """The error for a value of the wrong JSON type.

    Args:
        what: the field's name.
        word: the type it should have, as Triton calls it (`signed-integer`, `number`).
        value: what was found.
        where: the tensor it belongs to, if any.
    """
    place = f" in {where}" if where else ""
    wanted = "double" if word == "number" else word
    return BadJSONError(
        f"Unable to parse '{what}': attempt to access JSON non-{word} as {wanted} (got {found(value)}{place})"
    )


def required(members: dict[str, Any], key: str, kind: type[T], where: str = "") -> T:
    """A member that must be there.

    Args:
        members: the JSON object.
        key: the member's name.
        kind: str, bool, list, dict, or int for an unsigned integer.
        where: the tensor it belongs to, if any; for the message.

    Raises:
        BadJSONError: it is missing or of another type.
    """
    if key not in members:
        place = f" (in {where})" if where else ""
        raise BadJSONError(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'{place}")
    value: Any = members[key]
    # `type is`: true is no integer here.
    if type(value) is not kind or (kind is int and not unsigned(value)):
        raise wrong_type(key, _WORDS[kind], value, where)
    typed: T = value
    return typed


def optional(members: dict[str, Any], key: str, kind: type[T], default: T, where: str = "") -> T:
    """As `required`, but a member that is not there has the value `default`."""
    return required(members, key, kind, where) if key in members else default


def unsigned(value: Any) -> bool:
    """Whether a JSON value is an integer and not negative; true is none."""
    return type(value) is int and value >= 0


def refuse(request_id: str, message: str) -> InferError:
    """An error that Triton raises behind its front end: those start with the request's id.

    Args:
        request_id: "" if the client gave none.
        message: the rest.
    """
    return InferError(f"[request id: {clip(request_id) or '<id_unknown>'}] {message}")
