"""`/v2/logging` and trace settings, as Triton's clients change them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import tritonclient.http

from command import Command
from support import Echo, Ticker, get, post, serving
from trio_infer.observe.log_settings import LogSettings
from trio_infer.observe.trace_settings import DEFAULTS, TraceSettings


@pytest.fixture
def levels_restored() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("trio_infer")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def change(path: str, document: object) -> bytes:
    return post("x", "y", document).replace(b"/v2/models/x/y", path.encode(), 1)


@pytest.mark.usefixtures("levels_restored")
async def test_the_log_is_changed_while_the_server_runs() -> None:
    async with serving(Echo(), memory=True, logs=LogSettings()) as served:
        client = served.connect_in_memory()
        shown = (await client.ask(get("/v2/logging"))).json
        assert shown == {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }
        answer = await client.ask(
            change("/v2/logging", {"log_verbose_level": 1, "log_format": "ISO8601", "log_info": None})
        )
        assert answer.json == shown | {"log_verbose_level": 1, "log_format": "ISO8601"}
        assert logging.getLogger("trio_infer.model.m").isEnabledFor(logging.DEBUG)
        for document, status, error in (
            ({"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
            ({"log_format": "x", "log_verbose_level": 7}, 503, "invalid argument for --log_format, got: x"),
            (
                {"log_info": "no", "log_verbose_level": 7},
                500,
                "Unable to parse 'log_info': attempt to access JSON non-b",
            ),
            (
                {"log_verbose_level": -1},
                500,
                "Unable to parse 'log_verbose_level': attempt to access JSON non-unsigned",
            ),
            ({"volume": 11}, 400, "unknown log setting 'volume'"),
            (b"{", 500, "failed to parse the request JSON buffer"),
        ):
            answer = await client.ask(change("/v2/logging", document))
            assert answer.status == status
            assert answer.json["error"].startswith(error)
        assert (await client.ask(get("/v2/logging"))).json["log_verbose_level"] == 1
        assert (await client.ask(get("/v2/logging", method="PUT"))).status == 405


async def test_in_a_program_of_its_own_logging_is_not_the_servers() -> None:
    async with serving(Echo(), memory=True) as served:
        answer = await served.connect_in_memory().ask(get("/v2/logging"))
        assert answer.status == 503
        assert answer.json["error"].startswith("the server does not support dynamic logging")


async def test_trace_settings_of_the_server_and_of_a_model() -> None:
    traces = TraceSettings({"trace_rate": "7"})
    async with serving(Echo(), Ticker(), memory=True, traces=traces) as served:
        client = served.connect_in_memory()
        assert (await client.ask(get("/v2/trace/setting"))).json == DEFAULTS | {"trace_rate": "7"}
        one = "/v2/models/echo/trace/setting"
        answer = await client.ask(change(one, {"trace_rate": "1", "trace_level": ["TIMESTAMPS"]}))
        assert answer.json == DEFAULTS | {"trace_rate": "1", "trace_level": ["TIMESTAMPS"]}
        assert (await client.ask(get("/v2/models/ticker/trace/setting"))).json["trace_rate"] == "7"
        answer = await client.ask(change(one, {"trace_rate": None}))
        assert (answer.json["trace_rate"], answer.json["trace_level"]) == ("7", ["TIMESTAMPS"])
        for path, status, error in (
            ("/v2/models/nobody/trace/setting", 400, "Request for unknown model : nobody"),
            ("/v2/models/echo/versions/1/trace/setting", 404, "Not Found"),
        ):
            answer = await client.ask(get(path))
            assert (answer.status, answer.json) == (status, {"error": error})
        answer = await client.ask(change(one, {"trace_file": "x"}))
        assert answer.status == 501


@pytest.mark.usefixtures("levels_restored")
async def test_tritonclient_changes_both() -> None:
    async with serving(Echo(), logs=LogSettings()) as served:

        def talk() -> None:
            with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
                settings = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "3"}
                assert client.update_trace_settings("echo", settings)["trace_rate"] == "3"
                assert client.get_trace_settings()["trace_level"] == ["OFF"]
                assert client.update_trace_settings("echo", {"trace_level": None, "trace_rate": None}) == DEFAULTS
                with pytest.raises(tritonclient.http.InferenceServerException, match="unknown model : nobody"):
                    client.get_trace_settings("nobody")
                assert client.update_log_settings({"log_verbose_level": 2})["log_verbose_level"] == 2
                assert client.get_log_settings()["log_format"] == "default"
                extensions = client.get_server_metadata()["extensions"]
                assert {"trace", "logging"} <= set(extensions)

        await trio.to_thread.run_sync(talk)


def test_the_command_logs_to_a_file_in_the_form_that_it_is_told(tmp_path: Path) -> None:
    file = tmp_path / "log"
    command = Command.start(
        f"--log-file={file}", "--log-format", "ISO8601", "--trace-config", "rate=5", "--log-info=true"
    )
    try:
        command.ready()
        connection = command.post_slow(1)
        assert connection.getresponse().read()

        def ask(method: str, path: str, body: Any = None) -> Any:
            connection.request(method, path, None if body is None else json.dumps(body))
            return json.loads(connection.getresponse().read())

        assert ask("GET", "/v2/logging")["log_file"] == str(file)
        assert ask("GET", "/v2/trace/setting")["trace_rate"] == "5"
        ask("POST", "/v2/logging", {"log_info": False, "log_format": "default"})
        connection.request("POST", "/v2/models/slow/generate", '{"steps": 1}')
        assert connection.getresponse().read()
        lines = file.read_text().splitlines()
        assert sum("slow: step 1 of 1" in line for line in lines) == 1
        assert all(line[:2] == "20" and line[19:22] == "Z I" for line in lines)
    finally:
        command.clean_up()
    other = Command.start("--log-file=/nowhere/log")
    assert other.err.get(timeout=20) == "trio-infer: --log-file: can't write /nowhere/log: No such file or directory"
    assert other.end() == 1
