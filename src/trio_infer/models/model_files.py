"""Files of a model besides its code: read within its directory and within bounds, or told apart by when they changed.

Which file that is says a configuration, which may have come with a load request. So a path is followed only to where it
ends: links inside the directory are fine (Kubernetes mounts are made of them), links out of it are not, and neither is
anything but a regular file.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from trio_infer.errors import ModelLoadError

__all__ = ["fingerprint", "read_inside", "read_labels"]

LARGEST_LABELS: Final = 2**24
"""Bytes of one file of labels; ImageNet's 21,841 classes take less than one MiB."""

MOST_ENTRIES: Final = 100_000
"""In a model's directory, that are looked at to tell whether something has changed."""


def read_inside(directory: Path, path: str, *, most: int, rule: str) -> bytes:
    """The content of a file.

    Args:
        directory: that it must be in.
        path: from there.
        most: bytes that it may have.
        rule: what to say of a path that leads out of it.

    Raises:
        ValueError: it leads out of it, is no regular file, or is too large.
        OSError: it can't be read.
    """
    ring = ValueError(f"'{path}' is a link that leads to itself")
    try:
        file = (directory / path).resolve()
    except RuntimeError:  # Python up to 3.12
        raise ring from None
    if not file.is_relative_to(directory.resolve()):
        raise ValueError(f"{rule}, got '{path}'")
    if file.is_symlink():  # later ones leave it as it is
        raise ring
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise ValueError(f"'{path}' is not a regular file")
    with file.open("rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"'{path}' is larger than {most} bytes")
    return content


def read_labels(model: str, directory: Path, path: str) -> tuple[str, ...]:
    """The labels of an output's classes, one a line.

    Raises:
        ModelLoadError: there is no such file, or it can't be read.
    """
    try:
        rule = "`label_filename` must be in the model's directory"
        text = read_inside(directory, path, most=LARGEST_LABELS, rule=rule).decode()
    except (OSError, ValueError) as error:
        raise ModelLoadError(model, f"the labels can't be read: {error}", where=directory) from error
    # Not `splitlines`: it also splits at form feeds and U+2028, and every label behind one would be off by one.
    return tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")) if text else ()


def fingerprint(directories: Iterable[Path]) -> str:
    """Changes when files below the directories do: their paths, sizes, times and inodes; contents aren't read.

    What can't be looked at is left out. Bytecode is, too, as running a model may write it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for directory in directories:
        for path, status in itertools.islice(_files(directory), MOST_ENTRIES):
            mark = (path, status.st_mtime_ns, status.st_size, status.st_ino)
            digest.update(ascii(mark).encode())
    return digest.hexdigest()


def _files(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The regular files below, those that links lead to as well, level by level in a fixed order."""
    waiting, seen = [os.fspath(directory)], set()
    for folder in waiting:
        try:
            status = os.stat(folder)
            place = (status.st_dev, status.st_ino)
            if place in seen:
                continue  # a link to a directory above
            seen.add(place)
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in itertools.islice(entries, MOST_ENTRIES))
        except OSError:
            continue
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status
            elif stat.S_ISDIR(status.st_mode) and name != "__pycache__" and len(waiting) < MOST_ENTRIES:
                waiting.append(path)
