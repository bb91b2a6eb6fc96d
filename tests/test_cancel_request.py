"""Requests that are cancelled by their id, from another connection."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from support import Client, Served, Streamer, Ticker, get, post, serving

LIVE = get("/v2/health/live")


def named(request_id: str, model: str = "ticker", action: str = "generate") -> bytes:
    """A request that takes its time and has an id."""
    return post(model, action, {"id": request_id, "ticks": 1000})


async def ask_cancel(served: Served, document: object, path: str = "ticker") -> Any:
    client = served.connect_in_memory()
    answer = await client.ask(post(path, "cancel", document))
    await client.close()
    return answer


async def test_all_requests_with_the_id_are_stopped_wherever_they_are_and_no_others(autojump_clock: Any) -> None:
    ticker = Ticker(instances=1)
    async with serving(ticker, memory=True) as served:
        running, queued, other = (served.connect_in_memory() for _ in range(3))
        await running.send(named("a"))
        await ticker.started.wait()
        await queued.send(named("a"))
        await other.send(named("b"))
        await trio.sleep(1)
        assert (await ask_cancel(served, {"id": "a"})).json == {"cancelled": 2}
        for client, phase in ((running, "running"), (queued, "queued")):
            answer = await client.answer()
            assert (answer.status, answer.headers["content-type"]) == (499, "application/json")
            assert answer.json == {"error": f"cancelled by request while {phase}"}
            assert (await client.ask(LIVE)).status == 200
        assert ticker.saw_flag == [True]
        assert ticker.runs == 2
        await other.close()
        await served.ended(6)
        assert served.cancelled() == {
            ("cancel requested", "running"): 1,
            ("cancel requested", "queued"): 1,
            ("client disconnected", "running"): 1,
        }


async def test_a_stream_ends_with_an_event_that_says_so(autojump_clock: Any) -> None:
    async with serving(Streamer(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(named("a", "streamer", "generate_stream"))
        await trio.sleep(0.525)
        assert (await ask_cancel(served, {"id": "a"}, "streamer/versions/1")).json == {"cancelled": 1}
        *_, last, rest = (await client.answer()).body.split(b"\n\n")
        assert rest == b""
        assert json.loads(last.removeprefix(b"data: ")) == {"error": "cancelled by request while streaming"}
        assert (await client.ask(LIVE)).status == 200


async def test_a_request_of_another_model_or_another_id_is_not_found(autojump_clock: Any) -> None:
    ticker = Ticker()
    async with serving(ticker, Streamer(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(named("a"))
        await ticker.started.wait()
        answer = await ask_cancel(served, {"id": "a"}, "streamer")
        assert answer.status == 404
        assert answer.json == {"error": "no request with id 'a' of model 'streamer' is in flight"}
        answer = await ask_cancel(served, {"id": "x" * 5000})
        assert answer.status == 404
        assert len(answer.body) < 400
        answer = await ask_cancel(served, {"id": "a"}, "ticker/versions/7")
        assert answer.json == {"error": "Request for unknown model: 'ticker' version 7 is not found"}
        answer = await ask_cancel(served, {"id": "a"}, "nobody")
        assert answer.status == 404
        assert ticker.cancelled == 0
        await client.close()


@pytest.mark.parametrize("document", [{}, {"id": ""}, {"id": 7}, {"id": None}, {"ID": "a"}])
async def test_an_id_must_be_given(autojump_clock: Any, document: object) -> None:
    async with serving(Ticker(), memory=True) as served:
        nameless = served.connect_in_memory()
        await nameless.send(named(""))
        await trio.sleep(1)
        answer = await ask_cancel(served, document)
        assert answer.status == 400
        assert answer.json["error"].startswith("'id' must be the id of a request, a string that is not empty; got ")
        await nameless.close()


@pytest.mark.parametrize("body", [b"", b"[]", b"{"])
async def test_what_is_no_json_object_is_refused_like_everywhere(autojump_clock: Any, body: bytes) -> None:
    async with serving(Ticker(), memory=True) as served:
        assert (await ask_cancel(served, body)).status == 500


async def test_over_real_sockets_a_second_client_stops_the_first() -> None:
    ticker = Ticker()
    async with serving(ticker) as served:
        first: Client = await served.connect()
        second: Client = await served.connect()
        await first.send(named("a"))
        await ticker.started.wait()
        assert (await second.ask(post("ticker", "cancel", {"id": "a"}))).json == {"cancelled": 1}
        assert (await first.answer()).status == 499
        await first.close()
        await second.close()
