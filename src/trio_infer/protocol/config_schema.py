"""The schema of `config.pbtxt`: messages made from it, what is wrong with a text, and a message as plain values.

The messages are protobuf's own, made at import from the compiled schema (`model_config.binpb`, from
`model_config.proto` beside it) in a private descriptor pool. Generated code was rejected: it refuses to be imported
under a protobuf older than the `protoc` that wrote it, and it registers `inference.ModelConfig` in the global pool,
where `tritonclient`'s copy of the same name would collide with it.

protobuf's own JSON printer was rejected as well: it writes 64-bit integers as strings, where Triton has numbers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format
from google.protobuf.message import Message

__all__ = ["SCHEMA", "SchemaError", "enum_name", "from_json", "from_text", "new_config", "plain"]

SCHEMA: Final = Path(__file__).with_name("model_config.binpb")


def _load_schema() -> tuple[descriptor_pool.DescriptorPool, type[Message]]:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(SCHEMA.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool, message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


_POOL, _Message = _load_schema()


class SchemaError(Exception):
    """A text or JSON doesn't follow the schema; `line` is where, if that is known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line


def new_config() -> Any:
    """An empty `ModelConfig` message."""
    return _Message()


def from_text(text: str) -> Any:
    """A message from protobuf text.

    Raises:
        SchemaError: with the line.
    """
    try:
        return text_format.Parse(text, _Message(), descriptor_pool=_POOL)
    except text_format.ParseError as error:
        raise SchemaError(_explain(error), error.GetLine()) from None


def from_json(data: Mapping[str, Any]) -> Any:
    """A message from JSON values; numbers may also be strings.

    Raises:
        SchemaError: without a line.
    """
    try:
        return json_format.ParseDict(dict(data), _Message(), descriptor_pool=_POOL)
    except json_format.ParseError as error:
        raise SchemaError(" ".join(str(error).split())) from None


def enum_name(message: Any, field: str) -> str:
    """The name of an enum field's value; its number if it has no name."""
    number = getattr(message, field)
    value = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(number)
    return str(number) if value is None else str(value.name)


def plain(value: Any) -> Any:
    """A message as a dict: plain fields also at their default, messages only if set, in the schema's order."""
    result: dict[str, Any] = {}
    for field in value.DESCRIPTOR.fields:
        if field.has_presence and not value.HasField(field.name):
            continue
        content = getattr(value, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            result[field.name] = {
                str(key): plain(item) if isinstance(item, Message) else item for key, item in sorted(content.items())
            }
        elif field.enum_type is not None:
            result[field.name] = enum_name(value, field.name)
        elif isinstance(content, Message):
            result[field.name] = plain(content)
        elif isinstance(content, (str, int, float)):
            result[field.name] = _number(content, field)
        else:
            result[field.name] = [
                plain(item) if isinstance(item, Message) else _number(item, field) for item in content
            ]
    return result


def _number(value: Any, field: Any) -> Any:
    # A 32-bit float as the shortest decimal that reads back as it, not as its 64-bit expansion.
    return float(str(np.float32(value))) if field.type == field.TYPE_FLOAT else value


def _explain(error: text_format.ParseError) -> str:
    """Protobuf's complaint without its own place and its quotation of the line; an unknown field with a guess."""
    text = re.sub(r"^\d+:\d+ : ", "", " ".join(str(error).split()))
    text = re.sub(r"^'.*': (?=[A-Z])", "", text).rstrip(".")
    unknown = re.fullmatch(r'Message type "inference\.([\w.]+)" has no field named "(\w+)"', text)
    if unknown:
        kind, field = unknown.groups()
        known = _POOL.FindMessageTypeByName(f"inference.{kind}").fields_by_name
        return f"{kind} has no field '{field}'{_guess(field, list(known))}"
    wrong = re.fullmatch(r'Enum type "inference\.([\w.]+)" has no value named (\w+)', text)
    if wrong:
        kind, value = wrong.groups()
        values = _POOL.FindEnumTypeByName(f"inference.{kind}").values_by_name
        return f"{kind} has no value {value}{_guess(value, list(values))}"
    return text[:1].lower() + text[1:]


def _guess(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; it has {', '.join(known)}" if len(known) <= 9 else ""
