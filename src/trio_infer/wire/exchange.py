"""One request and the means to answer it: what an application is given, whatever dialect it speaks.

An answer is begun only while its request is wanted, and each step of it moves the request's life on. What the client is
sent and what the books say can't differ, since both happen here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias, TypeVarTuple

import attrs
import h11
import trio

from trio_infer.errors import InferError
from trio_infer.lifecycle import CancelReason, Life, LifeWatcher, Phase
from trio_infer.limits import DisconnectPolicy, Limits
from trio_infer.protocol.jsontext import error_json
from trio_infer.wire.buffers import Buffer
from trio_infer.wire.connection import Body, Connection
from trio_infer.wire.headers import Headers
from trio_infer.wire.sentinel import Sentinel
from trio_infer.wire.sights import Sight
from trio_infer.wire.transport import Departed

__all__ = ["JSON", "Application", "Exchange", "WireSettings"]

_Args = TypeVarTuple("_Args")

JSON: Final = ("content-type", "application/json")


@attrs.frozen(kw_only=True)
class WireSettings:
    """What all connections of a server share.

    Attributes:
        limits, policy: see there.
        watchers: are told of every request's life.
        bad_json_status: what a `BadJSONError` is answered with.
    """

    limits: Limits = attrs.field(factory=Limits)
    policy: DisconnectPolicy = attrs.field(factory=DisconnectPolicy)
    watchers: Sequence[LifeWatcher] = ()
    bad_json_status: int = 500


class Exchange:
    """One request, and the means to answer it: what an application is given.

    Attributes:
        life: the request's.
        method, target: as they came; the target still percent-encoded, with its query.
    """

    def __init__(
        self, connection: Connection, sentinel: Sentinel, settings: WireSettings, life: Life, request: h11.Request
    ) -> None:
        self._connection = connection
        self._sentinel = sentinel
        self._policy = settings.policy
        self._headers = request.headers
        self.life = life
        self.method: str = request.method.decode("ascii")
        self.target: str = request.target.decode("ascii")
        self.streaming: bool = False
        self._finishes = False
        self._undelivered = False
        self._last_words: Callable[[str], bytes] | None = None

    def header(self, name: bytes) -> str | None:
        """The value of a header, `name` in lower case; None if the request has none."""
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")
        return None

    def headers(self) -> list[tuple[str, str]]:
        """All headers: their names as the client wrote them, and their values."""
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers.raw_items()]

    @property
    def content_length(self) -> int | None:
        """Bytes of the body, 0 if there is none; None if that is not known beforehand."""
        return self._connection.content_length

    async def body(self, limit: int, too_large: InferError) -> Body:
        """The whole body, at most `limit` bytes; see `Connection.read_body`."""
        return await self._connection.read_body(limit, too_large)

    def guard(self, on_disconnect: str | None = None) -> AbstractContextManager[None]:
        """`with exchange.guard(): ...` cancels the request if the client leaves meanwhile.

        The body must have been read.

        Args:
            on_disconnect: the model's own policy, "cancel" or "finish"; None for the server's.
        """
        if (on_disconnect or self._policy.on_disconnect) == "finish":
            self._finishes = True
            return nullcontext()
        return self._sentinel.guard(self.life, pipelined=self._connection.pipelined)

    async def respond(
        self, status: int, headers: Headers, buffers: Sequence[Buffer] = (), *, failed: bool = False
    ) -> None:
        """Send the answer, whole, and end the request's life.

        Args:
            failed: it tells of an error, whatever its status says.
        """
        await self._stop_if_cancelled()
        self.life.advance(Phase.SENDING)
        self.life.status = status
        await self._deliver(self._connection.respond, status, headers, buffers)
        self.life.end(failed=failed, undelivered=self._undelivered)

    async def start_stream(self, status: int, headers: Headers, last_words: Callable[[str], bytes]) -> None:
        """Send the head of an answer that comes in parts.

        Args:
            last_words: makes the part that says an error's message, should the stream have to end with one.
        """
        await self._stop_if_cancelled()
        self.life.advance(Phase.STREAMING)
        self.life.status = status
        self.streaming, self._last_words = True, last_words
        await self._deliver(self._connection.start_stream, status, headers)

    async def send_part(self, data: bytes) -> None:
        """Send a part of the stream, now; returns when the kernel has it, which is the stream's backpressure."""
        await self._deliver(self._connection.send_part, data)

    async def end_stream(self, *, failed: bool = False) -> None:
        """Send the end of the stream, and end the request's life.

        Args:
            failed: the stream told of an error.
        """
        await self._deliver(self._connection.end_stream)
        self.life.end(failed=failed, undelivered=self._undelivered)

    async def fail(self, status: int, message: str, retry_after: int | None = None) -> None:
        """Tell the client of an error, in whatever way it can still be told.

        Args:
            retry_after: seconds after which it may try again; None if nothing is known of that.
        """
        if not self.streaming:
            headers = [JSON, ("accept-encoding", "gzip, deflate")] if status == 501 else [JSON]
            if retry_after is not None:
                headers.append(("retry-after", str(retry_after)))
            await self.respond(status, headers, [error_json(message)], failed=True)
        elif self._last_words is not None:
            last_words, self._last_words = self._last_words, None
            await self.send_part(last_words(message))
            await self.end_stream(failed=True)

    async def _stop_if_cancelled(self) -> None:
        if self.life.cancelled:  # nothing more is written, except outside the life's scope: as a farewell
            await trio.lowlevel.checkpoint()

    async def _deliver(self, send: Callable[[*_Args], Awaitable[None]], *args: *_Args) -> None:
        """Send, unless nobody is there: then leave, or if the work is to be finished all the same, go on without."""
        await self._stop_if_cancelled()
        if self._finishes and not self._undelivered:
            self._undelivered = self._client_has_gone()
        if self._undelivered:
            self._connection.last = True
            return
        try:
            await send(*args)
        except Departed:
            if not self._finishes:
                raise
            self._undelivered = self._connection.last = True
        except trio.Cancelled:
            if self._connection.pace.stalled:
                self.life.cancel(CancelReason.STALLED)
            raise

    def _client_has_gone(self) -> bool:
        """Nobody has watched, and the first write after a FIN would seem to succeed: so look once."""
        sight = self._connection.transport.look()
        return sight is Sight.RESET or (sight is Sight.EOF and self._policy.half_close == "gone")


Application: TypeAlias = Callable[[Exchange], Awaitable[None]]
"""Answers one request, by the exchange's methods; or raises, and the error is answered."""
