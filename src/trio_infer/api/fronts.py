"""Fronts: further ports of one server, each of which speaks a dialect of its own to the same models."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence

import attrs
import trio

from trio_infer.api.v2 import V2
from trio_infer.wire.serve import Application

__all__ = ["Front"]


@attrs.frozen
class Front:
    """A further port of a server: `Server(models, fronts=[Front("vertex-ai", VertexAI, port=8080)])`.

    It shares the server's models, limits, statistics and drain. Its connections are counted with the others, but its
    places are its own: when `max_connections` are open on one port, the others still accept.

    Args:
        kind: what it is called in `Address.kind` and in complaints; a command's flag for its port is `--KIND-port`.
        application: makes what answers its requests, given what answers those of the main port.
        host: a name or address to listen on; None for all.
        port: 0 for a free one.
        ssl_context: serves TLS (https) if given.
        reuse_port: share the port with other processes (SO_REUSEPORT).
        listeners: accept from these instead; closed at the end.
    """

    kind: str
    application: Callable[[V2], Application]
    host: str | None = attrs.field(default="127.0.0.1", kw_only=True)
    port: int = attrs.field(default=0, kw_only=True)
    ssl_context: ssl.SSLContext | None = attrs.field(default=None, kw_only=True)
    reuse_port: bool = attrs.field(default=False, kw_only=True)
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]] | None = attrs.field(default=None, kw_only=True)
