"""What happens when a client takes its time, to send or to read; in trio's clock, not in ours."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing

from support import Client, Echo, Served, Streamer, Ticker, get, infer_echo, infer_ticks, post, serving
from trio_infer import InferRequest, Limits

LIVE = get("/v2/health/live")


def connect_lockstep(served: Served) -> Client:
    """A connection that holds nothing in between: whoever sends waits for the reader."""
    assert served.listener is not None
    ours, theirs = trio.testing.lockstep_stream_pair()
    served.listener._send.send_nowait(theirs)
    return Client(ours)


# -- Receiving --------------------------------------------------------------------------------------------------------


async def test_a_header_that_is_dribbled_is_cut_off_counted_from_its_first_byte(autojump_clock: Any) -> None:
    async with serving(memory=True, limits=Limits(header_timeout=10)) as served:
        client = served.connect_in_memory()
        await trio.sleep(30)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def dribble() -> None:
                for byte in b"GET /v2/health/live HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
                    await client.send(bytes([byte]))
                    await trio.sleep(0.9)

            nursery.start_soon(dribble)
            answer = await client.answer()
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began == pytest.approx(10, abs=0.1)
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert "headers" in answer.json["error"]
        assert await client.at_end()
        await served.ended(1)
        assert served.outcomes() == {"rejected": 1}


@pytest.mark.parametrize("size", [100, 200_000])
async def test_a_body_that_stops_is_cut_off(autojump_clock: Any, size: int) -> None:
    model = Ticker()
    async with serving(model, memory=True, limits=Limits(body_timeout=10)) as served:
        client = served.connect_in_memory()
        request = post("ticker", "infer", b" " * size)
        for start in range(0, 50, 10):
            await client.send(request[:-60] if not start else request[-60 + start - 10 : -60 + start])
            await trio.sleep(9)  # slow, but it comes
        began = trio.current_time()
        answer = await client.answer()
        assert trio.current_time() - began == pytest.approx(1, abs=0.01)
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert "body" in answer.json["error"]
        await served.ended(1)
        assert served.outcomes() == {"rejected": 1}
    assert model.runs == 0


async def test_a_client_that_is_cut_off_can_read_why_while_it_goes_on_sending(autojump_clock: Any) -> None:
    async with serving(memory=True, limits=Limits(header_timeout=1)) as served:
        client = served.connect_in_memory()
        await client.send(b"GET /v2 HT")
        await trio.sleep(2)
        await client.send(b"TP/1.1\r\n")
        assert (await client.answer()).status == 408
        assert await client.at_end()


async def test_an_idle_connection_is_closed_silently_and_at_its_limit(autojump_clock: Any) -> None:
    async with serving(memory=True, limits=Limits(idle_timeout=10)) as served:
        client = served.connect_in_memory()
        for pause in (9.9, 9.9, 10.1):
            assert (await client.ask(LIVE)).status == 200
            began = trio.current_time()
            with trio.move_on_after(pause):
                assert await client.at_end()
                break
        assert trio.current_time() - began == pytest.approx(10)
        assert served.outcomes() == {"completed": 3}


async def test_blank_lines_do_not_make_an_idle_connection_a_busy_one(autojump_clock: Any) -> None:
    async with serving(memory=True, limits=Limits(idle_timeout=10)) as served:
        client = served.connect_in_memory()
        for _ in range(3):
            await client.send(b"\r\n")
            await trio.sleep(3)
        assert await client.at_end()
        assert trio.current_time() == pytest.approx(10)
        assert served.outcomes() == {}


async def test_no_limit_on_receiving_cuts_a_request_that_runs(autojump_clock: Any) -> None:
    limits = Limits(idle_timeout=1, header_timeout=1, body_timeout=1, write_timeout=1)
    async with serving(Ticker(), memory=True, limits=limits) as served:
        client = served.connect_in_memory()
        request = infer_ticks(1000)
        await client.send(request[:10])
        await trio.sleep(0.5)
        await client.send(request[10:-10])
        await trio.sleep(0.5)
        assert (await client.ask(request[-10:])).status == 200
        assert trio.current_time() == pytest.approx(51)


@pytest.mark.parametrize("late", [-1e-9, 0, 1e-9])
async def test_a_request_at_the_idle_limit_is_answered_or_refused_before_it_begins(
    autojump_clock: Any, late: float
) -> None:
    """Never is it begun and then dropped."""
    model = Ticker()
    async with serving(model, memory=True, limits=Limits(idle_timeout=10)) as served:
        client = served.connect_in_memory()
        await client.ask(LIVE)
        await trio.sleep_until(trio.current_time() + 10 + late)
        try:
            answer = await client.ask(infer_ticks(2))
        except (EOFError, trio.BrokenResourceError):
            assert model.runs == 0
            assert served.outcomes() == {"completed": 1}
        else:
            assert answer.status == 200


async def test_a_request_that_meets_the_idle_limit_in_one_tick_is_refused_unseen(mock_clock: Any) -> None:
    model = Ticker()
    async with serving(model, memory=True, limits=Limits(idle_timeout=10)) as served:
        client = served.connect_in_memory()
        await client.ask(LIVE)
        await trio.testing.wait_all_tasks_blocked()
        await client.send(infer_ticks(1))
        mock_clock.jump(11)  # the bytes have woken the server's task, which has not run yet
        assert await client.at_end()
        assert served.outcomes() == {"completed": 1}
    assert model.runs == 0


@pytest.mark.parametrize(("sent", "word"), [(10, "headers"), (-5, "body")])
async def test_bytes_that_meet_a_limit_in_one_tick_do_not_hide_it(mock_clock: Any, sent: int, word: str) -> None:
    model = Ticker()
    async with serving(model, memory=True, limits=Limits(header_timeout=10, body_timeout=10)) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(1)[:sent])
        await trio.testing.wait_all_tasks_blocked()
        await client.send(infer_ticks(1)[sent:])
        mock_clock.jump(11)  # the bytes have woken the server's task, which has not run yet
        answer = await client.answer()
        assert answer.status == 408
        assert word in answer.json["error"]
        await served.ended(1)
        assert served.outcomes() == {"rejected": 1}
    assert model.runs == 0


# -- Sending ----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Flood(Streamer):
    """Gives responses without end, and fails as it is stopped if told so."""

    fails: bool = False

    async def infer(self, request: InferRequest) -> Any:
        self.runs += 1
        self.started.set()
        try:
            while True:
                await trio.sleep(0.01)
                self.ticks += 1
                yield {"ticks": request.inputs["ticks"]}
        finally:
            self.saw_flag.append(request.is_cancelled())
            self.stopped.set()
            if self.fails:
                raise ValueError("boom in finally")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_stops_reading_is_cut_off_as_stalled(autojump_clock: Any, fails: bool) -> None:
    """Whatever the model makes of it."""
    model = Flood(fails=fails)
    async with serving(model, memory=True, limits=Limits(write_timeout=7)) as served:
        client = connect_lockstep(served)
        await client.send(post("streamer", "generate_stream", {"ticks": 1}))
        await client.head()
        await client.chunk()
        began = trio.current_time()
        await served.ended(1)
        assert trio.current_time() - began == pytest.approx(7, abs=0.1)
        assert served.cancelled() == {("client stalled", "streaming"): 1}
    assert model.saw_flag == [True], "the flag is up before the model is told by an exception"


async def test_a_client_that_reads_slowly_is_not_stalled(autojump_clock: Any) -> None:
    async with serving(Streamer(), memory=True, limits=Limits(write_timeout=7)) as served:
        client = connect_lockstep(served)
        await client.send(post("streamer", "generate_stream", {"ticks": 10}))
        await client.head()
        for _ in range(10):
            await trio.sleep(6)
            await client.chunk()
        assert await client.chunk() == b""
        await served.ended(1)
        assert served.outcomes() == {"completed": 1}


async def test_a_whole_answer_that_is_not_taken_is_stalled_too(autojump_clock: Any) -> None:
    async with serving(Echo(), memory=True, limits=Limits(write_timeout=7)) as served:
        client = connect_lockstep(served)
        await client.send(infer_echo(1))
        await served.ended(1)
        assert trio.current_time() == pytest.approx(7)
        assert served.cancelled() == {("client stalled", "sending"): 1}


async def test_a_client_that_leaves_before_it_is_told_of_an_error_has_left(autojump_clock: Any) -> None:
    async with serving(memory=True) as served:
        client = connect_lockstep(served)
        await client.send(get("/nowhere"))
        await client.close()
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "sending"): 1}


async def test_nothing_is_added_to_an_event_that_was_cut_in_the_middle(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be taken for the rest of the event."""
    async with serving(Flood(), memory=True, exit_timeout=3) as served:
        client = connect_lockstep(served)
        await client.send(post("streamer", "generate_stream", {"ticks": 1}))
        await client.head()
        assert len(await client.stream.receive_some(10)) == 10
        served.server.drain()
        await trio.sleep(3.1)  # the rest was not taken in time
        rest = b""
        with trio.move_on_after(10):
            while data := await client.stream.receive_some(1000):
                rest += data
        assert b"shutting down" not in rest
        await served.ended(1)
        assert served.cancelled() == {("shutdown", "streaming"): 1}
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "the stream would have noticed"
