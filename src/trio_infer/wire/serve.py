"""One connection from accept to close: a nursery with two tasks, and the loop that answers requests.

The *inference task* is the nursery's own body: it reads a request, hands it to the application, sees to the end of its
life, and goes on to the next. The *sentinel* (`sentinel.py`) is the nursery's child. Nothing that a connection starts
can outlive the nursery.

A request runs in one cancel scope, the inference scope, from its first byte to its last. Whoever wants it stopped calls
`life.cancel(reason)`; that cancels the scope. What happens then depends on the reason alone: to a client that has gone
nothing more is written; a client that is still there (a deadline, a shutdown) gets an answer that says why, and if its
answer is a stream already, a last event and a proper end. Where HTTP allows it the connection then lives on.

A deadline is kept by a third task, the alarm (`deadline.py`), on connections that have had a request with one.

Errors become answers here, in `_answer_error`, and nowhere else. `InferError` is the request's fault or the model's
considered word, and is answered as it says. Any other exception is a bug: logged once with its traceback, answered 500.
None crosses the nursery, so no user ever sees an exception group of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias, TypeVarTuple

import attrs
import h11
import trio

from trio_infer.errors import BadJSONError, ErrorCode, InferError
from trio_infer.lifecycle import CancelReason, Life, LifeWatcher, Phase
from trio_infer.limits import DisconnectPolicy, Limits
from trio_infer.protocol.jsontext import error_json
from trio_infer.wire.buffers import Buffer
from trio_infer.wire.connection import Body, Connection
from trio_infer.wire.deadline import DEADLINE_HEADER, Alarm, Deadline, read_deadline
from trio_infer.wire.farewell import UNREACHABLE, farewell
from trio_infer.wire.headers import Headers
from trio_infer.wire.pace import Pace, Waiting
from trio_infer.wire.sentinel import Sentinel
from trio_infer.wire.sights import Sight
from trio_infer.wire.transport import Departed, open_transport

__all__ = ["Application", "Body", "Conversation", "Exchange", "WireSettings", "sole"]

_Args = TypeVarTuple("_Args")

logger: logging.Logger = logging.getLogger("trio_infer.wire")

FAREWELL: Final = 1.0
"""Seconds that a client has to take the answer to a request that was stopped under it."""

LINGER: Final = 0.25
"""Seconds for which a connection lingers when the server is on its way down."""

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

    def __init__(self, conversation: Conversation, life: Life, request: h11.Request) -> None:
        self._conversation = conversation
        self._connection = conversation.connection
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
        if (on_disconnect or self._conversation.settings.policy.on_disconnect) == "finish":
            self._finishes = True
            return nullcontext()
        return self._conversation.sentinel.guard(self.life, pipelined=self._connection.pipelined)

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

    async def fail(self, status: int, message: str) -> None:
        """Tell the client of an error, in whatever way it can still be told."""
        if not self.streaming:
            headers = [JSON, ("accept-encoding", "gzip, deflate")] if status == 501 else [JSON]
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
        return sight is Sight.RESET or (sight is Sight.EOF and self._conversation.settings.policy.half_close == "gone")


Application: TypeAlias = Callable[[Exchange], Awaitable[None]]
"""Answers one request, by the exchange's methods; or raises, and the error is answered."""


class Conversation:
    """One connection's requests and answers.

    Args:
        stream: closed when the conversation is over.
        application: answers each request.
        settings: shared by the server's connections.
    """

    def __init__(self, stream: trio.abc.Stream, application: Application, settings: WireSettings) -> None:
        self._application = application
        self.settings = settings
        self._scope = trio.CancelScope()
        transport = open_transport(stream)
        self.sentinel: Sentinel = Sentinel(transport, settings.policy)
        self.connection: Connection = Connection(transport, Pace(self._scope, settings.limits), settings.limits)
        self.life: Life | None = None
        """Of the request in hand."""
        self._exchange: Exchange | None = None
        self._nursery: trio.Nursery | None = None
        self._deadline: Deadline | None = None
        self._alarm = Alarm()

    async def run(self) -> None:
        """Answer requests until either side closes. Raises only what the application raises beyond `Exception`.

        Cancellation: the request in hand ends as cancelled by shutdown; the connection is closed at once.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                nursery = self._nursery
                nursery.start_soon(self.sentinel.run)
                try:
                    with self._scope:
                        await self._converse()
                    if self._scope.cancelled_caught:
                        await self._out_of_patience()
                except Departed:
                    self.abort(CancelReason.DISCONNECTED)
                finally:
                    self._finish_life()
                    if self._alarm.running or not self.sentinel.saw_departure:
                        # The sentinel ends by itself after a departure, which costs half as much.
                        nursery.cancel_scope.cancel()
        finally:  # the sentinel has ended: closing may read
            await self.connection.close()

    # -- Shutdown ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is in hand: its headers have come, its answer has not been given."""
        return self._exchange is not None

    def drain(self) -> None:
        """Close now if no request is in hand (one in half of its headers is cancelled), else after its answer."""
        self.connection.last = True
        self.connection.patience = min(self.connection.patience, LINGER)
        if not self.busy:
            self.abort(CancelReason.SHUTDOWN)
            self._scope.cancel(reason=CancelReason.SHUTDOWN.value)

    def abort(self, reason: CancelReason) -> None:
        """Stop the request in hand; its client is told why, if it is still there."""
        if self.life is not None:
            self.life.cancel(reason)

    # -- The loop ---------------------------------------------------------------------------------------------------

    async def _converse(self) -> None:
        await self.connection.open()
        while await self.connection.wait_for_request():
            await self._answer_one()
            await self.sentinel.aside()
            if not await self.connection.next_cycle():
                return

    async def _answer_one(self) -> None:
        life = self.life = Life(self.settings.watchers)
        with trio.CancelScope() as scope:
            life.canceller = lambda reason: scope.cancel(reason=reason.value)
            try:
                request = await self.connection.read_head()
                exchange = self._exchange = Exchange(self, life, request)
                life.label = f"{exchange.method} {exchange.target}"
                self._set_alarm(life, exchange)
                await self._application(exchange)
                if life.outcome is None:
                    raise RuntimeError("the application returned without an answer")
            except Departed:
                life.cancel(CancelReason.DISCONNECTED)
            except Exception as error:
                await self._answer_error(error)
            except BaseExceptionGroup as group:  # from a model's nursery
                stopped, rest = group.split(trio.Cancelled)
                if stopped is None or not isinstance(rest, ExceptionGroup):
                    raise
                _log_bug(life, rest)
                raise stopped from None
        if life.reason is not None and life.reason not in UNREACHABLE:
            await self._say_farewell(life)
        self._finish_life()

    def _set_alarm(self, life: Life, exchange: Exchange) -> None:
        """Have the request cancelled when its time is over, if it has a deadline."""
        self._deadline = None
        self._deadline = read_deadline(exchange.header(DEADLINE_HEADER), self.settings.limits.request_timeout_ms)
        if self._deadline is None:
            return
        self._alarm.set(life, trio.current_time() + self._deadline.milliseconds / 1000)
        if not self._alarm.running:
            assert self._nursery is not None
            self._nursery.start_soon(self._alarm.run)
            self._alarm.running = True

    async def _answer_error(self, error: Exception) -> None:
        """The one place where an error becomes an answer."""
        life, exchange = self.life, self._exchange
        assert life is not None
        told = _first(error)
        if isinstance(told, InferError):
            message, status = told.message, told.status
            if isinstance(told, BadJSONError):
                status = self.settings.bad_json_status
            elif told.code is ErrorCode.INTERNAL and not life.cancelled:
                if told.__cause__ is not None:
                    _log_bug(life, told.__cause__)
                else:
                    logger.error("%s failed: %s", life.label, message)
        else:
            message, status = f"{type(told).__name__}: {told}", 500
            _log_bug(life, error)
        if life.cancelled:
            pass  # nobody to tell, or it will be told that instead
        elif life.outcome is not None:
            self.connection.last = True  # it was told
        elif exchange is not None:
            await exchange.fail(status, message)
        else:
            life.advance(Phase.SENDING)
            life.status = status
            await self.connection.respond(status, [JSON], [error_json(message)])
            life.end()

    async def _say_farewell(self, life: Life) -> None:
        """The request was stopped under a client that is still there."""
        exchange, connection = self._exchange, self.connection
        if exchange is None or life.outcome is not None or life.phase is Phase.SENDING:
            connection.last = True  # too late: the answer was cut off, or there is no request yet
            return
        if life.reason is CancelReason.SHUTDOWN or not connection.all_read:
            connection.last = True
        with trio.move_on_after(FAREWELL) as patience:
            await exchange.fail(*farewell(life, self._deadline))
        if patience.cancelled_caught:
            connection.last = True

    async def _out_of_patience(self) -> None:
        """A limit expired: say so if a request was being received, and be done."""
        life, waiting = self.life, self.connection.pace.waiting
        self.connection.last = True
        if life is None or life.outcome is not None:
            return
        if waiting is Waiting.READER:
            life.cancel(CancelReason.STALLED)
        elif waiting in (Waiting.HEAD, Waiting.BODY) and life.phase is Phase.RECEIVING and not life.cancelled:
            with trio.move_on_after(FAREWELL):
                await self._answer_error(InferError(f"timed out while waiting for {waiting.value}", status=408))

    def _finish_life(self) -> None:
        """Whatever has not come to its end by now has been stopped: see to it that this shows."""
        life, self.life, self._exchange = self.life, None, None
        self._alarm.off()
        if life is None:
            return
        if life.outcome is None:
            life.cancel(CancelReason.SHUTDOWN)
            life.end()
        if life.reason in UNREACHABLE:
            self.connection.last = True


def sole(error: BaseException) -> BaseException:
    """What is inside groups of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _first(error: BaseException) -> BaseException:
    """Of several errors at once, the one that the client is told; the log has all."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _log_bug(life: Life, error: BaseException) -> None:
    logger.error("%s failed", life.label or "a request", exc_info=sole(error))
