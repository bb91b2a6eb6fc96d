"""One HTTP/1.1 connection: h11 for the grammar, a transport for the bytes, deadlines for the patience.

h11 does no I/O, trio knows no HTTP, and this is the thin place where they meet: events in, events out, in one task.
Some things are more than glue.

*Large bodies go round h11.* h11 is fed copies and hands out copies; a 16 MiB tensor would be copied four times. A body
whose `Content-Length` is 64 KiB or more is therefore received straight into its final buffer by `recv_into` (one copy,
the kernel's). h11 never learns that the body has ended, so the next cycle starts with a fresh `h11.Connection`; nothing
is lost by that, since exactly the body's bytes were taken from the socket. Answers go out the same way: h11 passes a
`Data` event's buffer through untouched.

*Nothing depends on how TCP cuts the bytes.* Where h11 lets it show, it is evened out here: h11 bounds a head only
while it is incomplete, so a head that came in one segment is measured once more; a blank line before a request is
passed over (RFC 9112, section 2.2), wherever it was cut.

*Closing so that the last answer arrives.* Closing a socket with unread bytes sends a reset, and a reset makes the
client's kernel throw away what it had not read yet, our refusal included. `close` then half-closes first and throws
away what still comes, for a while (RFC 9112, section 9.6).

An answer that was cut off in mid-send can't be added to: whatever is sent after it would be taken for its rest. So the
connection remembers that, and sends nothing more.

Not done: keep-alive for HTTP/1.0, since h11 always closes then; requests answered out of order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import h11
import numpy as np
import trio

from trio_infer.errors import InferError
from trio_infer.limits import Limits
from trio_infer.wire.buffers import Buffer
from trio_infer.wire.headers import REASONS, Headers, framing, http_date
from trio_infer.wire.pace import Pace
from trio_infer.wire.sights import Sight
from trio_infer.wire.transport import BeforeWait, Departed, Transport

__all__ = ["Body", "Connection"]

Body: TypeAlias = "bytearray | memoryview"
"""What a request's body is received in; it may be written to."""

STRAIGHT: Final = 64 * 1024
"""A body of so many bytes or more goes round h11; a smaller one mostly comes in the same segment as its head."""

DRAIN: Final = 256 * 1024
"""Of a body that nobody wanted, so much is read and thrown away to keep the connection; with more it is closed."""

MAX_CHUNKS: Final = 65_536
"""Non-empty chunks in a request body (Triton's bound)."""

BREATHER: Final = 64
"""Chunks between two checkpoints: h11 takes 13 us a chunk, and one segment may hold ten thousand."""


class Connection:
    """Reads requests and writes answers, one after the other, in one task.

    Args:
        transport: closed by `close`.
        pace: is told what is being waited for.
        limits: sizes.
    """

    def __init__(self, transport: Transport, pace: Pace, limits: Limits) -> None:
        self.transport = transport
        self.pace = pace
        self._limits = limits
        self._h11 = self._fresh()
        self._request: h11.Request | None = None
        self.content_length: int | None = 0
        """Bytes of the body in hand, 0 if it has none; None if it comes in chunks and nobody knows."""
        self._body_read = False
        self._chunks = 0
        self._went_round = False
        self._cut = False
        """Whether a part of an answer may have been sent, and its rest will not be."""
        self._overtaken = b""
        """Bytes of a next request that came with a body that went round h11."""
        self.patience: float = limits.linger_timeout
        """Seconds for which `close` lingers."""
        self.last: bool = False
        """Whether the answer in hand is the last on this connection."""

    def _fresh(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.max_header_size)

    # -- Reading a request ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Shake hands, where the transport has such a custom.

        Raises:
            Departed: the client didn't, or not in a way that we speak.
        """
        await self.transport.open(self.pace.head)
        self.pace.rest()

    async def wait_for_request(self) -> bool:
        """Sleep until the first byte of a request is here.

        Returns:
            False if the client closed instead, which between requests is not a departure.
        """
        if not self.transport.waited:
            await trio.lowlevel.checkpoint()  # a client that pipelines must not keep the others waiting
        self.transport.waited = False
        while not self._has_begun():
            try:
                data = await self.transport.receive(self.pace.idle)
            except Departed:
                return False
            if not data:
                return False
            await self.pace.heed()
            self._h11.receive_data(data)
        return True

    def _has_begun(self) -> bool:
        """Whether more is here than blank lines, which old clients send behind a body; they are dropped."""
        data = self._h11.trailing_data[0]
        if data.startswith((b"\r", b"\n")):
            data = data.lstrip(b"\r\n")
            self._h11 = self._fresh()
            if data:
                self._h11.receive_data(data)
        return bool(data)

    @property
    def pipelined(self) -> bool:
        """Whether bytes behind the request in hand have been received already."""
        return bool(self._overtaken if self._went_round else self._h11.trailing_data[0])

    async def read_head(self) -> h11.Request:
        """The next request's method, target and headers.

        Raises:
            Departed: the client left in the middle of it.
            InferError: it is not HTTP (400), or too large (431).
        """
        while True:
            held = len(self._h11.trailing_data[0])
            event = self._next_event()
            if isinstance(event, h11.Request):
                self.pace.rest()
                self._request = event
                self.content_length, ambiguous = framing(event.headers)
                self.last |= ambiguous  # a proxy on the way may have thought otherwise (RFC 9112, section 6.1)
                if held - len(self._h11.trailing_data[0]) > self._limits.max_header_size:
                    self.last = True
                    raise self._head_too_long()
                return event
            if event is not h11.NEED_DATA:
                raise Departed
            await self._receive(self.pace.head)

    async def read_body(self, limit: int, too_large: InferError) -> Body:
        """The whole body of the request in hand; sends `100 Continue` first if the client waits for that.

        Args:
            limit: bytes.
            too_large: raised when there are more; as early as they are announced.

        Raises:
            Departed: the client left in the middle of it.
            InferError: `too_large`, or the chunks are not HTTP.

        Cancellation: what was received is lost, and the connection is of no further use.
        """
        length = self.content_length
        if length is not None and length > limit:
            raise too_large
        if self._h11.they_are_waiting_for_100_continue:
            await self._send_event(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
        if length is not None and length >= STRAIGHT:
            body: Body = await self._read_round(length)
        else:
            body = bytearray()
            while (data := await self._read_some()) is not None:
                if len(body) + len(data) > limit:
                    raise too_large
                body += data
        self._body_read = True
        self.pace.rest()
        return body

    async def _read_round(self, length: int) -> memoryview:
        # Not zeroed, which would cost a tenth of receiving it; so pages are taken as bytes arrive, not when announced.
        view = np.empty(length, np.uint8).data
        early = self._h11.trailing_data[0]
        self._went_round, self._overtaken = True, early[length:]
        got = min(len(early), length)
        view[:got] = early[:got]
        while got < length:
            size = await self.transport.receive_into(view[got:], self.pace.body)
            if not size:
                raise Departed
            await self.pace.heed()
            got += size
        return view

    async def _read_some(self) -> Buffer | None:
        """A piece of the body in hand, as h11 gives it; None at its end."""
        while self._h11.their_state is h11.SEND_BODY:
            event = self._next_event()
            if isinstance(event, h11.Data):
                self._chunks += event.chunk_end  # h11 misses a start that comes at the end of a segment
                if self._chunks > MAX_CHUNKS:
                    raise InferError(
                        f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. "
                        "Send fewer or larger HTTP chunks."
                    )
                if event.chunk_end and self._chunks % BREATHER == 0:
                    await trio.lowlevel.checkpoint()
                return event.data
            if event is h11.NEED_DATA:
                await self._receive(self.pace.body)
            elif not isinstance(event, h11.EndOfMessage):
                raise Departed
        return None

    async def _receive(self, before_wait: BeforeWait) -> None:
        data = await self.transport.receive(before_wait)
        if not data:
            raise Departed
        await self.pace.heed()
        self._h11.receive_data(data)

    def _next_event(self) -> object:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                raise self._head_too_long() from None
            what = str(error).partition(": bytearray(")[0]  # h11 quotes the line, as Python writes it
            raise InferError(f"malformed HTTP request: {what}", status=error.error_status_hint) from None

    def _head_too_long(self) -> InferError:
        size = self._limits.max_header_size
        return InferError(f"the request's line and headers are longer than {size} bytes", status=431)

    # -- Writing an answer ------------------------------------------------------------------------------------------

    async def respond(self, status: int, headers: Headers, buffers: Sequence[Buffer]) -> None:
        """Send a complete answer: one segment if it is small."""
        body = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        length = sum(len(view) for view in body)
        out = list(self._start(status, [*headers, ("content-length", str(length))]))
        for view in [] if self._is_head else body:
            out += self._h11.send_with_data_passthrough(h11.Data(data=view)) or ()  # type: ignore[arg-type]  # anything with a length passes through
        out += self._h11.send_with_data_passthrough(h11.EndOfMessage()) or ()
        await self._send(out)

    async def start_stream(self, status: int, headers: Headers) -> None:
        """Send the head of an answer of unknown length: in chunks, or for HTTP/1.0 until the connection closes."""
        await self._send(self._start(status, headers))

    async def send_part(self, data: Buffer) -> None:
        """Send a part of a streamed answer, one chunk, now."""
        if not self._is_head:
            await self._send_event(h11.Data(data=data))  # type: ignore[arg-type]  # as above

    async def end_stream(self) -> None:
        await self._send_event(h11.EndOfMessage())

    @property
    def _is_head(self) -> bool:
        return self._request is not None and self._request.method == b"HEAD"

    def _start(self, status: int, headers: Headers) -> Sequence[Buffer]:
        if self.last or not self._reusable():
            self.last = True
            headers = [*headers, ("connection", "close")]
        headers = [*headers, ("date", http_date())]
        response = h11.Response(status_code=status, headers=headers, reason=REASONS.get(status, b""))
        return self._h11.send_with_data_passthrough(response) or []

    def _reusable(self) -> bool:
        """Whether the request in hand leaves the connection at a place from which another can be read."""
        if self.all_read:
            return True
        if self._request is None or self._went_round or self._h11.they_are_waiting_for_100_continue:
            return False
        length = self.content_length if self._h11.their_state is h11.SEND_BODY else None
        return length is not None and length <= DRAIN

    @property
    def all_read(self) -> bool:
        """Whether the request in hand has been received to its end."""
        if self._request is None or self._h11.their_state is h11.ERROR:
            return False
        return self._body_read or self.content_length == 0 or self._h11.their_state is not h11.SEND_BODY

    async def _send_event(self, event: h11.Event) -> None:
        await self._send(self._h11.send_with_data_passthrough(event) or [])

    async def _send(self, buffers: Sequence[Buffer]) -> None:
        if not buffers:
            return
        if self._cut:
            raise Departed
        self._cut = True
        await self.transport.send(buffers, self.pace.reader)
        await self.pace.heed()
        self._cut = False
        self.pace.rest()

    # -- Going on, or closing ---------------------------------------------------------------------------------------

    async def next_cycle(self) -> bool:
        """Make ready for another request.

        Returns:
            False if the connection must be closed instead.

        Raises:
            Departed: the client left while a body that nobody wanted was thrown away.
        """
        if self.last or self._h11.our_state is not h11.DONE:
            return False
        if self._went_round:
            self._h11 = self._fresh()
            if self._overtaken:
                self._h11.receive_data(self._overtaken)
        else:
            try:
                while await self._read_some() is not None:
                    pass
            except InferError:
                return False
            self.pace.rest()
            if self._h11.their_state is not h11.DONE:
                return False
            self._h11.start_next_cycle()
        self._request, self.content_length = None, 0
        self._went_round = self._body_read = False
        self._overtaken, self._chunks = b"", 0
        return True

    async def close(self) -> None:
        """Close, lingering if the client may still be sending.

        Cancellation: closes at once.
        """
        try:
            answered = self._h11.our_state in (h11.DONE, h11.MUST_CLOSE) and not self._cut
            if answered and (not self.all_read or self.pipelined or self.transport.look() is Sight.DATA):
                with trio.move_on_after(self.patience):
                    await self.transport.send_eof()
                    while await self.transport.receive(lambda: None):
                        pass
        except Departed:
            pass
        finally:
            await self.transport.aclose()
