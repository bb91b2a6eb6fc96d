"""Deadlines fire on time in every phase and really cancel; and what can still be told is told."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from support import Echo, Streamer, Ticker, get, infer_echo, infer_ticks, post, serving
from trio_infer import InferRequest, Limits

LIVE = get("/v2/health/live")


def within(milliseconds: object) -> str:
    return f"Inference-Timeout-Ms: {milliseconds}"


def infer_with(ticks: int, **parameters: object) -> bytes:
    """An inference with parameters."""
    tensor = {"name": "ticks", "datatype": "INT32", "shape": [1], "data": [ticks]}
    return post("ticker", "infer", {"inputs": [tensor], "parameters": parameters})


# -- The whole request -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
async def test_a_running_request_is_stopped_on_time_and_the_connection_lives_on(
    autojump_clock: Any, action: str
) -> None:
    ticker = Ticker()
    async with serving(ticker, memory=True) as served:
        client = served.connect_in_memory()
        if action == "infer":
            await client.send(infer_ticks(1000, within(500)))
        else:
            await client.send(post("ticker", action, {"ticks": 1000}, within(500)))
        answer = await client.answer()
        assert trio.current_time() == pytest.approx(0.5)
        assert (answer.status, answer.headers["content-type"]) == (504, "application/json")
        assert answer.json == {
            "error": "deadline passed while running: the request had 500 ms (its Inference-Timeout-Ms)"
        }
        assert (ticker.cancelled, ticker.saw_flag) == (1, [True])
        assert served.cancelled() == {("deadline passed", "running"): 1}
        assert (await client.ask(infer_ticks(1))).status == 200


async def test_a_queued_request_is_told_on_time_although_the_instance_is_busy(autojump_clock: Any) -> None:
    ticker = Ticker(instances=1)
    async with serving(ticker, memory=True) as served:
        busy, client = served.connect_in_memory(), served.connect_in_memory()
        await busy.send(infer_ticks(60))
        await ticker.started.wait()
        answer = await client.ask(infer_ticks(1, within(500)))
        assert trio.current_time() == pytest.approx(0.5)
        assert answer.status == 504
        assert "deadline passed while queued" in answer.json["error"]
        assert served.server.statistics().models["ticker", "1"].waiting == 0
        assert (await client.ask(LIVE)).status == 200
        assert (await busy.answer()).status == 200
        assert ticker.runs == 1


async def test_a_body_that_does_not_come_is_not_waited_for_and_the_connection_is_closed(autojump_clock: Any) -> None:
    ticker = Ticker()
    async with serving(ticker, memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(1, within(500))[:-5])
        answer = await client.answer()
        assert trio.current_time() == pytest.approx(0.5)
        assert (answer.status, answer.headers["connection"]) == (504, "close")
        assert "deadline passed while receiving" in answer.json["error"]
        await client.close()
        assert ticker.runs == 0
        assert served.cancelled() == {("deadline passed", "receiving"): 1}


async def test_a_stream_ends_with_an_event_that_says_so_and_the_connection_lives_on(autojump_clock: Any) -> None:
    streamer = Streamer()
    async with serving(streamer, memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(post("streamer", "generate_stream", {"ticks": 1000}, within(525)))
        assert trio.current_time() == pytest.approx(0.525)
        *events, last, rest = answer.body.split(b"\n\n")
        assert (answer.status, len(events), rest) == (200, 10, b"")
        assert "deadline passed while streaming" in json.loads(last.removeprefix(b"data: "))["error"]
        assert streamer.cancelled == 1
        assert served.cancelled() == {("deadline passed", "streaming"): 1}
        assert (await client.ask(LIVE)).status == 200


async def test_an_answer_that_is_half_sent_is_cut_off() -> None:
    """Real sockets: a memory stream takes everything at once."""
    size = 32 * 2**20

    class Large(Echo):
        async def infer(self, request: InferRequest) -> dict[str, Any]:
            return {"x": np.zeros(size // 4, "f4")}

    document = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}],
        "parameters": {"binary_data_output": True},
    }
    async with serving(Large()) as served:
        client = await served.connect()
        await client.send(post("echo", "infer", document, within(200)))
        head = await client.head()
        assert head.status == 200
        await served.ended(1)
        assert served.cancelled() == {("deadline passed", "sending"): 1}
        received = 0
        try:
            while data := await client.stream.receive_some(2**20):
                received += len(data)
        except trio.BrokenResourceError:
            pass
        assert received < size
        await client.close()


async def test_a_request_that_is_in_time_has_lost_nothing_and_leaves_no_alarm(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        assert (await client.ask(infer_ticks(9, within(500)))).status == 200
        assert (await client.ask(infer_ticks(100))).status == 200
        assert trio.current_time() == pytest.approx(5.45)
        assert served.outcomes() == {"completed": 2}


async def test_each_request_has_its_own_deadline_whatever_those_before_it_had(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        at = 0.0
        for milliseconds, ticks, seconds, status in (
            (10_000, 1, 0.05, 200),
            (500, 1000, 0.5, 504),
            (2000, 1000, 2.0, 504),
            (100, 1, 0.05, 200),
            (300, 4, 0.2, 200),
            (20_000, 300, 15.0, 200),
            (100, 1000, 0.1, 504),
        ):
            assert (await client.ask(infer_ticks(ticks, within(milliseconds)))).status == status
            at += seconds
            assert trio.current_time() == pytest.approx(at)
        await client.send(infer_ticks(1000, within(5000)))
        await trio.sleep(1)
        await client.close()
        await served.ended(8)
        assert served.cancelled() == {("deadline passed", "running"): 3, ("client disconnected", "running"): 1}


async def test_it_also_holds_where_a_departure_would_not_stop_the_work(autojump_clock: Any) -> None:
    ticker = Ticker(on_disconnect="finish")
    async with serving(ticker, memory=True) as served:
        assert (await served.connect_in_memory().ask(infer_ticks(1000, within(500)))).status == 504
        client = served.connect_in_memory()
        await client.send(infer_ticks(1000, within(500)))
        await client.close()
        await served.ended(2)
        assert ticker.cancelled == 2
        assert served.cancelled() == {("deadline passed", "running"): 2}


async def test_a_model_that_fails_as_it_is_stopped_changes_nothing_for_the_client(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Sore(Ticker):
        async def infer(self, request: InferRequest) -> Any:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise ValueError("boom-42") from None

    async with serving(Sore(), memory=True) as served:
        client = served.connect_in_memory()
        assert (await client.ask(infer_ticks(1, within(500)))).status == 504
        assert (await client.ask(LIVE)).status == 200
        assert served.outcomes() == {"cancelled": 1, "completed": 1}
    assert "boom-42" in caplog.text


@pytest.mark.parametrize("value", ["0", "-1", "soon", "", "1.5", "1e3", "2147483648", "9" * 5000, "５"])
async def test_a_bad_value_is_refused_by_name_before_the_model_runs(autojump_clock: Any, value: str) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        head, _, body = infer_echo(1.0).partition(b"\r\n\r\n")
        answer = await client.ask(b"%b\r\nInference-Timeout-Ms: %b\r\n\r\n%b" % (head, value.encode(), body))
        assert answer.status == 400
        assert answer.json["error"].startswith("Inference-Timeout-Ms must be a whole number of milliseconds, 1 to ")
        assert len(answer.body) < 250
        assert (await client.ask(infer_echo(1.0))).status == 200


@pytest.mark.parametrize(
    ("most", "own", "seconds", "source"),
    [
        (300, None, 0.3, "the server's --request-timeout-ms"),
        (300, 200, 0.2, "its Inference-Timeout-Ms"),
        (300, 900, 0.3, "the server's --request-timeout-ms"),
    ],
)
async def test_a_servers_own_bound_can_be_lowered_but_not_raised(
    autojump_clock: Any, most: int, own: int | None, seconds: float, source: str
) -> None:
    async with serving(Ticker(), memory=True, limits=Limits(request_timeout_ms=most)) as served:
        answer = await served.connect_in_memory().ask(infer_ticks(1000, *([within(own)] if own else [])))
        assert answer.status == 504
        assert answer.json["error"].endswith(f"({source})")
        assert trio.current_time() == pytest.approx(seconds)


@attrs.define(eq=False)
class Deaf(Ticker):
    """Computes in a thread, and asks."""

    asked: list[bool] = attrs.field(factory=list)
    done: threading.Event = attrs.field(factory=threading.Event)

    async def infer(self, request: InferRequest) -> Any:
        def compute() -> None:
            end = time.monotonic() + 5
            while not request.is_cancelled() and time.monotonic() < end:
                time.sleep(0.005)
            self.asked.append(request.is_cancelled())
            self.done.set()

        await trio.to_thread.run_sync(compute)
        return {"ticks": request.inputs["ticks"]}


async def test_a_models_thread_hears_of_the_deadline() -> None:
    model = Deaf()
    async with serving(model) as served:
        client = await served.connect()
        began = trio.current_time()
        assert (await client.ask(infer_ticks(1, within(100)))).status == 504
        assert 0.09 < trio.current_time() - began < 2
        assert model.asked == [True]
        await client.close()


# -- In the queue ----------------------------------------------------------------------------------------------------


async def test_a_timeout_in_the_queue_is_told_on_time_and_the_request_never_runs(autojump_clock: Any) -> None:
    ticker = Ticker(instances=1)
    async with serving(ticker, memory=True) as served:
        busy, client = served.connect_in_memory(), served.connect_in_memory()
        await busy.send(infer_ticks(60))
        await ticker.started.wait()
        answer = await client.ask(infer_with(1, timeout=500_000))
        assert trio.current_time() == pytest.approx(0.5)
        assert answer.status == 503
        assert answer.json == {"error": "Request timeout expired"}
        assert (await client.ask(LIVE)).status == 200
        assert (await busy.answer()).status == 200
        assert ticker.runs == 1
        assert served.outcomes() == {"failed": 1, "completed": 2}


async def test_a_timeout_says_nothing_of_the_run_and_0_is_none(autojump_clock: Any) -> None:
    ticker = Ticker(instances=1)
    async with serving(ticker, memory=True) as served:
        first, second = served.connect_in_memory(), served.connect_in_memory()
        await first.send(infer_with(60, timeout=500_000))
        await ticker.started.wait()
        assert (await second.ask(infer_with(1, timeout=0))).status == 200
        assert (await first.answer()).status == 200


@pytest.mark.parametrize("timeout", [-1, "500000", True, 0.5])
async def test_a_timeout_of_the_wrong_type_is_refused_in_tritons_words(autojump_clock: Any, timeout: object) -> None:
    async with serving(Ticker(), memory=True) as served:
        answer = await served.connect_in_memory().ask(infer_with(1, timeout=timeout))
        assert answer.status == 500
        assert "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer" in answer.json["error"]


async def test_a_timeout_larger_than_any_is_no_accident(autojump_clock: Any) -> None:
    ticker = Ticker(instances=1)
    async with serving(ticker, memory=True) as served:
        busy, client = served.connect_in_memory(), served.connect_in_memory()
        await busy.send(infer_ticks(6))
        await ticker.started.wait()
        assert (await client.ask(infer_with(1, timeout=2**64 - 1))).status == 200


async def test_in_the_tick_in_which_an_instance_is_granted_the_timeout_is_too_late(autojump_clock: Any) -> None:
    ticker = Ticker(instances=1)
    async with serving(ticker, memory=True) as served:
        busy, client = served.connect_in_memory(), served.connect_in_memory()
        await busy.send(infer_ticks(10))
        await ticker.started.wait()
        answer = await client.ask(infer_with(1, timeout=500_000))
        await busy.answer()
        assert answer.status in (200, 503)
        assert ticker.runs == (2 if answer.status == 200 else 1)
