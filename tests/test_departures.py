"""What a client's leaving stops, row by row, in every phase; without a network and without real time."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
import trio.testing

from support import Client, Failing, Streamer, Ticker, get, infer_ticks, post, serving
from trio_infer import Limits


async def test_receiving_a_body_the_read_stops_and_the_model_is_never_entered(autojump_clock: Any) -> None:
    model = Ticker()
    async with serving(model, memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(5)[:-10])
        await trio.sleep(1)
        await client.close()
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "receiving"): 1}
    assert model.runs == 0


async def test_leaving_in_half_a_header_is_a_departure_while_receiving(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(b"POST /v2/models/tic")
        await trio.sleep(1)
        await client.close()
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "receiving"): 1}


async def test_leaving_without_a_byte_is_no_request_at_all(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        await served.connect_in_memory().close()
        await trio.sleep(1)
        assert served.server.statistics().requests.received == 0
        assert served.server.statistics().connections == 0


async def test_queued_the_ticket_leaves_at_once_and_never_runs(autojump_clock: Any) -> None:
    model = Ticker(instances=1)
    async with serving(model, memory=True) as served:
        running, queued = served.connect_in_memory(), served.connect_in_memory()
        await running.send(infer_ticks(100))
        await model.started.wait()
        await queued.send(infer_ticks(100))
        await trio.sleep(0.01)
        assert served.server.statistics().models["ticker", "1"].waiting == 1
        await queued.close()
        await trio.testing.wait_all_tasks_blocked()
        assert served.server.statistics().models["ticker", "1"].waiting == 0
        assert served.cancelled() == {("client disconnected", "queued"): 1}
        answer = await running.answer()
        assert answer.status == 200
    assert (model.runs, model.ticks) == (1, 100)


async def test_leaving_the_queue_lets_the_next_one_move_up(autojump_clock: Any) -> None:
    model = Ticker(instances=1)
    async with serving(model, memory=True) as served:
        first, second, third = (served.connect_in_memory() for _ in range(3))
        await first.send(infer_ticks(20))
        await model.started.wait()
        await second.send(infer_ticks(20))
        await trio.sleep(0.01)
        await third.send(infer_ticks(1))
        await trio.sleep(0.01)
        await second.close()
        await first.answer()
        before = trio.current_time()
        assert (await third.answer()).status == 200
        assert trio.current_time() - before == pytest.approx(0.05)


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
async def test_running_it_is_cancelled_at_its_next_checkpoint(autojump_clock: Any, action: str) -> None:
    model = Ticker(instances=1)
    async with serving(model, memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(200) if action == "infer" else post("ticker", action, {"ticks": 200}))
        await trio.sleep(0.32)
        await client.close()
        await model.stopped.wait()
        assert model.ticks == 6
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "running"): 1}
        assert served.server.statistics().models["ticker", "1"].running == 0
    assert model.saw_flag == [True], "`is_cancelled()` is true before the model is told by an exception"


async def test_streaming_the_generator_is_closed_in_the_task_that_iterates_it(autojump_clock: Any) -> None:
    model = Streamer()
    async with serving(model, memory=True) as served:
        client = served.connect_in_memory()
        await client.send(post("streamer", "generate_stream", {"ticks": 200}))
        assert (await client.head()).status == 200
        for _ in range(3):
            assert (await client.chunk()).startswith(b"data: ")
        await client.close()
        await model.stopped.wait()
        assert model.ticks == 3
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "streaming"): 1}
    assert model.cancelled == 1


async def test_the_silent_phase_before_the_first_event_is_cancelled_like_any_other(autojump_clock: Any) -> None:
    model = Streamer()
    async with serving(model, memory=True) as served:
        client = served.connect_in_memory()
        await client.send(post("streamer", "generate_stream", {"ticks": 200}))
        await trio.sleep(0.02)
        await client.close()
        await model.stopped.wait()
        assert model.ticks == 0
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "running"): 1}


async def test_leaving_is_logged_as_499_at_info_without_a_traceback(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(200))
        await trio.sleep(0.3)
        await client.close()
        await served.ended(1)
    records = [
        record for record in caplog.records if record.name.startswith("trio_infer") and "is ready" not in record.message
    ]
    assert [(record.levelname, record.exc_info) for record in records] == [("INFO", None)]
    assert "499 after" in records[0].message
    assert "client disconnected while running" in records[0].message


async def test_leaving_one_request_disturbs_no_other(autojump_clock: Any) -> None:
    model = Ticker()
    async with serving(model, memory=True) as served:
        clients = [served.connect_in_memory() for _ in range(10)]
        for client in clients:
            await client.send(infer_ticks(10))
        await trio.sleep(0.12)
        for client in clients[::2]:
            await client.close()
        for client in clients[1::2]:
            assert (await client.answer()).status == 200
        assert served.outcomes() == {"completed": 5, "cancelled": 5}


async def test_a_pipelined_pair_is_answered_in_order_and_nothing_is_cancelled(autojump_clock: Any) -> None:
    model = Ticker(instances=1)
    for apart in (0.0, 0.1):
        async with serving(model, memory=True) as served:
            client = served.connect_in_memory()
            first, second = infer_ticks(4, "X: 1"), get("/v2/models/ticker")
            if apart:
                await client.send(first)
                await trio.sleep(apart)
                await client.send(second)
            else:
                await client.send(first + second)
            assert (await client.answer()).json["outputs"][0]["data"] == [4]
            assert (await client.answer()).json["name"] == "ticker"
            assert served.outcomes() == {"completed": 2}


async def test_two_requests_in_turn_on_one_connection_cancel_nothing(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        for ticks in (3, 4):
            assert (await client.ask(infer_ticks(ticks))).json["outputs"][0]["data"] == [ticks]
            await trio.sleep(1)
        assert served.outcomes() == {"completed": 2}


async def test_a_reader_that_stalls_is_cut_and_its_model_stopped(autojump_clock: Any) -> None:
    class Flood(Streamer):
        async def infer(self, request: Any) -> Any:
            try:
                while True:
                    await trio.sleep(0.01)
                    self.ticks += 1
                    yield {"ticks": request.inputs["ticks"]}
            finally:
                self.stopped.set()

    model = Flood()
    send, receive = trio.testing.lockstep_stream_pair()  # holds nothing: a send waits for its reader
    async with serving(model, memory=True, limits=Limits(write_timeout=7)) as served:
        assert served.listener is not None
        served.listener._send.send_nowait(receive)
        client = Client(send)
        await client.send(post("streamer", "generate_stream", {"ticks": 1}))
        await client.head()
        before = trio.current_time()
        await model.stopped.wait()
        assert trio.current_time() - before == pytest.approx(7, abs=0.1)
        await served.ended(1)
        assert served.cancelled() == {("client stalled", "streaming"): 1}
        await client.close()


async def test_finish_lets_the_work_end_and_counts_it_as_undelivered(autojump_clock: Any) -> None:
    model = Ticker(on_disconnect="finish")
    async with serving(model, memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(10))
        await trio.sleep(0.12)
        await client.close()
        await served.ended(1)
        assert model.ticks == 10
        assert served.outcomes() == {"undelivered": 1}


async def test_a_model_that_fails_while_its_client_leaves_is_logged_once_and_the_server_lives(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class FailsOnCancel(Ticker):
        async def infer(self, request: Any) -> Any:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("boom in finally")

    async with serving(FailsOnCancel(), Failing(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(1))
        await trio.sleep(1)
        await client.close()
        await served.ended(1)
        assert served.outcomes() == {"cancelled": 1}
        assert (await served.connect_in_memory().ask(get("/v2/health/live"))).status == 200
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].exc_info is not None
    assert isinstance(errors[0].exc_info[1], ValueError)


async def test_a_models_exception_is_its_own_in_the_answer_and_in_the_log(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Failing(), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(post("failing", "infer", {"inputs": []}))
        assert answer.status == 500
        assert "boom-42" in answer.json["error"]
        assert "nursery" not in answer.json["error"]
        assert (await client.ask(get("/v2/health/live"))).status == 200, "the connection lives on"
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "Group" not in caplog.text
