"""What each client sees when the server goes down, in order or at once; in trio's clock, not in ours."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import trio

from support import Streamer, Ticker, get, infer_ticks, post, serving
from trio_infer import InferRequest

LIVE = get("/v2/health/live")


async def test_a_drain_closes_what_is_idle_and_half_headers_at_once(autojump_clock: Any) -> None:
    async with serving(memory=True) as served:
        fresh, idle, half, blank = (served.connect_in_memory() for _ in range(4))
        await idle.ask(LIVE)
        await half.send(LIVE[:10])
        await blank.send(b"\r\n")
        await trio.sleep(1)
        served.server.drain()
        for client in (fresh, idle, half, blank):
            assert await client.at_end()
        assert trio.current_time() == pytest.approx(1)
        await served.finished.wait()
        assert served.cancelled() == {("shutdown", "receiving"): 1}


async def test_a_drain_waits_for_requests_that_run_and_closes_behind_them(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(40) + LIVE)
        await trio.sleep(1)
        served.server.drain()
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.at_end()
        await client.close()
        await served.finished.wait()
        assert trio.current_time() == pytest.approx(2)


async def test_a_drain_waits_for_a_body_that_is_on_its_way(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(1)[:-5])
        await trio.sleep(1)
        served.server.drain()
        await trio.sleep(1)
        answer = await client.ask(infer_ticks(1)[-5:])
        assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_a_client_that_is_stuck_in_its_body_delays_the_end_of_a_drain_by_little(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True, exit_timeout=3) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(1)[:-5])
        await trio.sleep(1)
        served.server.drain()
        assert (await client.answer()).status == 503
        await served.finished.wait()
        assert trio.current_time() == pytest.approx(4.25)
        assert served.cancelled() == {("shutdown", "receiving"): 1}


async def test_at_the_end_of_a_drain_each_client_is_told_in_the_way_that_is_left(autojump_clock: Any) -> None:
    ticker, streamer = Ticker(instances=1), Streamer()
    async with serving(ticker, streamer, memory=True, exit_timeout=3) as served:
        running, queued, receiving, streaming = (served.connect_in_memory() for _ in range(4))
        await running.send(infer_ticks(1000))
        await ticker.started.wait()
        await queued.send(infer_ticks(1000))
        await receiving.send(infer_ticks(1)[:-5])
        await streaming.send(post("streamer", "generate_stream", {"ticks": 1000}))
        await trio.sleep(0.5)
        served.server.drain()
        for client in (running, queued, receiving):
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert "shutting down" in answer.json["error"]
            assert await client.at_end()
        answer = await streaming.answer()
        *_, last, rest = answer.body.split(b"\n\n")
        assert (answer.status, rest) == (200, b"")
        assert "shutting down" in json.loads(last.removeprefix(b"data: "))["error"]
        assert await streaming.at_end()
        await receiving.close()
        await served.finished.wait()
        assert trio.current_time() == pytest.approx(3.5, abs=0.1)
        assert served.cancelled() == {
            ("shutdown", "running"): 1,
            ("shutdown", "queued"): 1,
            ("shutdown", "receiving"): 1,
            ("shutdown", "streaming"): 1,
        }


@attrs.define(eq=False)
class Stubborn(Ticker):
    """Finishes what it does, and only then lets itself be stopped."""

    async def infer(self, request: InferRequest) -> Any:
        self.started.set()
        with trio.CancelScope(shield=True):
            await trio.sleep(4)
        return {"ticks": request.inputs["ticks"]}


@attrs.define(eq=False)
class StubbornStreamer(Ticker):
    async def infer(self, request: InferRequest) -> Any:
        self.started.set()
        with trio.CancelScope(shield=True):
            await trio.sleep(4)
        yield {"ticks": request.inputs["ticks"]}


@pytest.mark.parametrize("model", [Stubborn, StubbornStreamer])
async def test_an_answer_that_comes_after_the_end_of_a_drain_is_not_begun(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture, model: Any
) -> None:
    async with serving(model(), memory=True, exit_timeout=3) as served:
        client = served.connect_in_memory()
        await client.send(post("ticker", "generate_stream", {"ticks": 1}))
        await trio.sleep(0.1)
        served.server.drain()
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert await client.at_end()
        assert trio.current_time() == pytest.approx(4)
        assert served.cancelled() == {("shutdown", "running"): 1}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_cancelling_the_server_ends_everything_and_every_peer_sees_the_end(autojump_clock: Any) -> None:
    ticker, streamer = Ticker(), Streamer()
    async with serving(ticker, streamer, memory=True) as served:
        idle, half, running, streaming, refused = (served.connect_in_memory() for _ in range(5))
        await idle.ask(LIVE)
        await half.send(LIVE[:10])
        await running.send(infer_ticks(1000))
        await streaming.send(post("streamer", "generate_stream", {"ticks": 1000}))
        await refused.ask(b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        await trio.sleep(0.12)
        await streaming.head()
        began = trio.current_time()
        with trio.CancelScope(shield=True):
            served.scope.cancel()
            await streaming.chunk()
            await streaming.chunk()
            for client in (idle, half, running, streaming, refused):
                assert await client.at_end()
            assert trio.current_time() == began
        assert ticker.stopped.is_set()
        assert streamer.stopped.is_set()


@attrs.define(eq=False)
class Team(Ticker):
    """Works in a nursery, and one of its tasks fails as it is stopped."""

    async def infer(self, request: InferRequest) -> Any:
        async def member() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("boom in a nursery")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(member)
            nursery.start_soon(trio.sleep_forever)
            self.started.set()


@pytest.mark.parametrize("how", ["leaves", "drain"])
async def test_an_error_beside_a_cancel_is_logged_once_and_the_request_ends_as_cancelled(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async with serving(Team(), memory=True, exit_timeout=1) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(1))
        await trio.sleep(1)
        if how == "leaves":
            await client.close()
        else:
            served.server.drain()
            assert (await client.answer()).status == 503
        await served.ended(1)
        reason = "client disconnected" if how == "leaves" else "shutdown"
        assert served.cancelled() == {(reason, "running"): 1}
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in errors] == ["POST /v2/models/ticker/infer failed"]
    assert errors[0].exc_info is not None
    assert isinstance(errors[0].exc_info[1], ValueError)
