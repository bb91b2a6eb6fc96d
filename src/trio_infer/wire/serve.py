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
from typing import Final

import trio

from trio_infer.errors import BadJSONError, ErrorCode, InferError
from trio_infer.lifecycle import CancelReason, Life, Phase
from trio_infer.protocol.jsontext import error_json
from trio_infer.wire.connection import Body, Connection
from trio_infer.wire.deadline import DEADLINE_HEADER, Alarm, Deadline, read_deadline
from trio_infer.wire.exchange import JSON, Application, Exchange, WireSettings
from trio_infer.wire.farewell import UNREACHABLE, farewell
from trio_infer.wire.pace import Pace, Waiting
from trio_infer.wire.sentinel import Sentinel
from trio_infer.wire.transport import Departed, open_transport

__all__ = ["JSON", "Application", "Body", "Conversation", "Exchange", "WireSettings", "sole"]

logger: logging.Logger = logging.getLogger("trio_infer.wire")

FAREWELL: Final = 1.0
"""Seconds that a client has to take the answer to a request that was stopped under it."""

LINGER: Final = 0.25
"""Seconds for which a connection lingers when the server is on its way down."""


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
                exchange = self._exchange = Exchange(self.connection, self.sentinel, self.settings, life, request)
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
        retry_after = None
        if isinstance(told, InferError):
            message, status, retry_after = told.message, told.status, told.retry_after
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
            await exchange.fail(status, message, retry_after)
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
