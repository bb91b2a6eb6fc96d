"""What a load request may put in place of a repository's: a configuration, as JSON text, and files.

The files come from a client, so they are written into a new directory of their own and nowhere else: a path must be
relative and stay below, step by step, and nothing is ever followed or replaced there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from trio_infer.errors import InferError, ModelLoadError
from trio_infer.protocol.fields import clip
from trio_infer.protocol.jsontext import loads
from trio_infer.protocol.model_config import ModelConfig

__all__ = ["check_name", "check_path", "is_name", "read_config", "write_files"]

MOST_FILES: Final = 1000

MOST_BYTES: Final = 2**31

LONGEST_NAME: Final = 255
"""Bytes in a file's name; what file systems take."""

LONGEST_PATH: Final = 1024

MOST_STEPS: Final = 32
"""In a path: a thousand files deep down would make half a million directories."""

DEPTH: Final = 100
"""Nesting of a configuration's JSON; that of a request."""


def read_config(text: str, name: str) -> ModelConfig:
    """A configuration from JSON text, with protobuf's leniency: `"max_batch_size": "16"` is a number, too.

    Raises:
        ModelLoadError: no JSON object, a field that doesn't exist, a value that can't be.
    """
    try:
        value: Any = loads(text.encode("utf-8", "surrogatepass"), max_depth=DEPTH)
    except InferError as error:
        raise ModelLoadError(name, f"the configuration in the request is not JSON: {error.message}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(name, "the configuration in the request must be a JSON object")
    return ModelConfig.of_json(value, name=name)


def check_name(name: str) -> None:
    """Refuse what can't be a model's name, as it would be a path, or no file's name.

    Raises:
        ModelLoadError: it is one.
    """
    if not is_name(name):
        raise ModelLoadError(clip(name), f"invalid model name {clip(repr(name))}: it must be the name of a directory")


def is_name(step: str) -> bool:
    """Whether it can be the name of a directory or file: one step of a path, and nothing that a log line breaks at."""
    size = len(step.encode("utf-8", "replace"))
    return step not in {"", ".", ".."} and size <= LONGEST_NAME and step.isprintable() and not {*step} & {*"/\\"}


def check_path(path: str, model: str) -> tuple[str, ...]:
    """The steps of a path in a model's directory.

    Raises:
        ModelLoadError: it is empty, absolute, leaves the directory, or can't be a file's.
    """
    steps = tuple(path.split("/"))
    if len(path) > LONGEST_PATH or len(steps) > MOST_STEPS or not all(map(is_name, steps)):
        raise ModelLoadError(
            model,
            "the path of a file that is given must stay in the model's directory, such as '1/model.py', "
            f"got {clip(repr(path))}",
        )
    return steps


def write_files(name: str, files: Mapping[str, bytes]) -> tempfile.TemporaryDirectory[str]:
    """Write the files of a model. Blocks.

    Args:
        name: the model's, and its directory's.
        files: contents by path.

    Returns:
        the directory that the model's is in; to be cleaned up when the model is gone.

    Raises:
        ModelLoadError: a path leaves the directory, or is a file and a directory at once; there are too many, or the
            disk says no.
    """
    size = sum(map(len, files.values()))
    if len(files) > MOST_FILES or size > MOST_BYTES:
        raise ModelLoadError(
            name, f"{len(files)} files of {size} bytes are given, more than {MOST_FILES} or {MOST_BYTES} bytes"
        )
    paths = {PurePosixPath(*check_path(path, name)): content for path, content in files.items()}
    holder = tempfile.TemporaryDirectory(prefix="trio-infer-", ignore_cleanup_errors=True)
    try:
        root = Path(holder.name) / name
        root.mkdir()
        for path, content in paths.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("xb") as stream:
                stream.write(content)
    except OSError as error:
        holder.cleanup()
        raise ModelLoadError(name, f"the files that are given can't be written: {error.strerror}") from error
    except BaseException:
        holder.cleanup()
        raise
    return holder
