"""The front that Google Vertex AI calls: a health route, and a route for predictions.

The platform tells the routes and the port in its environment, and forwards nothing but `POST` to the one for
predictions. Whatever else of the protocol a client needs, it asks for there, with the header
`X-Vertex-Ai-Triton-Redirect: v2/models/m/stats`. Since everyone who may predict may send that header, it leads only to
what reads or infers (`OPEN`), and to that only by its plain name.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from trio_infer.api.cloud import ByContentType, bad_json_is_400, check_method, default_model
from trio_infer.api.infer import answer_infer
from trio_infer.api.routes import find_route
from trio_infer.api.v2 import V2
from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.fields import found
from trio_infer.wire.serve import Exchange

__all__ = ["VertexAI"]

MIME: Final = "application/vnd.vertex-ai-triton.binary+json"

REDIRECT: Final = b"x-vertex-ai-triton-redirect"

PLAIN_PATH: Final = re.compile(r"/?v2(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.~:@+-]+)*")
"""No escapes, no empty segments, no dots that mean a place."""

POSTED: Final = frozenset({"infer", "generate", "generate_stream", "cancel", "index"})

READS: Final = frozenset(
    {"live", "ready", "server", "metadata", "model_ready", "config", "statistics", "logging", "trace_setting"}
)

OPEN: Final = POSTED | READS
"""The actions that a redirect may ask for."""


@attrs.frozen
class VertexAI:
    """The application of the port that Vertex AI calls.

    Args:
        v2: answers what is redirected, and knows the models.
        health_route, predict_route: paths (AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE).
        model: that predictions are asked of; None if there is only one.
    """

    v2: V2
    health_route: str = attrs.field(default="/health", kw_only=True)
    predict_route: str = attrs.field(default="/predict", kw_only=True)
    model: str | None = attrs.field(default=None, kw_only=True)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request, or raise the error that is to be answered."""
        path = exchange.target.partition("?")[0]
        if path == self.health_route:
            exchange.target = "/v2/health/ready"
            await self.v2(exchange)
        elif path == self.predict_route:
            check_method(exchange, "POST")
            target = exchange.header(REDIRECT)
            if target is None:
                await self._predict(exchange)
            else:
                await self._redirect(exchange, target.strip())
        else:
            raise InferError("Not Found", ErrorCode.NOT_FOUND)

    async def _predict(self, exchange: Exchange) -> None:
        name = default_model(self.v2, self.model, "--vertex-ai-default-model")
        model = self.v2.find(exchange, name, None)
        with bad_json_is_400():
            await answer_infer(
                exchange, model, self.v2.limits, ByContentType(MIME), compressed=False, forwarded=self.v2.forwarded
            )

    async def _redirect(self, exchange: Exchange, target: str) -> None:
        if not PLAIN_PATH.fullmatch(target):
            raise _refusal(target, "it must be a plain path, such as v2/models/NAME/stats")
        target = f"/{target.removeprefix('/')}"
        route = find_route(target)
        if route is None:
            raise InferError("Not Found", ErrorCode.NOT_FOUND)
        if route.action not in OPEN:
            raise _refusal(target, "a redirect may lead to what reads or infers only")
        if route.action in READS:
            if exchange.content_length != 0 and "POST" in route.methods:
                raise _refusal(target, "a redirect may read there, but not write: send no body")
            exchange.method = "GET" if "GET" in route.methods else exchange.method
        exchange.life.label += f" -> {target}"
        exchange.target = target
        await self.v2(exchange)


def _refusal(target: str, why: str) -> InferError:
    return InferError(f"X-Vertex-Ai-Triton-Redirect leads to {found(target)}: {why}", status=403)
