"""The HTTP clients that people use, unchanged, against a real server: requests, httpx and curl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import requests
import trio

from support import Echo, Served, Streamer, Ticker, needs, serving

ECHO = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, -2]}]}
TICKS = {"inputs": [{"name": "ticks", "datatype": "INT32", "shape": [1], "data": [200]}]}
LEFT = {("client disconnected", "running"): 1}


def url(served: Served, path: str) -> str:
    return f"http://127.0.0.1:{served.port}/v2/models/{path}"


async def in_thread(call: Callable[[], Any]) -> Any:
    with trio.fail_after(20):
        return await trio.to_thread.run_sync(call)


async def test_requests_gets_its_answer_and_keeps_its_connection() -> None:
    async with serving(Echo()) as served:

        def talk() -> list[Any]:
            with requests.Session() as session:
                return [session.post(url(served, "echo/infer"), json=ECHO, timeout=10) for _ in range(3)]

        answers = await in_thread(talk)
        assert [answer.json()["outputs"][0]["data"] for answer in answers] == [[1.5, -2.0]] * 3
        assert served.server.statistics().requests.received == 3


async def test_requests_may_announce_chunks_and_a_length_at_once() -> None:
    """A hand-written Transfer-Encoding beside the Content-Length that requests adds: the chunks count."""
    body = json.dumps(ECHO).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with serving(Echo()) as served:
        answer = await in_thread(
            lambda: requests.post(
                url(served, "echo/infer"), data=chunked, headers={"Transfer-Encoding": "chunked"}, timeout=10
            )
        )
    assert answer.json()["outputs"][0]["data"] == [1.5, -2.0]


async def test_a_timeout_of_requests_stops_the_model() -> None:
    model = Ticker()
    async with serving(model) as served:

        def give_up() -> None:
            with pytest.raises(requests.Timeout):
                requests.post(url(served, "ticker/infer"), json=TICKS, timeout=0.3)

        await in_thread(give_up)
        await model.stopped.wait()
        await served.ended(1)
        assert served.cancelled() == LEFT
    assert model.ticks < 12


async def test_requests_reads_a_stream_event_by_event_and_may_leave_it() -> None:
    model = Streamer()
    async with serving(model) as served:

        def read() -> list[dict[str, Any]]:
            with requests.post(
                url(served, "streamer/generate_stream"), json={"ticks": 200}, stream=True, timeout=10
            ) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                lines = (line for line in answer.iter_lines() if line)
                return [json.loads(next(lines).removeprefix(b"data: ")) for _ in range(3)]

        events = await in_thread(read)
        assert [event["ticks"] for event in events] == [0, 1, 2]
        with trio.fail_after(5):
            await model.stopped.wait()
            await served.ended(1)
        assert served.cancelled() == {("client disconnected", "streaming"): 1}
    assert model.ticks < 12


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
async def test_a_cancelled_task_of_httpx_stops_the_model(action: str) -> None:
    model = Ticker()
    async with serving(model) as served, httpx.AsyncClient(timeout=None) as client:
        with trio.move_on_after(5) as scope:
            async with trio.open_nursery() as nursery:
                document = TICKS if action == "infer" else {"ticks": 200}
                nursery.start_soon(lambda: client.post(url(served, f"ticker/{action}"), json=document))
                await model.started.wait()
                nursery.cancel_scope.cancel()
            await model.stopped.wait()
            await served.ended(1)
            assert served.cancelled() == LEFT
        assert not scope.cancelled_caught
        answer = await client.get(f"http://127.0.0.1:{served.port}/v2/health/ready")
        assert answer.status_code == 200, "the client object stays usable"


async def test_httpx_reads_a_whole_stream() -> None:
    async with (
        serving(Streamer()) as served,
        httpx.AsyncClient() as client,
        client.stream("POST", url(served, "streamer/generate_stream"), json={"ticks": 3}) as answer,
    ):
        lines = [line async for line in answer.aiter_lines() if line]
    assert [json.loads(line.removeprefix("data: "))["ticks"] for line in lines] == [0, 1, 2]


def curl(*words: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["curl", "-sS", *words], input=data, capture_output=True, check=False, timeout=20)


@needs("curl")
async def test_curl_infers_from_its_form_content_type_and_unpacks_what_it_asked_for() -> None:
    async with serving(Echo()) as served:
        done = await in_thread(lambda: curl("--compressed", url(served, "echo/infer"), "-d", json.dumps(ECHO)))
    assert json.loads(done.stdout)["outputs"][0]["data"] == [1.5, -2.0]


@needs("curl")
async def test_curl_waits_for_no_second_to_send_a_large_body() -> None:
    """Over 1 MiB it sends `Expect: 100-continue`, and would wait a second for an answer to that."""
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [400_000], "data": [1.25] * 400_000}]}
    async with serving(Echo()) as served:
        words = ["-o", "/dev/null", "-w", "%{http_code} %{time_pretransfer} %{time_starttransfer}", "-v"]
        done = await in_thread(
            lambda: curl(*words, url(served, "echo/infer"), "--data-binary", "@-", data=json.dumps(document).encode())
        )
    assert done.stdout.startswith(b"200"), done
    assert b"Expect: 100-continue" in done.stderr
    assert b"HTTP/1.1 100" in done.stderr


@needs("curl")
async def test_curl_that_gives_up_stops_the_model() -> None:
    model = Ticker()
    async with serving(model) as served:
        done = await in_thread(lambda: curl("-m", "0.3", url(served, "ticker/infer"), "-d", json.dumps(TICKS)))
        assert done.returncode == 28, "curl's own number for a time-out"
        with trio.fail_after(5):
            await model.stopped.wait()
            await served.ended(1)
        assert served.cancelled() == LEFT
