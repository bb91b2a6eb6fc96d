"""What SageMaker and Vertex AI ask, and that nothing gets past the rules by asking through them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from support import Answer, Client, Echo, Endings, Streamer, Ticker, check_books
from trio_infer import ErrorCode, Front, InferError, InferRequest, Limits, SageMaker, Server, VertexAI
from trio_infer.app_fronts import check_safe_range, cloud_fronts, cloud_repository, main_port_is_open
from trio_infer.errors import SetupError
from trio_infer.options import CloudFronts, Options
from trio_infer.testing import MemoryListener

SAGEMAKER = "application/vnd.sagemaker-triton.binary+json"
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json"


@attrs.define(eq=False)
class Cloud:
    """A server with both fronts, in memory."""

    server: Server
    sagemaker: MemoryListener
    vertex_ai: MemoryListener
    endings: Endings

    def connect(self, front: str) -> Client:
        return Client((self.sagemaker if front == "sagemaker" else self.vertex_ai).connect())

    async def ask(self, front: str, *words: Any, **more: Any) -> Answer:
        client = self.connect(front)
        try:
            return await client.ask(request(*words, **more))
        finally:
            await client.close()

    def cancelled(self) -> dict[tuple[str, str], int]:
        counted = self.server.statistics().requests.cancelled
        return {(reason.value, phase.value): count for (reason, phase), count in counted.items()}


@asynccontextmanager
async def clouds(
    *models: Any, limits: Limits | None = None, restricted: Sequence[str] = (), forward: str = "", **sagemaker: Any
) -> AsyncIterator[Cloud]:
    listeners, endings = (MemoryListener(), MemoryListener(), MemoryListener()), Endings()
    vertex_ai = sagemaker.pop("vertex_ai", {})
    server = Server(
        models,
        limits=limits,
        watchers=[endings],
        restricted_apis=restricted,
        header_forward_pattern=forward,
        fronts=[
            Front("sagemaker", lambda v2: SageMaker(v2, **sagemaker), listeners=[listeners[0]]),
            Front("vertex-ai", lambda v2: VertexAI(v2, **vertex_ai), listeners=[listeners[1]]),
        ],
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.serve(listeners=[listeners[2]]))
        yield Cloud(server, listeners[0], listeners[1], endings)
        nursery.cancel_scope.cancel()
    check_books(server)


def request(method: str, path: str, body: object = None, **headers: str) -> bytes:
    """A whole request; headers in snake case."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def ticks(count: int) -> dict[str, Any]:
    return {"inputs": [{"name": "ticks", "datatype": "INT32", "shape": [1], "data": [count]}]}


ECHO = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


def binary() -> tuple[bytes, int]:
    """An inference with binary tensors both ways: its body, and the length of its JSON."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    text = json.dumps(document).encode()
    return text + np.array([1, 2], "f4").tobytes(), len(text)


ROUTES = [
    pytest.param("sagemaker", "/invocations", {}, SAGEMAKER, id="sagemaker"),
    pytest.param("vertex-ai", "/predict", {}, VERTEX_AI, id="vertex-ai"),
]


# -- Inference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("front", "path", "headers", "mime"), ROUTES)
async def test_json_and_binary_tensors_go_both_ways(
    autojump_clock: Any, front: str, path: str, headers: dict[str, str], mime: str
) -> None:
    async with clouds(Echo()) as cloud:
        answer = await cloud.ask(front, "POST", path, ECHO, accept_encoding="gzip")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json["outputs"][0]["data"] == [1, 2]
        body, length = binary()
        for content_type in (f"{mime};json-header-size={length}", f'{mime.upper()} ; Json-Header-Size = "{length}"'):
            answer = await cloud.ask(front, "POST", path, body, content_type=content_type)
            assert answer.status == 200, answer.body
            given, equals, size = answer.headers["content-type"].partition(";json-header-size=")
            assert (given, equals) == (mime, ";json-header-size=")
            assert np.frombuffer(answer.body[int(size) :], "f4").tolist() == [1, 2]
            assert "inference-header-content-length" not in answer.headers


@pytest.mark.parametrize(("front", "path", "headers", "mime"), ROUTES)
@pytest.mark.parametrize("body", [b"", b" ", b"\0", b"[]", b"null", b"{", "{}".encode("utf-16")])
async def test_a_bad_body_is_400_and_no_alarm(
    autojump_clock: Any,
    caplog: pytest.LogCaptureFixture,
    front: str,
    path: str,
    headers: dict[str, str],
    mime: str,
    body: bytes,
) -> None:
    async with clouds(Echo()) as cloud:
        answer = await cloud.ask(front, "POST", path, body)
        assert answer.status == 400
        assert answer.json["error"]
        assert (await cloud.ask(front, "GET", "/ping" if front == "sagemaker" else "/health")).status == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(("front", "path", "headers", "mime"), ROUTES)
@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (";json-header-size=999", "inference header size should be in range (0, "),
        (";json-header-size=-1", "inference header size should be in range (0, "),
        (";json-header-size=x", "Unable to parse json-header-size, got: 'x'"),
        ("", "json-header-size=N, got 'application/vnd."),
    ],
)
async def test_a_bad_header_size_is_400(
    autojump_clock: Any, front: str, path: str, headers: dict[str, str], mime: str, parameter: str, words: str
) -> None:
    async with clouds(Echo()) as cloud:
        answer = await cloud.ask(front, "POST", path, binary()[0], content_type=mime + parameter)
        assert answer.status == 400
        assert words in answer.json["error"]


@pytest.mark.parametrize(("front", "path", "headers", "mime"), ROUTES)
async def test_limits_are_those_of_infer(
    autojump_clock: Any, front: str, path: str, headers: dict[str, str], mime: str
) -> None:
    async with clouds(Echo(), limits=Limits(http_max_input_size=50)) as cloud:
        answer = await cloud.ask(front, "POST", path, ECHO)
        assert answer.status == 400
        assert "exceeds the maximum allowed size of 50 bytes" in answer.json["error"]


DEPARTURES = [
    pytest.param("sagemaker", {}, ("POST", "/invocations", ticks(1000)), {}, id="invocations"),
    pytest.param(
        "sagemaker", {"inference_type": "generate"}, ("POST", "/invocations", {"ticks": 1000}), {}, id="generate"
    ),
    pytest.param(
        "sagemaker",
        {"inference_type": "generate_stream"},
        ("POST", "/invocations", {"ticks": 1000}),
        {},
        id="generate_stream",
    ),
    pytest.param("sagemaker", {}, ("POST", "/models/ticker/invoke", ticks(1000)), {}, id="invoke"),
    pytest.param("vertex-ai", {}, ("POST", "/predict", ticks(1000)), {}, id="predict"),
    pytest.param(
        "vertex-ai",
        {},
        ("POST", "/predict", ticks(1000)),
        {"x_vertex_ai_triton_redirect": "v2/models/ticker/infer"},
        id="redirect-infer",
    ),
    pytest.param(
        "vertex-ai",
        {},
        ("POST", "/predict", {"ticks": 1000}),
        {"x_vertex_ai_triton_redirect": "v2/models/ticker/versions/1/generate_stream"},
        id="redirect-stream",
    ),
]


@pytest.mark.parametrize(("front", "options", "words", "headers"), DEPARTURES)
async def test_a_client_that_leaves_stops_its_request_in_the_model_and_in_the_queue(
    autojump_clock: Any, front: str, options: Any, words: Any, headers: dict[str, str]
) -> None:
    ticker = Ticker(instances=1)
    async with clouds(ticker, **options) as cloud:
        running, queued = cloud.connect(front), cloud.connect(front)
        await running.send(request(*words, **headers))
        await ticker.started.wait()
        await queued.send(request(*words, **headers))
        await trio.sleep(1)
        await queued.close()
        await cloud.endings.wait(1)
        assert cloud.cancelled() == {("client disconnected", "queued"): 1}
        await running.close()
        await cloud.endings.wait(2)
        assert cloud.cancelled()["client disconnected", "running"] == 1
        assert (ticker.runs, ticker.saw_flag) == (1, [True])


@pytest.mark.parametrize(("front", "options", "words", "headers"), DEPARTURES)
async def test_deadlines_hold_there_too(
    autojump_clock: Any, front: str, options: Any, words: Any, headers: dict[str, str]
) -> None:
    async with clouds(Ticker(), **options) as cloud:
        answer = await cloud.ask(front, *words, **headers, inference_timeout_ms="500")
        assert answer.status == 504
        assert trio.current_time() == pytest.approx(0.5)


async def test_of_several_models_one_must_be_named(autojump_clock: Any) -> None:
    async with clouds(Echo(), Ticker()) as cloud:
        for front, path, say in (
            ("sagemaker", "/invocations", "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"),
            ("vertex-ai", "/predict", "--vertex-ai-default-model"),
        ):
            answer = await cloud.ask(front, "POST", path, ECHO)
            assert answer.status == 400
            assert answer.json["error"].endswith(f"name it with {say}")
    async with clouds(Echo(), Ticker(), model="echo", vertex_ai={"model": "echo"}) as cloud:
        assert (await cloud.ask("sagemaker", "POST", "/invocations", ECHO)).status == 200
        assert (await cloud.ask("vertex-ai", "POST", "/predict", ECHO)).status == 200


async def test_a_stream_comes_through_invocations(autojump_clock: Any) -> None:
    async with clouds(Streamer(), inference_type="generate_stream") as cloud:
        answer = await cloud.ask("sagemaker", "POST", "/invocations", {"ticks": 3})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.body.count(b"data: ") == 3


@pytest.mark.parametrize(
    ("front", "method", "path", "status"),
    [
        ("sagemaker", "POST", "/ping", 405),
        ("sagemaker", "GET", "/invocations", 405),
        ("sagemaker", "PUT", "/models", 405),
        ("sagemaker", "POST", "/models/x", 405),
        ("sagemaker", "GET", "/models/x/invoke", 405),
        ("sagemaker", "POST", "/models/x/invoke", 404),
        ("sagemaker", "GET", "/v2/health/ready", 404),
        ("sagemaker", "GET", "/models/x/y", 404),
        ("vertex-ai", "GET", "/predict", 405),
        ("vertex-ai", "POST", "/health", 405),
        ("vertex-ai", "GET", "/v2/models/echo", 404),
    ],
)
async def test_there_is_nothing_else(autojump_clock: Any, front: str, method: str, path: str, status: int) -> None:
    async with clouds(Echo()) as cloud:
        assert (await cloud.ask(front, method, path)).status == status


async def test_health_tells_of_a_drain(autojump_clock: Any) -> None:
    async with clouds(Ticker()) as cloud:
        sagemaker, vertex_ai = cloud.connect("sagemaker"), cloud.connect("vertex-ai")
        for client, path in ((sagemaker, "/invocations"), (vertex_ai, "/predict")):
            await client.send(request("POST", path, ticks(10)))
        await trio.sleep(0.1)
        cloud.server.drain()
        for client in (sagemaker, vertex_ai):
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            await client.close()


# -- Vertex AI's redirect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name"),
    [("v2", "trio-infer"), ("/v2/models/echo", "echo"), ("v2/models/echo/config", "echo")],
)
async def test_a_redirect_reads_what_is_asked_with_get_elsewhere(autojump_clock: Any, target: str, name: str) -> None:
    async with clouds(Echo()) as cloud:
        answer = await cloud.ask("vertex-ai", "POST", "/predict", {}, x_vertex_ai_triton_redirect=target)
        assert answer.status == 200
        assert answer.json["name"] == name
        answer = await cloud.ask("vertex-ai", "POST", "/predict", {}, x_vertex_ai_triton_redirect="v2/models/stats")
        assert answer.json["model_stats"][0]["name"] == "echo"


@pytest.mark.parametrize("target", ["v2/trace/setting", "v2/models/echo/trace/setting"])
async def test_settings_can_be_read_through_a_redirect_but_not_changed(autojump_clock: Any, target: str) -> None:
    async with clouds(Echo()) as cloud:
        before = await cloud.ask("vertex-ai", "POST", "/predict", x_vertex_ai_triton_redirect=target)
        assert before.status == 200
        change = {"trace_level": ["TIMESTAMPS"]}
        answer = await cloud.ask("vertex-ai", "POST", "/predict", change, x_vertex_ai_triton_redirect=target)
        assert answer.status == 403
        assert "may read there, but not write" in answer.json["error"]
        after = await cloud.ask("vertex-ai", "POST", "/predict", x_vertex_ai_triton_redirect=target)
        assert after.json == before.json


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("v2/repository/models/echo/unload", 403),
        ("v2/../v2/models/echo", 403),
        ("v2/models/./echo", 403),
        ("v2/models/..", 403),
        ("v2/models/%65cho", 403),
        ("v2/%2e%2e/metrics", 403),
        ("v2//models/echo", 403),
        ("//v2/models/echo", 403),
        ("v2/models/echo?x=1", 403),
        ("v2/models/echo/", 403),
        ("V2/models/echo", 403),
        ("v2/Models/echo", 404),
        ("v2/models/Echo", 404),
        ("http://test/v2/models/echo", 403),
        ("v2\\models\\echo", 403),
        ("health", 403),
        ("", 403),
    ],
)
async def test_a_redirect_to_anything_but_a_plain_open_path_is_refused(
    autojump_clock: Any, target: str, status: int
) -> None:
    async with clouds(Echo()) as cloud:
        answer = await cloud.ask("vertex-ai", "POST", "/predict", ECHO, x_vertex_ai_triton_redirect=target)
        assert (answer.status, list(answer.json)) == (status, ["error"])


async def test_a_redirected_cancel_stops_ones_own_request(autojump_clock: Any) -> None:
    ticker = Ticker()
    async with clouds(ticker) as cloud:
        client = cloud.connect("vertex-ai")
        await client.send(request("POST", "/predict", ticks(1000) | {"id": "mine"}))
        await ticker.started.wait()
        answer = await cloud.ask(
            "vertex-ai",
            "POST",
            "/predict",
            {"id": "mine"},
            x_vertex_ai_triton_redirect="v2/models/ticker/cancel",
        )
        assert answer.json == {"cancelled": 1}
        assert (await client.answer()).status == 499
        await client.close()


async def test_restrictions_hold_whichever_way_one_comes(autojump_clock: Any, tmp_path: Path) -> None:
    directories = Directories()
    rules = ["inference,model-repository:key=1", "metadata:other=2"]
    redirect = {"x_vertex_ai_triton_redirect": "v2/models/echo"}
    async with clouds(Echo(), restricted=rules, directories=directories) as cloud:
        for words, headers in (
            (("sagemaker", "POST", "/invocations", ECHO), {}),
            (("sagemaker", "POST", "/models/echo/invoke", ECHO), {}),
            (("sagemaker", "POST", "/models", {"model_name": "m", "url": str(tmp_path)}), {}),
            (("sagemaker", "GET", "/models"), {}),
            (("vertex-ai", "POST", "/predict", ECHO), {}),
            (("vertex-ai", "POST", "/predict", ECHO), {"x_vertex_ai_triton_redirect": "v2/models/echo/infer"}),
            (("vertex-ai", "POST", "/predict"), redirect),
        ):
            answer = await cloud.ask(*words, **headers)
            assert answer.status == 403, words
            name = "other" if headers == redirect else "key"
            assert answer.json["error"] == f"This API is restricted, expecting header '{name}'"
        assert directories.calls == []
        assert (await cloud.ask("sagemaker", "POST", "/invocations", ECHO, key="1")).status == 200
        assert (await cloud.ask("vertex-ai", "POST", "/predict", ECHO, key="1")).status == 200
        assert (await cloud.ask("vertex-ai", "POST", "/predict", **redirect, other="2")).status == 200
        assert (await cloud.ask("sagemaker", "GET", "/ping")).status == 200


async def test_headers_are_handed_on_to_models_there_too(autojump_clock: Any) -> None:
    seen: list[object] = []

    class Listening(Echo):
        async def infer(self, request: InferRequest) -> dict[str, Any]:
            seen.append(request.parameters.get("x-mine"))
            return await super().infer(request)

    async with clouds(Listening(), forward="x-mine") as cloud:
        for front, path in (("sagemaker", "/invocations"), ("vertex-ai", "/predict")):
            assert (await cloud.ask(front, "POST", path, ECHO, x_mine=front)).status == 200
    assert seen == ["sagemaker", "vertex-ai"]


# -- SageMaker's endpoints of many models -----------------------------------------------------------------------------


@attrs.define(eq=False)
class Directories:
    """Loads nothing, and notes what it was asked for."""

    calls: list[tuple[str, str]] = attrs.field(factory=list)
    failure: Exception | None = None

    async def load_directory(self, name: str, directory: Path) -> None:
        self.calls.append(("load", name))
        await trio.sleep(1)
        if self.failure is not None:
            raise self.failure

    async def unload(self, name: str) -> None:
        self.calls.append(("unload", name))


async def test_models_come_and_go_with_the_statuses_that_sagemaker_knows(autojump_clock: Any, tmp_path: Path) -> None:
    directories, entry = Directories(), {"modelName": "m", "modelUrl": str(tmp_path)}
    async with clouds(directories=directories) as cloud:

        async def ask(*words: Any) -> Answer:
            return await cloud.ask("sagemaker", *words)

        assert (await ask("GET", "/ping")).status == 200
        assert (await ask("GET", "/models/m")).status == 404
        assert (await ask("DELETE", "/models/m")).status == 404
        assert (await ask("POST", "/models/m/invoke", ECHO)).status == 404
        load = ("POST", "/models", {"model_name": "m", "url": str(tmp_path)})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, *load)
            await trio.sleep(0.5)
            assert (await ask(*load)).status == 409
        assert (await ask(*load)).status == 409
        assert (await ask("GET", "/models")).json == {"models": [entry]}
        assert (await ask("GET", "/models/m")).json == entry
        assert (await ask("DELETE", "/models/m")).status == 200
        assert (await ask("GET", "/models/")).json == {"models": []}
        assert directories.calls == [("load", "m"), ("unload", "m")]


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (InferError("CUDA out of memory", ErrorCode.INTERNAL), 507),
        (InferError("model 'm' can't be loaded: MemoryError: "), 507),
        (InferError("model 'm' can't be loaded: no weights"), 400),
    ],
)
async def test_a_load_that_fails_leaves_nothing_and_lack_of_memory_is_507(
    autojump_clock: Any, tmp_path: Path, failure: InferError, status: int
) -> None:
    async with clouds(directories=Directories(failure=failure)) as cloud:
        answer = await cloud.ask("sagemaker", "POST", "/models", {"model_name": "m", "url": str(tmp_path)})
        assert (answer.status, answer.json["error"]) == (status, failure.message)
        assert (await cloud.ask("sagemaker", "GET", "/models/m")).status == 404


@pytest.mark.parametrize(
    "document", [{}, {"model_name": "m"}, {"model_name": 1, "url": "/"}, {"model_name": "", "url": "/"}, []]
)
async def test_a_load_must_say_what_and_where(autojump_clock: Any, document: object) -> None:
    async with clouds(directories=Directories()) as cloud:
        assert (await cloud.ask("sagemaker", "POST", "/models", document)).status == 400


@pytest.mark.parametrize("url", ["/nowhere/at/all", "/" + "x" * 5000, "x\0y"])
async def test_a_directory_that_is_not_there_is_said(autojump_clock: Any, url: str) -> None:
    async with clouds(directories=Directories()) as cloud:
        answer = await cloud.ask("sagemaker", "POST", "/models", {"model_name": "m", "url": url})
        assert answer.status == 400
        assert "'url' " in answer.json["error"]


async def test_without_model_control_there_is_no_loading(autojump_clock: Any) -> None:
    async with clouds(Echo()) as cloud:
        answer = await cloud.ask("sagemaker", "POST", "/models", {"model_name": "m", "url": "/"})
        assert answer.status == 501
        assert "--model-control-mode=explicit" in answer.json["error"]


# -- The command ------------------------------------------------------------------------------------------------------

AIP = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "7080", "AIP_HEALTH_ROUTE": "/h", "AIP_PREDICT_ROUTE": "/p"}


def test_vertex_ai_is_recognised_by_its_environment_and_can_be_told_otherwise() -> None:
    (front,) = cloud_fronts(Options(), AIP)
    assert (front.kind, front.port) == ("vertex-ai", 7080)
    assert not main_port_is_open(Options(), AIP)
    assert main_port_is_open(Options(allow_http=True), AIP)
    assert cloud_fronts(Options(cloud=CloudFronts(allow_vertex_ai=False)), AIP) == []
    assert main_port_is_open(Options(cloud=CloudFronts(allow_vertex_ai=False)), AIP)
    assert cloud_fronts(Options(), {}) == []
    wanted = Options(cloud=CloudFronts(allow_vertex_ai=True, vertex_ai_port=1, vertex_ai_address="::"))
    assert main_port_is_open(wanted, {})
    (front,) = cloud_fronts(wanted, AIP)
    assert (front.host, front.port) == ("::", 1)


def test_vertex_ais_storage_is_the_repository_if_no_other_is_named() -> None:
    assert cloud_repository(Options(), AIP | {"AIP_STORAGE_URI": "/m"}).model_repository == (Path("/m"),)
    assert cloud_repository(Options(), {"AIP_STORAGE_URI": "/m"}).model_repository == ()
    named = Options(model_repository=(Path("mine"),))
    assert cloud_repository(named, AIP | {"AIP_STORAGE_URI": "/m"}) == named
    with pytest.raises(SetupError, match="AIP_STORAGE_URI must be a directory on this machine, got gs://b/m"):
        cloud_repository(Options(), AIP | {"AIP_STORAGE_URI": "gs://b/m"})


@pytest.mark.parametrize(
    ("setup", "line"),
    [
        (
            lambda: cloud_fronts(
                Options(cloud=CloudFronts(allow_sagemaker=True)), {"SAGEMAKER_TRITON_INFERENCE_TYPE": "x"}
            ),
            "SAGEMAKER_TRITON_INFERENCE_TYPE must be infer or generate or generate_stream, got 'x'",
        ),
        (lambda: cloud_fronts(Options(), AIP | {"AIP_HTTP_PORT": "x"}), "AIP_HTTP_PORT must be a port"),
        (lambda: cloud_fronts(Options(), AIP | {"AIP_HEALTH_ROUTE": "x"}), "AIP_HEALTH_ROUTE must be a path"),
        (
            lambda: check_safe_range(
                CloudFronts(allow_sagemaker=True, sagemaker_safe_port_range="9000-9100"), 8000, []
            ),
            "--http-port must be within --sagemaker-safe-port-range 9000-9100, got 8000",
        ),
    ],
)
def test_what_can_not_be_is_said_in_one_line(setup: Callable[[], object], line: str) -> None:
    with pytest.raises(SetupError, match=line):
        setup()
