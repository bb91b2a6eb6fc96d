"""What leaving saves: half of the clients leave after 30 % of their tokens, with cancellation and without.

Three ways of making the same tokens, waves of eight requests, a step of 5 ms: *direct*, each request by itself, a
stream; *batched*, all tokens of up to eight requests before any is answered, rows of departed clients left out of each
step by the model itself (`parts`); *continuous*, a token loop with eight slots. Compute is counted by the model: one
step for one request is a unit, so a step for a client that has left is a unit wasted.

*Goodput* is tokens that clients got for a unit of compute. The ideal spends no unit that begins after its client has
left: a client that leaves after 30 % costs 30 %. *finish* is the same server with `on_disconnect = "finish"`, which is
what servers do that don't notice: it computes all of it.

With `--plot FILE` also draws it (needs matplotlib).
"""

from __future__ import annotations

import time

import trio

from _harness import BenchServer, plot_file, post, report, table, verdict
from _models import STEP

AT_ONCE = 8
SHARE = 0.3
DELAY = 0.01
"""Seconds in which a batch comes together at most, here."""


class Crowd:
    """Clients, half of whom leave."""

    def __init__(self, port: int, model: str, requests: int, count: int) -> None:
        self.port, self.model, self.requests, self.count = port, model, requests, count
        self.got = self.ideal = 0

    async def run(self) -> None:
        for _ in range(self.requests // AT_ONCE):
            async with trio.open_nursery() as nursery:
                for number in range(AT_ONCE):
                    nursery.start_soon(self.client, number)

    async def client(self, number: int) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await self.ask(stream, leaves=number % 2 == 1)

    async def ask(self, stream: trio.SocketStream, *, leaves: bool) -> None:
        early = int(SHARE * self.count)
        if self.model == "batched":
            values = {"seed": [[1]], "count": [[self.count]]}
            tensors = [
                {"name": name, "datatype": "INT32", "shape": [1, 1], "data": data} for name, data in values.items()
            ]
            await stream.send_all(post("batched", "infer", {"inputs": tensors}))
            if leaves:  # it can't see its tokens; so it goes by the time that they take
                await trio.sleep(DELAY + early * STEP)
                self.ideal += early
                return
            await self.events(stream, b"\r\n\r\n", 1)
            self.got += self.count
            self.ideal += self.count
            return
        await stream.send_all(post(self.model, "generate_stream", {"seed": 1, "count": self.count}))
        wanted = early if leaves else self.count
        await self.events(stream, b"data: ", wanted)
        self.got += wanted
        self.ideal += wanted

    async def events(self, stream: trio.SocketStream, mark: bytes, count: int) -> None:
        data = b""
        while data.count(mark) < count:
            more = await stream.receive_some()
            assert more, data[-500:]
            data += more


def measure(model: str, on_disconnect: str, requests: int, count: int) -> tuple[float, float]:
    """Goodput, and that of the ideal."""
    served = {"continuous": "slow chain"}.get(model, model)
    name = {"continuous": "chain"}.get(model, model)
    with BenchServer(models=[served], slots=AT_ONCE, on_disconnect=on_disconnect) as server:
        crowd = Crowd(server.port, name, requests, count)
        trio.run(crowd.run)
        while server.ask("standing")["running"]:
            time.sleep(0.05)
        units = server.ask("counts")[name]
    return crowd.got / units, crowd.got / crowd.ideal


def draw(rows: list[list[float | str]], file: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for place, (column, label, colour) in enumerate(
        (
            (1, 'on_disconnect = "finish"', "#b9bec7"),
            (2, "cancelled with its client", "#2f6fde"),
            (3, "the ideal", "#1d3557"),
        )
    ):
        heights = [float(row[column]) for row in rows]
        bars = axes.bar([at + 0.27 * (place - 1) for at in range(len(rows))], heights, 0.25, label=label, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(rows)), [str(row[0]) for row in rows])
    axes.set_ylabel("tokens delivered for a step")
    axes.set_title("Half of the clients leave after 30 % of their tokens", fontsize=10)
    axes.set_ylim(0, 1.3)
    axes.legend(fontsize=8, ncols=3, loc="upper center", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main(quick: bool, plot: str) -> None:
    requests, count = (16, 20) if quick else (160, 100)
    rows: list[list[float | str]] = []
    for model in ("direct", "batched", "continuous"):
        finish, _ = measure(model, "finish", requests, count)
        cancel, ideal = measure(model, "cancel", requests, count)
        rows.append([model, finish, cancel, ideal, 100 * cancel / ideal, f"{cancel / finish:.2f} times"])
    table(["", "finish", "cancel", "the ideal", "of the ideal, %", "cancel against finish"], rows)
    for row in rows:
        verdict(f"{row[0]}: short of the ideal by", 100 - float(row[4]), 5, "%")
    if plot:
        draw(rows, plot)


if __name__ == "__main__":
    drawing = plot_file()
    with report(__doc__) as quick:
        main(quick, drawing)
