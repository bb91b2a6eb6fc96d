"""Restricted APIs: categories of endpoints that are answered only to who sends a certain header.

It is a lock on the door between a trusted proxy and the server, as Triton has it (`--http-restricted-api`), not a
scheme of users and rights: one header and one value for each category, in the clear. The check comes before anything
else that a path could tell: before the method, the body, and whether there is such a model.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs

from trio_infer.errors import InferError, SetupError

__all__ = ["CATEGORIES", "Restrictions"]

CATEGORIES: Final = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""What can be restricted: Triton's names. `Route.category` says which endpoint belongs to which."""

_OPTION: Final = "--http-restricted-api"
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@attrs.frozen
class Restrictions:
    """What is restricted, and by which header.

    Args:
        keys: of each restricted category the header's name, as the operator wrote it, and the value that it must have.
    """

    keys: Mapping[str, tuple[str, str]] = attrs.field(factory=dict)

    @classmethod
    def parse(cls, rules: Iterable[str]) -> Restrictions:
        """Restrictions as the command line has them.

        Args:
            rules: each `CATEGORY[,CATEGORY...]:HEADER=VALUE`.

        Raises:
            SetupError: one can't be read, names an unknown category, or one that another rule names, too.
        """
        keys: dict[str, tuple[str, str]] = {}
        for rule in rules:
            categories, colon, key = rule.partition(":")
            header, equals, value = key.partition("=")
            if not (colon and equals and value and _NAME.fullmatch(header)):
                raise SetupError(f"{_OPTION} must be CATEGORY[,CATEGORY...]:HEADER=VALUE, got {rule!r}")
            for category in categories.split(","):
                if category not in CATEGORIES:
                    raise SetupError(
                        f"{_OPTION}: unknown restricted api '{category}'; expected one of {', '.join(CATEGORIES)}"
                    )
                if category in keys:
                    raise SetupError(f"{_OPTION}: api '{category}' can not be specified in multiple config groups")
                keys[category] = (header, value)
        return cls(keys)

    def check(self, category: str, header: Callable[[bytes], str | None]) -> None:
        """Let a request pass, or not.

        Args:
            category: of what it asks for.
            header: gives the value of a header, its name in lower case, or None; such as `Exchange.header`.

        Raises:
            InferError: the category is restricted, and the header is missing or has another value (403).
        """
        key = self.keys.get(category)
        if key is None:
            return
        name, value = key
        given = header(name.lower().encode()) or ""
        # In constant time, so that a value can't be guessed letter by letter. Headers are latin-1 to us.
        if not hmac.compare_digest(given.encode("latin-1"), value.encode()):
            raise InferError(f"This API is restricted, expecting header '{name}'", status=403)
