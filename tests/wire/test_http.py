"""HTTP/1.1 as clients speak it: keep-alive, pipelining, methods, targets, bad bytes; over memory streams."""

from __future__ import annotations

import json
import zlib
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
import trio
import trio.testing

from support import Echo, Failing, Streamer, Ticker, get, infer_echo, infer_ticks, post, serving
from trio_infer import Limits

LIVE = get("/v2/health/live")


# -- Keep-alive and pipelining ----------------------------------------------------------------------------------------


async def test_a_connection_is_kept_through_successes_and_errors_alike() -> None:
    async with serving(Echo(), Failing(), memory=True) as served:
        client = served.connect_in_memory()
        for request, status in (
            (infer_echo(1), 200),
            (get("/nowhere"), 404),
            (get("/v2", method="DELETE"), 405),
            (post("echo", "infer", b"{"), 500),
            (post("nobody", "infer", {}), 404),
            (post("failing", "infer", {"inputs": []}), 500),
            (LIVE, 200),
        ):
            answer = await client.ask(request)
            assert answer.status == status
            assert "connection" not in answer.headers
        assert served.server.statistics().connections == 1


@pytest.mark.parametrize("count", [2, 10, 1000])
async def test_requests_in_one_segment_are_answered_each_and_in_order(count: int) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(b"".join(infer_echo(number) for number in range(count)))
        for number in range(count):
            assert (await client.answer()).json["outputs"][0]["data"] == [number]
        assert served.outcomes() == {"completed": count}


async def test_a_client_that_pipelines_lets_others_have_their_turn() -> None:
    async with serving(Echo(), memory=True) as served:
        greedy, modest = served.connect_in_memory(), served.connect_in_memory()
        await modest.ask(LIVE)
        await greedy.send(LIVE * 1000)
        await modest.ask(LIVE)
        assert served.outcomes()["completed"] < 50
        for _ in range(1000):
            await greedy.answer()


async def test_connection_close_is_honoured_and_echoed_and_the_rest_is_not_read() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(get("/v2/health/live", "Connection: close") + LIVE)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.at_end()
        assert served.outcomes() == {"completed": 1}


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
async def test_http_1_0_is_answered_and_closed(headers: tuple[str, ...]) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(
            post("echo", "infer", infer_echo(1).partition(b"\r\n\r\n")[2], *headers, version="1.0")
        )
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert answer.json["outputs"][0]["data"] == [1]
        assert await client.at_end()


async def test_http_1_0_needs_no_host() -> None:
    async with serving(memory=True) as served:
        assert (await served.connect_in_memory().ask(b"GET /v2/health/live HTTP/1.0\r\n\r\n")).status == 200


async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(autojump_clock: Any) -> None:
    async with serving(Streamer(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(post("streamer", "generate_stream", {"ticks": 2}, version="1.0"))
        head = await client.head()
        assert (head.status, head.headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in head.headers
        data = bytes(client._buffer)
        while piece := await client.stream.receive_some(1000):
            data += piece
        events = data.decode().split("\n\n")
        assert [json.loads(event.removeprefix("data: "))["ticks"] for event in events if event] == [0, 1]


# -- Methods and targets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v2", "/v2/models/echo", "/v2/health/live", "/nowhere", "/v2/models/echo/infer"])
async def test_head_has_the_length_of_get_and_no_body(path: str) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        full = await client.ask(get(path))
        await client.send(get(path, method="HEAD") + LIVE)
        head = await client.answer(to_head=True)
        assert (head.status, head.headers["content-length"]) == (full.status, str(len(full.body)))
        assert (await client.answer()).status == 200, "what follows the head is the next answer"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v2/health/live?x=/../y", 200),
        ("http://somewhere:80/v2/health/live", 200),
        ("HTTPS://somewhere/v2/health/live?q", 200),
        ("http://somewhere", 404),
        ("/v2/health/live/", 404),
        ("//v2/health/live", 404),
        ("/v2/models/%65cho", 404),
        ("*", 404),
    ],
)
async def test_targets_are_matched_raw_without_their_query(target: str, status: int) -> None:
    async with serving(Echo(), memory=True) as served:
        assert (await served.connect_in_memory().ask(get(target))).status == status


async def test_no_route_and_a_wrong_method_say_so_in_json() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        for request, status, message in (
            (get("/v2/"), 404, "Not Found"),
            (get("/v2", method="POST"), 405, "Method Not Allowed"),
            (get("/v2", method="OPTIONS"), 405, "Method Not Allowed"),
            (get("/v2", method="FOO"), 405, "Method Not Allowed"),
            (get("/v2/models/echo/infer"), 405, "Method Not Allowed"),
        ):
            answer = await client.ask(request)
            assert (answer.status, answer.json) == (status, {"error": message})
            assert answer.headers["content-type"] == "application/json"


async def test_connect_is_refused_and_switches_nothing() -> None:
    async with serving(memory=True) as served:
        client = served.connect_in_memory()
        assert (await client.ask(get("somewhere:443", method="CONNECT"))).status == 404
        assert (await client.ask(LIVE)).status == 200


async def test_an_upgrade_that_is_offered_is_ignored() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        await client.send(get("/v2/health/live", *upgrade) + post("echo", "infer", b"{", *upgrade) + LIVE)
        assert [(await client.answer()).status for _ in range(3)] == [200, 500, 200]


# -- Answers ----------------------------------------------------------------------------------------------------------


async def test_every_answer_is_dated_and_measured() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        for request in (LIVE, infer_echo(1), get("/v2"), get("/nowhere"), b"garbage\r\n\r\n"):
            answer = await client.ask(request)
            assert int(answer.headers["content-length"]) == len(answer.body)
            assert parsedate_to_datetime(answer.headers["date"]).tzinfo is not None


@pytest.mark.parametrize(("coding", "bits"), [("gzip", 31), ("deflate", 15)])
async def test_only_the_answers_of_infer_are_compressed(coding: str, bits: int) -> None:
    async with serving(Echo(), Failing(), memory=True) as served:
        client = served.connect_in_memory()
        accept = f"Accept-Encoding: {coding}"
        answer = await client.ask(post("echo", "infer", infer_echo(*range(500)).partition(b"\r\n\r\n")[2], accept))
        assert answer.headers["content-encoding"] == coding
        assert len(json.loads(zlib.decompress(answer.body, bits))["outputs"][0]["data"]) == 500
        for request in (
            get("/v2", accept),
            get("/v2/models/echo/config", accept),
            get("/nowhere", accept),
            post("echo", "infer", b"{", accept),
            post("failing", "infer", {"inputs": []}, accept),
        ):
            answer = await client.ask(request)
            assert "content-encoding" not in answer.headers
            answer.json  # noqa: B018  it is readable as it is


class Breaking(Streamer):
    """Gives one response, then raises."""

    async def infer(self, request: Any) -> Any:
        yield {"ticks": request.inputs["ticks"]}
        raise ValueError("boom-43")


async def test_an_error_in_mid_stream_is_an_event_and_then_the_proper_end() -> None:
    async with serving(Breaking(), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(post("streamer", "generate_stream", {"ticks": 7}))
        first, last, rest = answer.body.split(b"\n\n")
        assert (answer.status, rest) == (200, b"")
        assert json.loads(first.removeprefix(b"data: "))["ticks"] == 7
        assert "boom-43" in json.loads(last.removeprefix(b"data: "))["error"]
        assert (await client.ask(LIVE)).status == 200, "the connection lives on"
        assert served.outcomes() == {"failed": 1, "completed": 1}


# -- Bad bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"GET  HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n", 400),
        (b"GET /v2\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: abc\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (get("/" + 20_000 * "x"), 431),
        (get("/v2", "X: " + 100_000 * "x"), 431),
        (get("/v2", *(f"X-{number}: y" for number in range(5000))), 431),
    ],
)
async def test_what_is_not_http_is_answered_with_json_and_closed(data: bytes, status: int) -> None:
    async with serving(memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(data)
        assert answer.status == status
        words = {431: "the request's line and headers are longer than 16384 bytes"}
        assert answer.json["error"].startswith(words.get(status, "malformed HTTP request: "))
        assert answer.headers["connection"] == "close"
        await client.stream.send_eof()
        assert await client.at_end()
        assert served.outcomes() == {"failed" if status >= 500 else "rejected": 1}


@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 40_000])
async def test_the_bound_on_headers_is_the_same_however_they_are_cut(size: int) -> None:
    padding = size - len(get("/v2/health/live", "X: "))
    data = get("/v2/health/live", "X: " + padding * "x")
    assert len(data) == size
    for cut in (size, 1000, size - 1):
        async with serving(memory=True) as served:
            client = served.connect_in_memory()
            for start in range(0, size, cut):
                await client.send(data[start : start + cut])
                await trio.testing.wait_all_tasks_blocked()
            assert (await client.answer()).status == (200 if size <= 16_384 else 431)


@pytest.mark.parametrize("cut", [1, 2, 3, 1000])
async def test_blank_lines_before_a_request_are_passed_over(cut: int) -> None:
    data = b"\r\n" + LIVE + b"\r\n\r\n" + LIVE + b"\n" + infer_echo(1) + b"\r\n"
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        for start in range(0, len(data), cut):
            await client.send(data[start : start + cut])
            await trio.testing.wait_all_tasks_blocked()
        assert [(await client.answer()).status for _ in range(3)] == [200, 200, 200]
        assert (await client.ask(LIVE)).status == 200
        assert served.outcomes() == {"completed": 4}


async def test_a_bad_request_behind_a_good_one_does_not_spoil_it(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer_ticks(3) + b"rubbish\r\n\r\n")
        assert (await client.answer()).json["outputs"][0]["data"] == [3]
        assert (await client.answer()).status == 400
        assert served.outcomes() == {"completed": 1, "rejected": 1}


async def test_headers_that_are_too_long_in_all_are_bounded_by_the_operators_limit() -> None:
    async with serving(memory=True, limits=Limits(max_header_size=100)) as served:
        assert (await served.connect_in_memory().ask(LIVE)).status == 200
        assert (await served.connect_in_memory().ask(get("/v2/health/live", "X: " + 80 * "x"))).status == 431
