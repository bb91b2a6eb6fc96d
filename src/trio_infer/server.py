"""The server: loads models, listens, and goes down in the right order.

`Server.serve` is one call inside anyone's trio program. It returns when a drain is over, and until then everything that
it started lives in its own nursery: cancel the scope around it and nothing is left, no task, no thread that could be
stopped, no descriptor, and no peer that still waits.

Going down, in this order: not ready; listen no more; close connections that have no request in hand; let the others
finish, within `exit_timeout`; stop what is left, and tell its clients; unload the models, after the last request. If
the scope is cancelled instead, the same happens without the waiting.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trio_infer.api.fronts import Front
from trio_infer.api.header_patterns import HeaderPattern
from trio_infer.api.regions import RegionRegistry
from trio_infer.api.restrictions import Restrictions
from trio_infer.api.v2 import V2
from trio_infer.errors import ModelLoadError, SetupError
from trio_infer.lifecycle import CancelReason, Life, LifeWatcher
from trio_infer.limits import ControlPolicy, DisconnectPolicy, Keepalive, Limits, RateLimit
from trio_infer.models.blocking import BlockedLoop
from trio_infer.models.native import Model
from trio_infer.models.native_loading import native_runner
from trio_infer.models.runner import Runner
from trio_infer.observe.access_log import AccessLog
from trio_infer.observe.log_settings import LogSettings
from trio_infer.observe.metrics_policy import MetricsPolicy
from trio_infer.observe.observatory import Observatory
from trio_infer.observe.statistics import RequestStatistics
from trio_infer.observe.trace_settings import TraceSettings
from trio_infer.scheduling.catalog import Catalog
from trio_infer.scheduling.control import ModelControl
from trio_infer.scheduling.hosting import ModelHost
from trio_infer.scheduling.resources import Resources
from trio_infer.scheduling.response_cache import CacheStatistics, ResponseCache
from trio_infer.scheduling.sources import ModelSource
from trio_infer.scheduling.ticket import QueueStatistics
from trio_infer.wire.listeners import ListenError, accept_forever, open_listeners, set_keepalive
from trio_infer.wire.serve import Application, Conversation, WireSettings, sole
from trio_infer.wire.transport import HAS_EPOLL

if TYPE_CHECKING:
    from trio_infer.observe.metrics import Collector

__all__ = ["Address", "Front", "ListenError", "Server", "ServerStatistics"]

logger: logging.Logger = logging.getLogger("trio_infer")

LAST_WORDS: Final = 1.5
"""Seconds for clients to take the answers to requests that were stopped; a little more than each of them has."""

IN_FLIGHT: Final = "Timeout %g: Found %d model versions that have in-flight inferences"
"""Triton's words, for those who look for them in logs; first the seconds that are left."""


_INET: Final = (trio.socket.AF_INET, trio.socket.AF_INET6)


@attrs.frozen
class Address:
    """Where the server listens.

    Args:
        host: a numeric address.
        port: the real one, also if 0 was asked for.
        scheme: "http" or "https".
        kind: "http" for the main port, else the kind of its front, such as "metrics".
    """

    host: str
    port: int
    scheme: str = "http"
    kind: str = "http"

    @property
    def url(self) -> str:
        """As a client would write it, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@attrs.frozen
class _Door:
    """An open front.

    Attributes:
        front: what it is.
        listeners: closed by whoever closes the door.
        places: how many more connections may come in.
    """

    front: Front
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]]
    places: trio.Semaphore

    async def close(self) -> None:
        for listener in self.listeners:
            await listener.aclose()

    def addresses(self) -> Iterator[Address]:
        """Of those listeners that a URL can name."""
        scheme = "https" if self.front.ssl_context else "http"
        for listener in self.listeners:
            if isinstance(listener, trio.SocketListener) and listener.socket.family in _INET:
                host, port = listener.socket.getsockname()[:2]
                yield Address(host, port, scheme, self.front.kind)


@attrs.frozen
class ServerStatistics:
    """How the server stands, now.

    Attributes:
        requests: counters of requests; they always add up.
        connections: open ones.
        models: the queue of each model, by name and version.
        cache: the response cache; None if there is none.
    """

    requests: RequestStatistics
    connections: int
    models: Mapping[tuple[str, str], QueueStatistics]
    cache: CacheStatistics | None = None


class Server:
    """An inference server, for use inside a trio program.

    Args:
        models: objects of your `Model` subclasses, or runners.
        name: of the server, in its metadata.
        limits: bounds on what clients may take.
        disconnect: what counts as a client that left, and what happens then.
        keepalive: how TCP notices peers that vanished.
        ssl_context: serves TLS (https) if given.
        exit_timeout: seconds that requests have to finish in a drain.
        access_log: log every request; cancelled ones are logged anyway.
        watchers: told of each move of each request's life, for metrics or traces of your own.
        bad_json_status: what unreadable JSON is answered with: 500 as Triton does, or 400.
        fronts: further ports, which speak other dialects to the same models.
        metrics: what `/metrics` has; None, the default, for no metrics.
        restricted_apis: `CATEGORY[,CATEGORY...]:HEADER=VALUE`, any number of them; such endpoints ask for the header.
        header_forward_pattern: request headers whose names match this regular expression become parameters of infer
            requests; "" for none.
        traces: what `/v2/trace/setting` says and changes.
        logs: what `/v2/logging` says and changes; None, the default, if logging is the program's own affair.
        allow_client_shm: clients may register shared memory of this machine, and pass tensors through it.
        repository: where further models are loaded from.
        control: which of those, and when.
        response_cache: bytes for answers of models that ask to be cached; 0, the default, for no cache.
        rate_limit: whether an instance waits for the resources that its configuration says it needs, and how much of
            them there is.

    Raises:
        ModelLoadError: two models have one name and version, or one can't be a model.
        SetupError: the platform can't do what the policy asks for, or a rule or a pattern can't be read.
    """

    def __init__(
        self,
        models: Iterable[Model | Runner] = (),
        *,
        name: str = "trio-infer",
        limits: Limits | None = None,
        disconnect: DisconnectPolicy | None = None,
        keepalive: Keepalive | None = None,
        ssl_context: ssl.SSLContext | None = None,
        exit_timeout: float = 30.0,
        access_log: bool = False,
        watchers: Sequence[LifeWatcher] = (),
        bad_json_status: int = 500,
        fronts: Iterable[Front] = (),
        metrics: MetricsPolicy | None = None,
        restricted_apis: Iterable[str] = (),
        header_forward_pattern: str = "",
        traces: TraceSettings | None = None,
        logs: LogSettings | None = None,
        allow_client_shm: bool = False,
        repository: ModelSource | None = None,
        control: ControlPolicy | None = None,
        response_cache: int = 0,
        rate_limit: RateLimit | None = None,
    ) -> None:
        limits = limits or Limits()
        disconnect = disconnect or DisconnectPolicy()
        if disconnect.pipelined == "watch" and not HAS_EPOLL:
            raise SetupError('pipelined="watch" needs Linux (epoll); use "disarm"')
        self._watchdog = BlockedLoop(limits.loop_block_ms / 1000) if limits.loop_block_ms else None
        self._catalog = Catalog()
        self._conversations: set[Conversation] = set()
        self._observatory = Observatory(
            metrics,
            live=lambda: [model.live() for model in self._control.live],
            blocked=lambda: () if self._watchdog is None else self._watchdog.counted(),
            connections=lambda: len(self._conversations),
            traces=traces,
            logs=logs,
        )
        self._cache = ResponseCache(response_cache) if response_cache > 0 else None
        self._control = ModelControl(
            self._catalog,
            repository,
            control,
            given=_by_name(_runner(model) for model in models),
            host=lambda name: ModelHost(name, self._catalog, self._control, self._observatory.custom),
            watcher=self._observatory,
            cache=self._cache,
            resources=_resources(rate_limit or RateLimit()),
        )
        self._settings = WireSettings(
            limits=limits,
            policy=disconnect,
            watchers=(*self._observatory.watchers, AccessLog(everything=access_log), *watchers),
            bad_json_status=bad_json_status,
        )
        self._keepalive = keepalive or Keepalive()
        self._ssl_context = ssl_context
        self._exit_timeout = exit_timeout
        self._fronts = tuple(fronts)
        self._nobody = trio.lowlevel.ParkingLot()
        self._begun = False
        self._drain = trio.Event()
        self._application = V2(
            catalog=self._catalog,
            control=self._control,
            limits=limits,
            name=name,
            draining=self._drain.is_set,
            lives=self._lives,
            observatory=self._observatory,
            restrictions=Restrictions.parse(restricted_apis),
            forwarded=HeaderPattern(header_forward_pattern) if header_forward_pattern else None,
            regions=RegionRegistry() if allow_client_shm else None,
        )

    def statistics(self) -> ServerStatistics:
        """How the server stands, now."""
        return ServerStatistics(
            self._observatory.requests.statistics(),
            len(self._conversations),
            {(model.signature.name, model.signature.version): model.statistics() for model in self._control.live},
            None if self._cache is None else self._cache.statistics(),
        )

    @property
    def collector(self) -> Collector | None:
        """Gives all metrics, to be registered in a `prometheus_client` registry of yours; None without metrics."""
        return self._observatory.collector

    def drain(self) -> None:
        """Go down in order: `serve` returns when the last request has been answered, or `exit_timeout` is over."""
        self._drain.set()

    async def serve(
        self,
        host: str | None = "127.0.0.1",
        port: int = 8000,
        *,
        reuse_port: bool = False,
        listeners: Sequence[trio.abc.Listener[trio.abc.Stream]] | None = None,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen, load the models, and answer requests until `drain` is called. A server serves once.

        The ports are taken first, so that one in use is known at once; connections made while models load wait for
        them.

        Args:
            host: a name or address to listen on; None for all.
            port: 0 for a free one.
            reuse_port: share the port with other processes (SO_REUSEPORT).
            listeners: accept from these instead (Unix sockets, inherited ones, memory streams); closed at the end. An
                empty sequence leaves only the fronts.
            task_status: `await nursery.start(server.serve, ...)` gives the addresses, when requests are answered: of
                this port first, then of the fronts.

        Raises:
            ListenError: an address can't be listened on; an OSError that names the front.
            ModelLoadError: a model could not be loaded.
            RuntimeError: it has served before.

        Cancellation: stops at once: requests in hand are cancelled, connections and listeners closed, models unloaded.
        The models' clean-up has a time limit (5 s) and is otherwise shielded.
        """
        if self._begun:
            raise RuntimeError("a Server serves once; make another")
        self._begun = True
        main = Front(
            "http",
            lambda v2: v2,
            host=host,
            port=port,
            ssl_context=self._ssl_context,
            reuse_port=reuse_port,
            listeners=listeners,
        )
        try:
            async with nullcontext() if self._watchdog is None else self._watchdog.watching():
                await self._serve([main, *self._fronts], task_status)
        except BaseExceptionGroup as group:
            matter = _matter(group)
            raise matter from matter.__cause__

    async def _serve(self, fronts: Sequence[Front], task_status: trio.TaskStatus[Sequence[Address]]) -> None:
        doors: list[_Door] = []
        try:
            for front in fronts:
                doors.append(await self._open(front))  # noqa: PERF401 - of those that are open some must be closed
            async with trio.open_nursery() as nursery:
                await nursery.start(self._control.run)
                async with trio.open_nursery() as connections:
                    async with trio.open_nursery() as accepting:
                        for door in doors:
                            handle = partial(self._handle, door, door.front.application(self._application))
                            for listener in door.listeners:
                                accepting.start_soon(accept_forever, listener, handle, connections, door.places)
                        task_status.started([address for door in doors for address in door.addresses()])
                        await self._drain.wait()
                        accepting.cancel_scope.cancel()
                    await _close(doors)
                    await self._drain_connections()
                    connections.cancel_scope.cancel()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):  # each step below has its own time limit
                await _close(doors)
                for front in fronts[len(doors) :]:
                    for listener in front.listeners or ():
                        await listener.aclose()
                await self._control.close()
                self._observatory.close()

    async def _open(self, front: Front) -> _Door:
        listeners: Sequence[trio.abc.Listener[trio.abc.Stream]] | None = front.listeners
        if listeners is None:
            try:
                listeners = await open_listeners(front.host, front.port, reuse_port=front.reuse_port)
            except OSError as error:
                raise ListenError.of(error, front.kind, front.host, front.port) from None
        return _Door(front, tuple(listeners), trio.Semaphore(self._settings.limits.max_connections))

    # -- Connections ------------------------------------------------------------------------------------------------

    async def _handle(self, door: _Door, application: Application, stream: trio.abc.Stream) -> None:
        """One connection. Nothing that happens on it may harm the others."""
        try:
            if isinstance(stream, trio.SocketStream):
                set_keepalive(stream.socket, self._keepalive)
            if door.front.ssl_context is not None:
                stream = trio.SSLStream(stream, door.front.ssl_context, server_side=True)
            conversation = Conversation(stream, application, self._settings)
            self._conversations.add(conversation)
            if self._drain.is_set():
                conversation.drain()
            try:
                await conversation.run()
            finally:
                self._conversations.discard(conversation)
                if not self._conversations:
                    self._nobody.unpark_all()
        except Exception as error:
            logger.error("a connection ended by a bug in the server", exc_info=sole(error))
        finally:
            door.places.release()

    def _lives(self) -> Iterator[Life]:
        """Of the requests in flight."""
        return (conversation.life for conversation in self._conversations if conversation.life is not None)

    async def _drain_connections(self) -> None:
        for conversation in list(self._conversations):
            conversation.drain()
        if any(conversation.busy for conversation in self._conversations):
            logger.info("Waiting for in-flight requests to complete.")
            logger.info(IN_FLIGHT, self._exit_timeout, self._busy_models())
        with trio.move_on_after(self._exit_timeout):
            await self._all_gone()
        if self._conversations:
            connections = len(self._conversations)
            logger.warning(f"{IN_FLIGHT}; stopping %d connections", 0, self._busy_models(), connections)
        for conversation in list(self._conversations):
            conversation.abort(CancelReason.SHUTDOWN)
        with trio.move_on_after(LAST_WORDS):
            await self._all_gone()

    def _busy_models(self) -> int:
        queues = [model.statistics() for model in self._control.live]
        return sum(queue.running + queue.waiting > 0 for queue in queues)

    async def _all_gone(self) -> None:
        while self._conversations:
            await self._nobody.park()

    # -- Models -----------------------------------------------------------------------------------------------------

    async def load_model(
        self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load a model of the repository, or load it again if its files have changed; see `ModelControl.load`."""
        await self._control.load(name, config=config, files=files)

    async def unload_model(self, name: str) -> None:
        """Serve a model no more, and return when it is cleaned up; see `ModelControl.unload`."""
        await self._control.unload(name)


def _runner(model: Model | Runner) -> Runner:
    if isinstance(model, Model):
        return native_runner(model)
    if isinstance(model, type) or not hasattr(model, "signature"):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ModelLoadError(name, "models are objects of subclasses of trio_infer.Model, such as `MyModel()`")
    return model


def _by_name(runners: Iterable[Runner]) -> dict[str, list[Runner]]:
    models: dict[str, list[Runner]] = {}
    for runner in runners:
        versions = models.setdefault(runner.signature.name, [])
        if any(runner.signature.version == other.signature.version for other in versions):
            raise ModelLoadError(runner.signature.name, f"version {runner.signature.version} is given twice")
        versions.append(runner)
    return models


async def _close(doors: Iterable[_Door]) -> None:
    for door in doors:
        await door.close()


def _matter(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception that is the matter, out of the groups that nurseries put it in; the group if there are more."""
    rest = group.split(trio.Cancelled)[1]
    return group if rest is None else sole(rest)


def _resources(policy: RateLimit) -> Resources | None:
    resources = Resources(policy.rate_limit_resource)  # bad rules are refused also if they don't count
    return None if policy.rate_limit == "off" else resources
