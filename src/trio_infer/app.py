"""What the command does: logging, models, the server, and signals.

Going down. The first SIGTERM or SIGINT (Ctrl-C) starts an orderly drain: requests in hand have `exit_timeout_secs`, and
the exit code is 0, also if that time was not enough. A second signal means now: what is left is cancelled, and the exit
code is 128 plus the signal's number (130 for Ctrl-C), since work was cut off that had been promised. From then on
signals do what they do to any program, so that a third one ends a clean-up that hangs. A signal before the server is
ready has nothing to wait for, and ends it with 0.

What goes where. The line that says the server is ready goes to stdout, alone with the hints for trying it; scripts can
wait for it there. The log goes to stderr. Whatever the operator asked for that can't be done is a `SetupError`, for the
caller to print.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import attrs
import trio

from trio_infer._version import __version__
from trio_infer.app_fronts import cloud_repository, further_ports, main_port_is_open
from trio_infer.errors import SetupError
from trio_infer.models.packaged import packaged_models
from trio_infer.models.repository import ModelRepository
from trio_infer.observe.log_settings import LogSettings
from trio_infer.observe.metrics_policy import MetricsPolicy
from trio_infer.observe.trace_settings import TraceSettings
from trio_infer.options import Options
from trio_infer.server import Address, Server
from trio_infer.wire.listeners import ListenError, cannot_listen

__all__ = ["run", "spare_the_collector"]

logger: logging.Logger = logging.getLogger("trio_infer")

OTHER_FILES: Final = 64
"""Descriptors besides connections: the listeners, trio's own, the interpreter's, some for the models."""

EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - only looked up
"""Where to reach, on this machine, a server that listens on all addresses."""

PARAGRAPH: Final = (
    "When a client hangs up, most inference servers do not notice. The model goes on computing an answer that nobody "
    "will read, and the next request waits behind it in the queue. trio-infer watches the connection while a request "
    "is queued, running or streaming. As soon as the client leaves, the request is cancelled and the model stops. "
    "Everyone who is still there is served sooner."
)
"""What the hint for `summarize` sends; no quotes in it, as it goes through a shell."""


def run(options: Options) -> int:
    """Serve, until signals say otherwise. To be called in the main thread; returns when the server is down.

    Args:
        options: as read from the command line, or made by hand; `config` is not looked at any more.

    Returns:
        The exit code, as the head of this file says.

    Raises:
        SetupError: what was asked for can't be done; its message is one line.
    """
    logs = _logs(options)
    logs.install()
    try:
        for flag, reason in options.ignored.reasons().items():
            logger.warning("%s has no effect: %s", flag, reason)
        return _run(options, logs)
    except SetupError:
        logger.debug("can't start", exc_info=True)
        raise
    finally:
        logs.uninstall()


def _run(options: Options, logs: LogSettings) -> int:
    options = cloud_repository(options, os.environ)
    ssl_context = _ssl_context(options)
    packaged = not options.model_repository
    repository = (
        None
        if packaged
        else ModelRepository(
            options.model_repository,
            auto_complete=options.auto_complete,
            execution=options.execution,
        )
    )
    server = Server(
        packaged_models() if packaged else (),
        repository=repository,
        control=options.control,
        rate_limit=options.rate,
        name=options.id,
        limits=options.limits,
        disconnect=options.disconnects,
        keepalive=options.keepalive,
        ssl_context=ssl_context,
        exit_timeout=options.exit_timeout_secs,
        access_log=options.access_log,
        bad_json_status=options.bad_json_status,
        fronts=further_ports(options, os.environ),
        metrics=_metrics(options),
        restricted_apis=options.http_restricted_api,
        header_forward_pattern=options.http_header_forward_pattern,
        traces=TraceSettings(options.traces.settings()),
        logs=logs,
        allow_client_shm=options.allow_client_shm,
        response_cache=options.response_cache,
    )
    _allow_open_files(options)
    logger.info(
        "a peer that vanishes without a word is noticed after some %g s (--tcp-keepalive-idle and the like)",
        options.keepalive.worst_case,
    )

    def announce(addresses: Sequence[Address]) -> None:
        names = dict.fromkeys(name for name, _ in sorted(server.statistics().models))
        if not names and options.control.model_control_mode != "explicit":
            logger.warning("there is no model in %s", " or ".join(str(root) for root in options.model_repository))
        main = [address for address in addresses if address.kind == "http"]
        served = main or [address for address in addresses if address.kind != "metrics"]
        where = " and ".join(address.url for address in served)
        for address in addresses:
            if address not in served:
                logger.info("%s on %s", address.kind, address.url)
        lines = [f"trio-infer {__version__} is ready on {where} (models: {', '.join(names) or 'none'})"]
        if packaged and main:
            lines += _hints(main[0])
        with suppress(OSError):  # nobody may be reading
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()

    return trio.run(_Course(server, options, announce).run)


# -- The way up and down --------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Course:
    """One server from its start to its end, under signals."""

    server: Server
    options: Options
    announce: Callable[[Sequence[Address]], None]
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    ready: bool = attrs.field(init=False, default=False)
    exit_code: int = attrs.field(init=False, default=0)

    async def run(self) -> int:
        failure: SetupError | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(self._heed_signals)
            with self.scope:
                try:
                    await self.server.serve(
                        self.options.http_address,
                        self.options.http_port,
                        reuse_port=self.options.reuse_http_port,
                        listeners=None if main_port_is_open(self.options, os.environ) else (),
                        task_status=self,
                    )
                except SetupError as error:
                    failure = error
                except ListenError as error:
                    failure = cannot_listen(error)
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return self.exit_code

    def started(self, value: Sequence[Address] = ()) -> None:
        """The server is ready (this object is its `task_status`)."""
        self.ready = True
        spare_the_collector()
        self.announce(value)

    async def _heed_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        draining = False
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if not self.ready:
                    logger.info("%s: not starting", name)
                elif not draining:
                    draining = True
                    seconds = self.options.exit_timeout_secs
                    logger.info("%s: going down, requests have %g s to finish; once more, and it is now", name, seconds)
                    self.server.drain()
                    continue
                else:
                    logger.warning("%s: going down now", name)
                    self.exit_code = 128 + number
                self.scope.cancel(reason=name)
                return


def spare_the_collector() -> None:
    """Take what is there for good, modules and loaded models, out of the garbage collector's sight.

    A full collection goes through all of it, and nobody is heard meanwhile: 50 ms at 200 departures at once, against
    16 ms with this (measured). The process is the command's own; a library must not do that to its host.
    """
    gc.collect()
    gc.freeze()


# -- What is set up -------------------------------------------------------------------------------------------------


def _logs(options: Options) -> LogSettings:
    """The whole process logs to one place, models included: the command owns it."""
    return LogSettings(
        log_file="" if options.log_file is None else str(options.log_file),
        log_info=options.log_info,
        log_warning=options.log_warning,
        log_error=options.log_error,
        log_verbose_level=options.log_verbose,
        log_format=options.log_format,
    )


def _metrics(options: Options) -> MetricsPolicy | None:
    policy = MetricsPolicy.read(
        options.metrics_config, cpu=options.allow_cpu_metrics, interval_ms=options.metrics_interval_ms
    )
    return policy if options.allow_metrics else None


def _ssl_context(options: Options) -> ssl.SSLContext | None:
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise SetupError("--ssl-keyfile needs --ssl-certfile, the certificate that the key belongs to")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for flag, file in (("--ssl-certfile", options.ssl_certfile), ("--ssl-keyfile", options.ssl_keyfile)):
        try:
            if file is not None:
                file.open("rb").close()
        except OSError as error:
            raise SetupError(f"{flag}: can't read {file}: {error.strerror}") from error
    files = " and ".join(str(file) for file in (options.ssl_certfile, options.ssl_keyfile) if file is not None)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, _no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None)
        why = reason.replace("_", " ").lower() if reason else "a certificate and its private key (PEM) must be there"
        raise SetupError(f"can't serve TLS with {files}: {why}") from error
    return context


def _no_password() -> str:
    raise SetupError("the key of --ssl-keyfile is encrypted; give it without a password")


def _allow_open_files(options: Options) -> None:
    """Let the process open as many files as connections are allowed, as far as it may."""
    try:
        import resource
    except ImportError:  # not POSIX
        return
    policy = options.disconnects
    each = 2 if policy.half_close == "wait" or policy.pipelined == "watch" else 1  # the latter's epoll is the second
    needed = options.limits.max_connections * each + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
        soft = max(soft, wanted)
    if soft < needed:
        logger.warning(
            "this process may open %d files, enough for some %d connections, not %d: raise the limit (ulimit -Hn), or "
            "lower --max-connections",
            soft,
            max(0, soft - OTHER_FILES) // each,
            options.limits.max_connections,
        )


def _hints(address: Address) -> list[str]:
    """Lines to paste into another terminal."""
    url = attrs.evolve(address, host=EVERYWHERE.get(address.host, address.host)).url
    curl = f"curl {'-k ' if address.scheme == 'https' else ''}-sN {url}/v2/models"
    tensor = '{"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}]}'
    return [
        "Try, in another terminal:",
        f"  {curl}/identity/infer -d '{tensor}'",
        f'  {curl}/summarize/generate_stream -d \'{{"max_sentences": 2, "text_input": "{PARAGRAPH}"}}\'',
        "Or this one; press Ctrl-C while it runs, and watch the server stop:",
        f"  {curl}/slow/generate -d '{{\"steps\": 100}}'",
    ]
