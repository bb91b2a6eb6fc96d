"""However bytes are cut, the answers are the same; whatever the bytes are, the server lives and its books balance."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
import trio
import trio.testing
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support import Client, Echo, Failing, get, infer_echo, post, serving
from trio_infer import Limits
from trio_infer.wire.connection import STRAIGHT

LIVE = get("/v2/health/live")
BODY = infer_echo(1, 2, 3).partition(b"\r\n\r\n")[2]
PIECES = [BODY[start : start + 9] for start in range(0, len(BODY), 9)]
CHUNKS = (
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%X;a=b\r\n%b\r\n" % (len(piece), piece) for piece in PIECES)
    + b"0\r\nTrailer: yes\r\n\r\n"
)
TENSOR = np.arange(STRAIGHT // 4, dtype="f4").tobytes()
LARGE_JSON = json.dumps(
    {
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [STRAIGHT // 4],
                "parameters": {"binary_data_size": len(TENSOR)},
            }
        ]
    }
).encode()
LARGE = post("echo", "infer", LARGE_JSON + TENSOR, f"Inference-Header-Content-Length: {len(LARGE_JSON)}")

CONVERSATION = (
    (infer_echo(1, 2, 3), False),
    (CHUNKS, False),
    (LARGE, False),
    (get("/v2/models/echo"), False),
    (get("/v2", method="HEAD"), True),
    (b"\r\n" + post("nobody", "infer", b"skipped"), False),
    (LARGE, False),
    (post("failing", "infer", {"inputs": []}, "Accept-Encoding: gzip"), False),
    (get("/nowhere", "Connection: close"), False),
)
STREAM = b"".join(request for request, _ in CONVERSATION)


async def converse(pieces: list[bytes]) -> list[tuple[int, dict[str, str], bytes]]:
    answers = []
    async with serving(Echo(), Failing(), memory=True) as served:
        client = served.connect_in_memory()
        for piece in pieces:
            await client.send(piece)
            await trio.testing.wait_all_tasks_blocked()
        for _, to_head in CONVERSATION:
            answer = await client.answer(to_head=to_head)
            del answer.headers["date"]
            answers.append((answer.status, answer.headers, answer.body))
        assert await client.at_end()
        assert served.outcomes() == {"completed": 6, "rejected": 2, "failed": 1}
    return answers


EXPECTED: list[Any] = []


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
@example(list(range(0, len(STREAM), 1000)))
@example(list(range(len(infer_echo(1, 2, 3) + CHUNKS) + 200)))
def test_the_answers_do_not_depend_on_how_the_bytes_are_cut(cuts: list[int]) -> None:
    if not EXPECTED:
        EXPECTED.extend(trio.run(converse, [STREAM]))
        assert [status for status, _, _ in EXPECTED] == [200, 200, 200, 200, 200, 404, 200, 500, 404]
    edges = sorted({0, len(STREAM), *cuts})
    assert trio.run(converse, [STREAM[start:end] for start, end in pairwise(edges)]) == EXPECTED


ANSWER = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [^\r\n]*\r\n((?:[!-9;-~]+: [^\r\n]*\r\n)*)\r\n")


def take_answers(data: bytes) -> list[int]:
    """The statuses of answers that follow each other; checks that they are whole, and their errors JSON."""
    statuses = []
    while data:
        match = ANSWER.match(data)
        assert match, data[:200]
        status, length = int(match[1]), re.search(rb"^content-length: ([0-9]+)", match[2], re.MULTILINE)
        data = data[match.end() :]
        if status != 100:
            assert length, match[2]
            size = int(length[1])
            if data[:5] != b"HTTP/" or not size:  # an answer to HEAD has a length and no body
                body, data = data[:size], data[size:]
                if len(body) < size:
                    assert not body, "only an answer to HEAD may do without"
                elif status >= 400 and size:
                    assert isinstance(json.loads(body)["error"], str)
        statuses.append(status)
    return statuses


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A conversation with bytes changed, dropped, doubled or put in."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from([request for request, _ in CONVERSATION]), max_size=3))))
    for _ in range(draw(st.integers(0, 8))):
        where = min(draw(st.one_of(st.integers(0, 400), st.integers(0, len(STREAM)))), len(data))
        size = draw(st.integers(0, 20))
        data[where : where + size] = draw(
            st.one_of(
                st.binary(max_size=20),
                st.just(bytes(data[where : where + size]) * 2),
                st.sampled_from(
                    [
                        b"\r\n",
                        b"\n",
                        b"\r\n\r\n",
                        b"\0",
                        b":",
                        b" ",
                        b"Content-Length: 5\r\n",
                        b"Expect: 100-continue\r\n",
                    ]
                ),
                st.sampled_from(
                    [
                        b"Transfer-Encoding: chunked\r\n",
                        b"0\r\n\r\n",
                        b"HTTP/1.0",
                        b"Upgrade: x\r\n",
                        b"HEAD",
                        b"CONNECT",
                    ]
                ),
            )
        )
    return bytes(data)


async def feed(data: bytes, cut: int) -> None:
    async with serving(Echo(), Failing(), memory=True, limits=Limits(linger_timeout=1)) as served:
        client = served.connect_in_memory()
        received = bytearray()

        async def receive() -> None:
            async for piece in client.stream:
                received.extend(piece)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for piece in (data[:cut], data[cut:]):
                await client.send(piece)
                await trio.testing.wait_all_tasks_blocked()
            await client.stream.send_eof()
        take_answers(bytes(received))
        other: Client = served.connect_in_memory()
        assert (await other.ask(LIVE)).status == 200
        await trio.testing.wait_all_tasks_blocked()
        assert served.server.statistics().connections == 1


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(mutated(), st.binary(max_size=300)), st.integers(0, 2000))
def test_whatever_the_bytes_are_each_answer_is_http_and_the_books_balance(data: bytes, cut: int) -> None:
    trio.run(feed, data, cut, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, len(STREAM)), st.booleans())
def test_a_client_that_leaves_anywhere_in_a_conversation_leaves_nothing_behind(where: int, polite: bool) -> None:
    async def leave() -> None:
        async with serving(Echo(), Failing(), memory=True) as served:
            client = served.connect_in_memory()
            await client.send(STREAM[:where])
            if polite:
                await trio.testing.wait_all_tasks_blocked()
            await client.close()
            await trio.testing.wait_all_tasks_blocked()
            assert served.server.statistics().connections == 0

    trio.run(leave, clock=trio.testing.MockClock(autojump_threshold=0))
