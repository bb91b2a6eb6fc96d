"""The server of a benchmark, in a process of its own. Its argument says what to serve, as JSON; on stdin it takes
commands, one a line, and answers each with a line of JSON on stdout. At the end of stdin it drains, and exits with 0.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import trio

import _ladder
import _models
from _models import Echo, Endings, Hop, Sink, Source, Stamped, Stream, Wait, copying, polling
from trio_infer import DisconnectPolicy, Limits, Server
from trio_infer.app import spare_the_collector
from trio_infer.models.native import NativeRunner
from trio_infer.wire.transport import SocketTransport


def models(config: dict[str, Any], repository: Path) -> list[Any]:
    slots = config.get("slots", 1)
    make: dict[str, Callable[[], Any]] = {
        "echo": Echo,
        "hop": Hop,
        "wait": lambda: Wait(slots),
        "stream": lambda: Stream(slots),
        "poll": lambda: polling(repository, slots),
        "thread": lambda: copying(repository, "thread"),
        "process": lambda: copying(repository, "process"),
        "sink": Sink,
        "source": Source,
        "chain": lambda: _models.Chain(slots),
        "slow chain": lambda: _models.Chain(slots, _models.STEP),
        "direct": lambda: _models.Direct(slots),
        "batched": lambda: _models.Batched(slots),
    }
    if config["models"] == ["ladder"]:
        return _ladder.models(repository)
    if config["models"] == ["fire"]:
        return _ladder.deaf(0.1)
    made = [make[name]() for name in config["models"]]
    if not config.get("stamped"):
        return made
    return [Stamped(NativeRunner(model) if isinstance(model, _models.Model) else model) for model in made]


def watchers(config: dict[str, Any]) -> list[Any]:
    if config["models"] in (["ladder"], ["fire"]):
        return [_ladder.Stops()]
    return [Endings()] if config.get("stamped") else []


def standing(server: Server) -> dict[str, Any]:
    """The server's own books, and what the process holds."""
    gc.collect()
    statistics = server.statistics()
    requests = statistics.requests
    return {
        "received": requests.received,
        "in_flight": sum(requests.in_flight.values()),
        "outcomes": {outcome.value: count for outcome, count in requests.outcomes.items()},
        "cancelled": {f"{why.value} while {where.value}": n for (why, where), n in sorted_items(requests.cancelled)},
        "connections": statistics.connections,
        "running": sum(queue.running for queue in statistics.models.values()),
        "waiting": sum(queue.waiting for queue in statistics.models.values()),
        "abandoned": sum(queue.abandoned for queue in statistics.models.values()),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # without the one that lists them
    }


def sorted_items(counts: Any) -> list[Any]:
    return sorted(counts.items(), key=lambda item: -item[1])


def take_stamps() -> list[Any]:
    stamps, _models.STAMPS[:] = list(_models.STAMPS), []
    return stamps


class Copies:
    """Watches one large request: the memory it allocates, and whether its tensors are where the socket's bytes are."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[int, int]] = {}

    def start(self) -> None:
        """From now on, note where large buffers are. It is the last thing that this server is good for."""
        receive_into, send = SocketTransport.receive_into, SocketTransport.send
        infer, ranges = _models.Echo.infer, self.ranges

        async def noted_receive(transport: Any, view: memoryview, before_wait: Any) -> int:
            ranges["received"] = extent(view.obj)  # all of the body, not only what is missing
            return await receive_into(transport, view, before_wait)

        async def noted_send(transport: Any, buffers: Any, before_wait: Any) -> None:
            for buffer in buffers:
                if len(buffer) > _models.MIB:
                    ranges["sent"] = extent(buffer)
            await send(transport, buffers, before_wait)

        async def noted_infer(model: Any, request: Any) -> Any:
            ranges["tensor"] = extent(request.inputs["x"])
            return await infer(model, request)

        SocketTransport.receive_into, SocketTransport.send = noted_receive, noted_send  # type: ignore[method-assign]  # a probe
        _models.Echo.infer = noted_infer  # type: ignore[method-assign]  # a probe
        tracemalloc.start()

    def stop(self) -> dict[str, Any]:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        received, tensor, sent = (self.ranges[name] for name in ("received", "tensor", "sent"))
        return {
            "peak": peak,
            "received_in_place": received[0] <= tensor[0] and tensor[1] <= received[1],
            "sent_in_place": sent == tensor,
        }


def extent(buffer: Any) -> tuple[int, int]:
    """Addresses of a buffer's first byte and of the one behind its last."""
    array = _models.np.frombuffer(buffer, _models.np.uint8)
    return array.ctypes.data, array.ctypes.data + array.nbytes


async def lines(descriptor: int) -> AsyncIterator[str]:
    buffer = b""
    async with trio.lowlevel.FdStream(os.dup(descriptor)) as stream:
        async for data in stream:
            *whole, buffer = (buffer + data).split(b"\n")
            for line in whole:
                yield line.decode()


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main(config: dict[str, Any], repository: Path) -> None:
    server = Server(
        models(config, repository),
        disconnect=DisconnectPolicy(on_disconnect=config.get("on_disconnect", "cancel")),
        limits=Limits(idle_timeout=3600),
        watchers=watchers(config),
    )
    copies = Copies()
    commands: dict[str, Callable[[], Any]] = {
        "standing": lambda: standing(server),
        "started": lambda: sum(event == "started" for _, event, _ in _models.STAMPS),
        "stamps": take_stamps,
        "counts": _models.take_counts,
        "models": lambda: sorted(name for name, _ in server.statistics().models),
        "faults": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        "watch copies": copies.start,
        "copies": copies.stop,
    }
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(server.serve, "127.0.0.1", 0)
        spare_the_collector()  # as the command does
        say(addresses[0].port)
        async for line in lines(sys.stdin.fileno()):
            say(commands[line]())
        server.drain()
    say(standing(server))


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as directory:
        trio.run(main, json.loads(sys.argv[1]), Path(directory))
