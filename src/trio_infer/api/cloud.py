"""What the fronts for cloud platforms have in common.

The platforms forward only a few headers, so their dialects say in the content type where JSON ends and binary tensors
begin. Platforms also count 5xx as the container's fault and replace it, so a bad body is always answered 400 there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from trio_infer.api.infer import Framing
from trio_infer.api.v2 import V2
from trio_infer.errors import BadJSONError, ErrorCode, InferError
from trio_infer.protocol.fields import found
from trio_infer.protocol.infer import EncodedResponse
from trio_infer.wire.headers import Headers
from trio_infer.wire.serve import Exchange

__all__ = ["ByContentType", "bad_json_is_400", "check_method", "default_model"]

PARAMETER = "json-header-size"


@attrs.frozen
class ByContentType(Framing):
    """Binary tensors are announced by `Content-Type: MIME;json-header-size=N`, both ways.

    Args:
        mime: the platform's media type.
    """

    mime: str
    name: str = PARAMETER
    takes_nothing: bool = False

    def announced(self, exchange: Exchange) -> str | None:
        """The size as it stands in the content type; None for any other media type.

        Raises:
            InferError: the media type is this one, and the size is missing.
        """
        given = exchange.header(b"content-type") or ""
        mime, *parameters = (part.strip() for part in given.split(";"))
        if mime.lower() != self.mime:
            return None
        for parameter in parameters:
            key, equals, value = parameter.partition("=")
            if equals and key.strip().lower() == PARAMETER:
                return value.strip().strip('"')
        raise InferError(f"Content-Type must be {self.mime};{PARAMETER}=N, got {found(given)}")

    def headers(self, encoded: EncodedResponse) -> Headers:
        if encoded.header_length is None:
            return [("content-type", "application/json")]
        return [("content-type", f"{self.mime};{PARAMETER}={encoded.header_length}")]


def default_model(v2: V2, name: str | None, say: str) -> str:
    """The model that a request without a name is for.

    Args:
        v2: knows the models.
        name: as the operator gave it, if so.
        say: how the operator can.

    Raises:
        InferError: it is not clear which.
    """
    if name:
        return name
    names = {model.signature.name for model in v2.catalog}
    if len(names) == 1:
        return names.pop()
    raise InferError(f"{len(names)} models are served, and none of them is the default: name it with {say}")


@contextmanager
def bad_json_is_400() -> Iterator[None]:
    """Within it, what is elsewhere answered as Triton answers unreadable JSON, is a 400."""
    try:
        yield
    except BadJSONError as error:
        raise InferError(error.message, ErrorCode.INVALID_ARG) from error


def check_method(exchange: Exchange, *methods: str) -> None:
    """Refuse other methods.

    Raises:
        InferError: 405.
    """
    if exchange.method not in methods:
        raise InferError("Method Not Allowed", status=405)
