"""The server as an embedder meets it: what it refuses, and what it says when a model misbehaves."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import trio

from support import Echo, Streamer, infer_echo, infer_ticks, serving
from trio_infer import InferRequest, ModelLoadError, Server


@pytest.mark.parametrize("thing", [Echo, object(), "echo"])
def test_what_is_no_model_is_refused_by_name(thing: Any) -> None:
    with pytest.raises(ModelLoadError, match="models are objects of subclasses of"):
        Server([thing])


def test_one_name_and_version_can_be_served_once() -> None:
    with pytest.raises(ModelLoadError, match="version 1 is given twice"):
        Server([Echo(), Echo()])


async def test_a_server_serves_once(autojump_clock: Any) -> None:
    async with serving(Echo(), memory=True) as served:
        served.server.drain()
        await served.finished.wait()
        with pytest.raises(RuntimeError, match="serves once"):
            await served.server.serve(listeners=[])


async def test_a_model_that_does_not_load_stops_the_start_and_the_others_are_unloaded() -> None:
    class Fine(Echo):
        name = "fine"
        unloaded = 0

        async def unload(self) -> None:
            self.unloaded += 1

    class Broken(Echo):
        async def load(self) -> None:
            raise ValueError("no weights")

    fine = Fine()
    with pytest.raises(ModelLoadError, match="ValueError: no weights"):
        await Server([fine, Broken()]).serve(port=0)
    assert fine.unloaded == 1


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "must give a mapping of outputs or an InferResponse, got NoneType"),
        ({"z": 1.0}, "'x'"),
    ],
)
async def test_a_model_that_gives_the_wrong_thing_is_told_to_client_and_log(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture, output: Any, words: str
) -> None:
    class Wrong(Echo):
        async def infer(self, request: Any) -> Any:
            return output

    async with serving(Wrong(), memory=True) as served:
        answer = await served.connect_in_memory().ask(infer_echo(1.0))
    assert answer.status == 500
    assert words in answer.json["error"]
    assert [record.levelname for record in caplog.records if "is ready" not in record.message] == ["ERROR"]
    assert words in caplog.text
    assert "Traceback" not in caplog.text


async def test_of_several_errors_at_once_the_client_is_told_one_and_the_log_has_all(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Twice(Echo):
        async def infer(self, request: Any) -> Any:
            async def fail(error: Exception) -> None:
                raise error

            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail, ValueError("boom-1"))
                nursery.start_soon(fail, KeyError("boom-2"))

    async with serving(Twice(), memory=True) as served:
        answer = await served.connect_in_memory().ask(infer_echo(1.0))
    assert answer.status == 500
    assert answer.json["error"] in {"ValueError: boom-1", "KeyError: 'boom-2'"}
    assert "boom-1" in caplog.text
    assert "boom-2" in caplog.text
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


class Exiting(Echo):
    name = "echo"

    async def infer(self, request: InferRequest) -> Any:
        sys.exit("had enough")


async def test_a_model_that_exits_fails_its_request_and_not_the_server() -> None:
    async with serving(Exiting(), memory=True) as served:
        client = served.connect_in_memory()
        for _ in range(2):
            answer = await client.ask(infer_echo(1))
            assert (answer.status, answer.json["error"]) == (500, "the model left by SystemExit: had enough")


async def test_a_decoupled_model_is_refused_with_the_endpoint_to_use() -> None:
    async with serving(Streamer(), memory=True) as served:
        answer = await served.connect_in_memory().ask(infer_ticks(1, model="streamer"))
        assert answer.status == 501
        assert answer.json["error"].startswith(
            "HTTP end point doesn't support models with decoupled transaction policy"
        )
        assert "use its generate_stream" in answer.json["error"]
