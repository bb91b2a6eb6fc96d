"""Bounds on what untrusted bytes may cost, and the policies on a client that leaves: plain frozen values.

Each default names its precedent. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import attrs
from attrs import validators

__all__ = ["ControlPolicy", "DisconnectPolicy", "Keepalive", "Limits", "RateLimit"]

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be more than 0, got {value}")


def _not_negative(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{attribute.name} must be 0 or more, got {value}")


@attrs.frozen(kw_only=True)
class Limits:
    """How much one connection, and all of them, may take.

    Attributes:
        max_header_size: bytes of request line and headers; more is answered 431. (Node.js and h11: 16 KiB.)
        http_max_input_size: bytes of JSON, of a raw body, and of a body after decompression; more is answered 400.
            Binary tensors are not counted. (Triton: 64 MiB, same name and meaning.)
        max_body_size: bytes of a whole request body, binary tensors included; more is answered 413. (Triton has no such
            bound over HTTP; over gRPC it is 2 GiB.)
        header_timeout: seconds from a request's first byte (or from accepting, over TLS) to the end of its headers;
            later is answered 408. (nginx client_header_timeout: 60; Apache RequestReadTimeout: 20-40.)
        body_timeout: seconds between two reads of a body; longer is answered 408. (nginx client_body_timeout: 60.)
        idle_timeout: seconds that a connection is kept between two requests. (nginx keepalive_timeout: 75; longer
            than the 60 s of the usual load balancers, so that the proxy, not the server, is the one who closes.)
        write_timeout: seconds in which a client that is being sent an answer takes not one byte; then the request is
            cancelled as *stalled*. (nginx send_timeout: 60.)
        request_timeout_ms: milliseconds (as in the header Inference-Timeout-Ms, which may say less) that a request may
            take from its headers to the last byte of its answer; later it is cancelled, and answered 504; 0 is no
            bound. (Triton has none; nginx proxy_read_timeout: 60 s.)
        linger_timeout: seconds for which a refused upload is read and thrown away, so that its client can read the
            refusal. (nginx lingering_timeout: 5.)
        max_connections: connections open at once; further ones wait in the listen queue. (As with HAProxy's maxconn.)
        max_json_depth: nesting of a JSON body. (Triton: 100.)
        loop_block_ms: milliseconds for which a native model may block the event loop; then the log names it, and the
            metrics count it. 0 looks at nobody. (asyncio's slow_callback_duration, in its debug mode: 100 ms.)
    """

    max_header_size: int = attrs.field(default=16 * _KIB, validator=_positive)
    http_max_input_size: int = attrs.field(default=64 * _MIB, validator=_positive)
    max_body_size: int = attrs.field(default=2 * _GIB, validator=_positive)
    header_timeout: float = attrs.field(default=60.0, validator=_positive)
    body_timeout: float = attrs.field(default=60.0, validator=_positive)
    idle_timeout: float = attrs.field(default=75.0, validator=_positive)
    write_timeout: float = attrs.field(default=60.0, validator=_positive)
    request_timeout_ms: int = attrs.field(default=0, validator=_not_negative)
    linger_timeout: float = attrs.field(default=5.0, validator=_positive)
    max_connections: int = attrs.field(default=16_384, validator=_positive)
    max_json_depth: int = attrs.field(default=100, validator=_positive)
    loop_block_ms: int = attrs.field(default=100, validator=_not_negative)


@attrs.frozen(kw_only=True)
class DisconnectPolicy:
    """What counts as a client that left, and what happens then.

    Attributes:
        on_disconnect: `cancel` stops the inference; `finish` lets it run to its end, and nobody watches the connection
            meanwhile (the answer is then *undelivered*). The default is what Go's net/http and Ray Serve do.
        half_close: `gone` takes a FIN after the request for a departure, as nginx, uvicorn, Go and hypercorn do; `wait`
            goes on and answers, as Triton does (a reset still cancels, on plain sockets on Linux). The kernel can't
            tell the two kinds of FIN apart.
        pipelined: `disarm` stops watching once bytes of a next request have arrived, so that each pipelined request is
            answered; `watch` goes on looking for a hang-up behind those bytes (Linux only).
    """

    on_disconnect: Literal["cancel", "finish"] = attrs.field(
        default="cancel", validator=validators.in_(("cancel", "finish"))
    )
    half_close: Literal["gone", "wait"] = attrs.field(default="gone", validator=validators.in_(("gone", "wait")))
    pipelined: Literal["disarm", "watch"] = attrs.field(default="disarm", validator=validators.in_(("disarm", "watch")))


@attrs.frozen(kw_only=True)
class Keepalive:
    """TCP's own means against a peer that vanished without a FIN (power, cable, NAT); whole seconds.

    Attributes:
        tcp_keepalive_idle: seconds of silence before the first probe. (Go's net/http: 15; Linux alone: 7200.)
        tcp_keepalive_interval: seconds between probes. (Go: 15.)
        tcp_keepalive_count: unanswered probes before the connection is dead. (Linux and Go: 9; 4 here, so that the
            whole takes 75 s.)
        tcp_user_timeout: seconds for which sent bytes may stay unacknowledged. (RFC 5482; gRPC: 20. Linux only.)
    """

    tcp_keepalive_idle: int = attrs.field(default=15, validator=_positive)
    tcp_keepalive_interval: int = attrs.field(default=15, validator=_positive)
    tcp_keepalive_count: int = attrs.field(default=4, validator=_positive)
    tcp_user_timeout: int = attrs.field(default=75, validator=_positive)

    @property
    def worst_case(self) -> int:
        """Seconds after which a silent, vanished peer is noticed at the latest.

        Linux doesn't count probes when there is a user timeout: it gives up at the first probe after it. Others count.
        """
        idle, interval = self.tcp_keepalive_idle, self.tcp_keepalive_interval
        probes = max(self.tcp_keepalive_count, math.ceil((self.tcp_user_timeout - idle) / interval))
        return idle + interval * probes


@attrs.frozen(kw_only=True)
class ControlPolicy:
    """Which models of the repositories are loaded, and when. The names are Triton's, and so are the defaults.

    Attributes:
        model_control_mode: `none` loads all at the start, and that is that; `explicit` loads those of `--load-model`,
            and then what clients ask for; `poll` loads all, and again what has changed.
        load_model: a model to load at the start, in mode explicit; may be given several times; `*` for all.
        repository_poll_secs: seconds between two looks at the repositories, in mode poll.
        model_load_thread_count: models that are loaded at once, at the start and in mode poll.
        model_load_retry_count: how often a model that can't be loaded is tried again.
        exit_on_error: whether a model that can't be loaded ends the start; if not, the others serve without it.
        strict_readiness: whether the server is ready only while each model is that is meant to be loaded.
        unload_timeout_secs: seconds that requests in hand have to finish when their model is unloaded or replaced; then
            they are cancelled. (Ours; Triton waits for ever. As long as `--exit-timeout-secs` is there.)
    """

    model_control_mode: Literal["none", "explicit", "poll"] = attrs.field(
        default="none", validator=validators.in_(("none", "explicit", "poll"))
    )
    load_model: tuple[str, ...] = ()
    repository_poll_secs: float = attrs.field(default=15.0, validator=_positive)
    model_load_thread_count: int = attrs.field(default=4, validator=_positive)
    model_load_retry_count: int = attrs.field(default=0, validator=_not_negative)
    exit_on_error: bool = True
    strict_readiness: bool = True
    unload_timeout_secs: float = attrs.field(default=30.0, validator=_positive)


@attrs.frozen(kw_only=True)
class RateLimit:
    """Whether instances share resources. The names are Triton's, and so are the defaults.

    Attributes:
        rate_limit: `execution_count` lets an instance run only while what it needs (`rate_limiter` in `config.pbtxt`)
            is free; of those that wait, the one that has run the least, times its priority, goes first. `off` lets
            each run.
        rate_limit_resource: NAME:COUNT or NAME:COUNT:DEVICE; how much there is of a resource, on each device or on that
            one; may be given several times. Without it, as much as the neediest instance needs.
    """

    rate_limit: Literal["off", "execution_count"] = attrs.field(
        default="off", validator=validators.in_(("off", "execution_count"))
    )
    rate_limit_resource: tuple[str, ...] = ()
