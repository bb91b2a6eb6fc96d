"""Request bodies: chunks, `Expect`, large ones that go round h11, and those that nobody reads; over memory streams."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from support import Echo, Ticker, get, infer_echo, infer_ticks, post, serving
from trio_infer import Limits
from trio_infer.wire.connection import DRAIN, MAX_CHUNKS, STRAIGHT

LIVE = get("/v2/health/live")
DOCUMENT = infer_echo(1, 2, 3).partition(b"\r\n\r\n")[2]


def head(action: str, *headers: str, version: str = "1.1") -> bytes:
    """The head of a request whose body is the test's own."""
    return "\r\n".join([f"POST /v2/models/{action} HTTP/{version}", "Host: test", *headers, "", ""]).encode()


def chunked(data: bytes, size: int, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    framed = [b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces]
    return b"".join(framed) + b"0\r\n" + trailer + b"\r\n"


CHUNKED = head("echo/infer", "Transfer-Encoding: chunked")


def binary(values: int) -> tuple[bytes, bytes]:
    """An inference whose tensor and answer are binary: the request, and the tensor's bytes."""
    tensor = np.arange(values, dtype="f4").tobytes()
    document = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [values], "parameters": {"binary_data_size": len(tensor)}}
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(document).encode()
    return post("echo", "infer", text + tensor, f"Inference-Header-Content-Length: {len(text)}"), tensor


# -- Chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("extension", [b"", b";name=value", b'; quoted="a b"'])
@pytest.mark.parametrize("trailer", [b"", b"Checksum: 1\r\n"])
async def test_a_body_in_chunks_is_a_body(size: int, extension: bytes, trailer: bytes) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        for _ in range(2):
            answer = await client.ask(CHUNKED + chunked(DOCUMENT, size, extension, trailer))
            assert answer.json["outputs"][0]["data"] == [1, 2, 3]


@pytest.mark.parametrize("length", [0, 5, 10**6, 10**15])
async def test_chunks_win_over_a_length_and_the_connection_is_closed_afterwards(length: int) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        request = head("echo/infer", f"Content-Length: {length}", "Transfer-Encoding: chunked")
        answer = await client.ask(request + chunked(DOCUMENT, 1000))
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.at_end()


async def test_so_many_chunks_are_taken_and_no_more() -> None:
    """Also if they are counted in segments that end between a chunk's size and its data."""
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        padded = DOCUMENT + b" " * (MAX_CHUNKS - len(DOCUMENT))
        await client.send(CHUNKED + b"1\r\n")
        await trio.testing.wait_all_tasks_blocked()
        assert (await client.ask(chunked(padded, 1)[3:])).status == 200
        await client.send(CHUNKED + b"1\r\n")
        await trio.testing.wait_all_tasks_blocked()
        answer = await client.ask(chunked(padded + b" ", 1)[3:])
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert answer.json["error"] == (
            "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."
        )


async def test_tiny_chunks_do_not_keep_others_waiting() -> None:
    async with serving(Echo(), memory=True) as served:
        greedy, modest = served.connect_in_memory(), served.connect_in_memory()
        await modest.ask(LIVE)
        await greedy.send(CHUNKED + chunked(DOCUMENT + b" " * 20_000, 1))
        for _ in range(10):
            await modest.ask(LIVE)
        assert served.outcomes() == {"completed": 11}
        assert (await greedy.answer()).status == 200


async def test_chunks_may_not_add_up_to_more_than_the_limit() -> None:
    async with serving(Echo(), memory=True, limits=Limits(http_max_input_size=1000)) as served:
        client = served.connect_in_memory()
        answer = await client.ask(CHUNKED + chunked(b" " * 1001, 100))
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert "exceeds the maximum allowed size of 1000 bytes" in answer.json["error"]
        padded = DOCUMENT + b" " * (1000 - len(DOCUMENT))
        assert (await served.connect_in_memory().ask(CHUNKED + chunked(padded, 100))).status == 200


@pytest.mark.parametrize("bad", [b"xyz\r\n", b"-1\r\n", b"5\r\nabcdefgh\r\n", b"F" * 30 + b"\r\n"])
async def test_chunks_that_are_none_are_a_bad_request(bad: bytes) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(CHUNKED + bad)
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert "malformed HTTP request" in answer.json["error"]


async def test_a_post_without_a_body_is_one_with_an_empty_body() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        for request in (
            head("echo/generate"),
            head("echo/generate", "Content-Length: 0"),
            head("echo/generate", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        ):
            answer = await client.ask(request)
            assert answer.status == 500
            assert "zero-length" in answer.json["error"]
        assert (await client.ask(LIVE)).status == 200


# -- Expect: 100-continue ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_permission_is_given_at_once_where_the_body_is_wanted(framing: str) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        how = "Transfer-Encoding: chunked" if framing == "chunks" else f"Content-Length: {len(DOCUMENT)}"
        assert (await client.ask(head("echo/infer", how, "Expect: 100-continue"))).status == 100
        answer = await client.ask(chunked(DOCUMENT, 1000) if framing == "chunks" else DOCUMENT)
        assert answer.json["outputs"][0]["data"] == [1, 2, 3]
        assert (await client.ask(LIVE)).status == 200


async def test_permission_is_given_for_large_bodies_too() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        request, tensor = binary(STRAIGHT)
        top, _, body = request.partition(b"\r\n\r\n")
        assert (await client.ask(top + b"\r\nExpect: 100-continue\r\n\r\n")).status == 100
        assert (await client.ask(body)).body.endswith(tensor)


@pytest.mark.parametrize(("action", "length", "status"), [("nobody/infer", 10, 404), ("echo/infer", 10**9, 400)])
async def test_a_refusal_takes_the_place_of_the_permission(action: str, length: int, status: int) -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(head(action, f"Content-Length: {length}", "Expect: 100-continue"))
        assert (answer.status, answer.headers["connection"]) == (status, "close")


async def test_http_1_0_is_never_told_to_continue() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        request = head("echo/infer", f"Content-Length: {len(DOCUMENT)}", "Expect: 100-continue", version="1.0")
        assert (await client.ask(request + DOCUMENT)).status == 200


async def test_expecting_something_without_a_body_costs_nothing() -> None:
    async with serving(memory=True) as served:
        client = served.connect_in_memory()
        for _ in range(2):
            answer = await client.ask(get("/v2/health/live", "Expect: 100-continue"))
            assert (answer.status, answer.headers.get("connection")) == (200, None)


# -- Bodies that nobody reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100, STRAIGHT, DRAIN])
async def test_a_small_body_that_was_refused_is_skipped_and_the_connection_kept(size: int) -> None:
    async with serving(memory=True) as served:
        client = served.connect_in_memory()
        await client.send(post("nobody", "infer", b"x" * size) + LIVE)
        refusal = await client.answer()
        assert (refusal.status, refusal.headers.get("connection")) == (404, None)
        assert (await client.answer()).status == 200


async def test_a_large_body_that_was_refused_ends_the_connection(autojump_clock: Any) -> None:
    async with serving(memory=True, limits=Limits(linger_timeout=3)) as served:
        for framing in (f"Content-Length: {DRAIN + 1}", "Transfer-Encoding: chunked"):
            client = served.connect_in_memory()
            answer = await client.ask(head("nobody/infer", framing))
            assert (answer.status, answer.headers["connection"]) == (404, "close")
            before = trio.current_time()
            assert await client.at_end(), "we say at once that no more is coming from us"
            assert trio.current_time() == before
            await trio.sleep(2.9)
            await client.send(b"still sending, and not reset")
            await trio.sleep(0.2)
            with pytest.raises(trio.BrokenResourceError):
                await client.send(b"too long")


async def test_skipping_a_body_ends_when_the_client_leaves(autojump_clock: Any) -> None:
    async with serving(memory=True) as served:
        client = served.connect_in_memory()
        assert (await client.ask(post("nobody", "infer", b"x" * 100)[:-50])).status == 404
        await client.close()
        await trio.testing.wait_all_tasks_blocked()
        assert served.server.statistics().connections == 0
        assert served.outcomes() == {"rejected": 1}


# -- Bodies that go round h11 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [STRAIGHT // 4 - 100, STRAIGHT // 4, STRAIGHT, 500_000])
@pytest.mark.parametrize("piece", [1000, 65_536, 10**9])
async def test_a_large_body_arrives_whole_and_others_follow_on_the_connection(values: int, piece: int) -> None:
    request, tensor = binary(values)
    data = request + infer_echo(7) + request + LIVE
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()

        async def send() -> None:
            for start in range(0, len(data), piece):
                await client.send(data[start : start + piece])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert (await client.answer()).body.endswith(tensor)
            assert (await client.answer()).json["outputs"][0]["data"] == [7]
            assert (await client.answer()).body.endswith(tensor)
            assert (await client.answer()).status == 200
        assert served.outcomes() == {"completed": 4}


def large_ticks(ticks: int) -> bytes:
    _, _, body = infer_ticks(ticks).partition(b"\r\n\r\n")
    body += b" " * STRAIGHT
    return post("ticker", "infer", body)


@pytest.mark.parametrize("behind", [0, 1, 10, 65_536])
async def test_the_next_request_behind_a_large_body_is_pipelined_wherever_it_was_cut(
    autojump_clock: Any, behind: int
) -> None:
    """The sentinel disarms at the first byte of a next request, so a hang-up behind it does not cancel."""
    model = Ticker()
    async with serving(model, memory=True) as served:
        client = served.connect_in_memory()
        first, second = large_ticks(3), large_ticks(3)
        await client.send(first + second[:behind])
        await trio.sleep(0.06)
        await client.stream.send_eof()
        if behind:
            assert (await client.answer()).status == 200
        await served.ended(2 if behind else 1)
        expected = {"receiving"} if behind else {"running"}
        assert {phase for _, phase in served.cancelled()} == expected
    assert model.runs == 1


async def test_requests_that_were_read_ahead_are_answered_in_order(autojump_clock: Any) -> None:
    async with serving(Ticker(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(large_ticks(4))
        await trio.sleep(0.05)
        await client.send(infer_ticks(1)[:30])
        await trio.sleep(0.05)
        await client.send(infer_ticks(1)[30:] + large_ticks(2))
        assert [(await client.answer()).json["outputs"][0]["data"] for _ in range(3)] == [[4], [1], [2]]


@pytest.mark.parametrize("sent", [0, 1, STRAIGHT - 1])
async def test_a_large_body_that_is_cut_in_the_middle_never_reaches_the_model(autojump_clock: Any, sent: int) -> None:
    model = Ticker()
    async with serving(model, memory=True) as served:
        client = served.connect_in_memory()
        top, _, body = large_ticks(3).partition(b"\r\n\r\n")
        await client.send(top + b"\r\n\r\n" + body[:sent])
        await trio.sleep(1)
        await client.close()
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "receiving"): 1}
    assert model.runs == 0


@pytest.mark.parametrize("binary", [("Inference-Header-Content-Length: 100",), ()])
async def test_a_body_larger_than_the_bound_is_refused_when_it_is_announced(binary: tuple[str, ...]) -> None:
    async with serving(Echo(), memory=True, limits=Limits(max_body_size=1_000_000)) as served:
        client = served.connect_in_memory()
        answer = await client.ask(head("echo/infer", "Content-Length: 1000001", *binary))
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert "--max-body-size" in answer.json["error"]


async def test_bytes_that_come_one_by_one_are_a_request_too() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        for byte in infer_echo(1):
            await client.send(bytes([byte]))
            await trio.testing.wait_all_tasks_blocked()
        assert (await client.answer()).status == 200
