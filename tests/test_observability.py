"""Statistics and metrics as clients and scrapers read them, of servers that run."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import numpy as np
import pytest
import trio
import tritonclient.http
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from command import Command
from support import Client, Echo, Failing, Streamer, Ticker, get, infer_echo, infer_ticks, post, serving
from trio_infer import Front, InferRequest, MetricsPolicy, Model, TensorSpec
from trio_infer.api.statistics import metrics_port
from trio_infer.models.native import NativeRunner
from trio_infer.observe.metrics import FAMILIES
from trio_infer.testing import MemoryListener

ALL = MetricsPolicy(summary_latencies=True, histogram_latencies=True)


async def scrape(client: Client, path: str = "/metrics") -> list[str]:
    answer = await client.ask(get(path))
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    return answer.body.decode().splitlines()


async def books(client: Client, model: str) -> Any:
    answer = await client.ask(get(f"/v2/models/{model}/stats"))
    (entry,) = answer.json["model_stats"]
    return entry


def values(lines: list[str], name: str, **labels: str) -> dict[str, float]:
    """Of the samples of a metric that have these labels: values by the others."""
    found = {}
    for line in lines:
        sample = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if sample is not None:
            own = dict(re.findall(r'(\w+)="([^"]*)"', sample[1] or ""))
            if labels.items() <= own.items():
                found[",".join(value for key, value in own.items() if key not in labels)] = float(sample[2])
    return found


class Rows(Model):
    """Takes batches."""

    name = "rows"
    max_batch_size = 8
    inputs = (TensorSpec("x", "FP32", [1]),)
    outputs = (TensorSpec("x", "FP32", [1]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        return {"x": request.inputs["x"]}


async def test_whole_lines_are_as_tritons_own_from_the_start() -> None:
    async with serving(Echo(), memory=True, metrics=MetricsPolicy()) as served:
        client = served.connect_in_memory()
        lines = await scrape(client)
        assert {
            'nv_inference_request_success{model="echo",version="1"} 0',
            'nv_inference_request_failure{model="echo",reason="REJECTED",version="1"} 0',
            'nv_inference_request_failure{model="echo",reason="CANCELED",version="1"} 0',
            'nv_inference_request_failure{model="echo",reason="BACKEND",version="1"} 0',
            'nv_inference_request_failure{model="echo",reason="OTHER",version="1"} 0',
            'nv_inference_count{model="echo",version="1"} 0',
            'nv_inference_exec_count{model="echo",version="1"} 0',
            'nv_inference_request_duration_us{model="echo",version="1"} 0',
            'nv_inference_pending_request_count{model="echo",version="1"} 0',
            "# TYPE nv_inference_request_success counter",
            "# TYPE nv_inference_pending_request_count gauge",
        } <= set(lines)
        await client.ask(infer_echo(1.0))
        assert (await client.ask(post("echo", "infer", {"inputs": []}))).status == 400
        lines = await scrape(client, "/metrics/")
        assert {
            'nv_inference_request_success{model="echo",version="1"} 1',
            'nv_inference_request_failure{model="echo",reason="OTHER",version="1"} 1',
            'trio_infer_requests_total{outcome="completed"} 2',
            'trio_infer_requests_total{outcome="rejected"} 1',
            'trio_infer_requests_in_flight{phase="receiving"} 1',
            "trio_infer_connections 1",
        } <= set(lines)
        (duration,) = values(lines, "nv_inference_request_duration_us", model="echo").values()
        assert duration == int(duration) > 0
        families = list(
            text_string_to_metric_families("\n".join(lines) + "\n")
        )  # Prometheus' own reader has no complaint
        assert sum(len(family.samples) for family in families) == sum(not line.startswith("#") for line in lines)


class Elsewhere(NativeRunner):
    """Says that it has processes."""

    workers = {"serving": 1, "spare": 1, "starting": 0}  # noqa: RUF012 - as a runner has it
    exits = {"killed": 2}  # noqa: RUF012 - as a runner has it


async def test_each_metric_of_the_table_is_there_and_none_besides(autojump_clock: Any) -> None:
    echo = Echo()
    echo.response_cache = True
    async with serving(echo, Streamer(), Elsewhere(Ticker()), memory=True, metrics=ALL, response_cache=2**20) as served:
        client = served.connect_in_memory()
        for _ in range(2):
            await client.ask(infer_echo(1.0))
        leaver = served.connect_in_memory()
        await leaver.send(infer_ticks(9, model="streamer"))
        await leaver.close()
        await served.ended(3)
        assert served.server._watchdog is not None
        served.server._watchdog.times["ticker"] = 1
        served.server._watchdog.seconds["ticker"] = 0.5
        lines = await scrape(client)
        assert {
            'nv_inference_request_success{model="echo",version="1"} 2',
            'nv_inference_count{model="echo",version="1"} 1',
            'nv_cache_num_hits_per_model{model="echo",version="1"} 1',
            'nv_cache_num_misses_per_model{model="echo",version="1"} 1',
            'trio_infer_worker_processes{model="ticker",version="1",state="spare"} 1',
            'trio_infer_worker_exits_total{model="ticker",version="1",cause="killed"} 2',
            'trio_infer_worker_exits_total{model="ticker",version="1",cause="crashed"} 0',
        } <= set(lines)
        kinds = dict(re.findall(r"# TYPE (\S+) (\S+)", "\n".join(lines)))
        assert kinds == {family.name: family.kind for family in FAMILIES}
        for family in FAMILIES:
            first = next(line for line in lines if re.match(rf"{family.name}(_bucket)?[ {{]", line))
            labels = re.findall(r'(\w+)="', first)
            assert [label for label in labels if label not in ("le", "quantile")] == list(family.labels), first


async def test_what_is_not_asked_for_is_left_out() -> None:
    async with serving(Streamer(), memory=True, metrics=MetricsPolicy(counter_latencies=False, cpu=False)) as served:
        text = "\n".join(await scrape(served.connect_in_memory()))
        assert not re.search(r"_duration_us|_summary_us|_histogram_ms|nv_cpu", text)
    async with serving(Streamer(), memory=True) as served:
        client = served.connect_in_memory()
        assert (await client.ask(get("/metrics"))).status == 404
        assert served.server.collector is None


async def test_the_collector_may_join_a_registry_of_ones_own() -> None:
    async with serving(Echo(), memory=True, metrics=ALL) as served:
        registry = CollectorRegistry()
        assert served.server.collector is not None
        registry.register(served.server.collector)
        assert b'nv_inference_request_success{model="echo",version="1"} 0.0' in generate_latest(registry)


async def test_the_port_for_metrics_answers_as_tritons_does() -> None:
    listener = MemoryListener()
    front = Front("metrics", metrics_port, listeners=[listener])
    async with serving(Echo(), memory=True, metrics=MetricsPolicy(), fronts=[front]) as served:
        client = Client(listener.connect())
        assert 'nv_inference_request_success{model="echo",version="1"} 0' in await scrape(client)
        for path in ("/", "/v2", "/v2/models/echo/infer", "/nothing"):
            answer = await client.ask(get(path))
            assert (answer.status, answer.body) == (200, b"")
        for path in ("/metrics", "/v2/models/echo/infer"):
            assert (await client.ask(get(path, "Content-Length: 0", method="POST"))).status == 405
        assert (await served.connect_in_memory().ask(get("/metrics", method="DELETE"))).status == 405


@pytest.mark.parametrize("where", ["receiving", "queued", "running", "streaming"])
async def test_a_departure_shows_in_statistics_and_metrics_wherever_it_strikes(where: str, autojump_clock: Any) -> None:
    model = Streamer(instances=1) if where == "streaming" else Ticker(instances=1)
    async with serving(model, memory=True, metrics=MetricsPolicy()) as served:
        watcher = served.connect_in_memory()
        blocker, leaver = served.connect_in_memory(), served.connect_in_memory()
        name, ended = model.name, 1
        if where == "queued":
            await blocker.send(infer_ticks(2))
            await model.started.wait()
            ended = 2
        if where == "receiving":
            await leaver.send(infer_ticks(5)[:-3])
            name = "ticker"
        elif where == "streaming":
            await leaver.send(post("streamer", "generate_stream", {"ticks": [50]}))
            await leaver.head()
        else:
            await leaver.send(infer_ticks(50))
        await trio.sleep(0.02)
        if where == "queued":
            lines = await scrape(watcher)
            assert f'nv_inference_pending_request_count{{model="{name}",version="1"}} 1' in lines
            assert 'trio_infer_requests_in_flight{phase="queued"} 1' in lines
        await leaver.close()
        await served.ended(ended + (where == "queued"))
        lines = await scrape(watcher)
        entry = await books(watcher, name)
        assert f'nv_inference_request_failure{{model="{name}",reason="CANCELED",version="1"}} 1' in lines
        line = f'trio_infer_cancelled_total{{model="{name}",phase="{where}",reason="client disconnected"}} 1'
        assert line in lines
        assert f'nv_inference_pending_request_count{{model="{name}",version="1"}} 0' in lines
        assert entry["inference_stats"]["fail"]["count"] == 1
        seconds = values(lines, "trio_infer_compute_seconds_total", model=name)
        assert (seconds["cancelled"] > 0) == (seconds["wasted"] > 0) == (where in ("running", "streaming"))
        assert values(lines, "trio_infer_abandoned") == dict.fromkeys(values(lines, "trio_infer_abandoned"), 0)


class Large(Model):
    """Its answer is more than what a connection takes at once."""

    name = "large"
    outputs = (TensorSpec("x", "FP32", [-1]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        return {"x": np.zeros(2**23, "f4")}


async def test_what_is_computed_for_a_client_that_leaves_while_it_is_sent_shows_as_cancelled() -> None:
    async with serving(Large(), metrics=MetricsPolicy()) as served:
        leaver, watcher = await served.connect(), await served.connect()
        wanted = {"inputs": [], "outputs": [{"name": "x", "parameters": {"binary_data": True}}]}
        await leaver.send(post("large", "infer", wanted))
        assert (await leaver.head()).status == 200
        await leaver.reset()
        await served.ended(1)
        lines = await scrape(watcher)
        line = 'trio_infer_cancelled_total{model="large",phase="sending",reason="client disconnected"} 1'
        assert line in lines
        assert 'nv_inference_request_failure{model="large",reason="CANCELED",version="1"} 1' in lines
        seconds = values(lines, "trio_infer_compute_seconds_total", model="large")
        assert {outcome for outcome, value in seconds.items() if value} == {"cancelled"}
        await watcher.close()


async def test_names_that_clients_make_up_make_no_series() -> None:
    async with serving(Echo(), memory=True, metrics=MetricsPolicy()) as served:
        client = served.connect_in_memory()
        before = len(await scrape(client))
        for number in range(20):
            assert (await client.ask(post(f"made-up-{number}", "infer", {"inputs": []}))).status == 404
            assert (await client.ask(post("echo", f"../made-up-{number}", {}))).status == 404
        lines = await scrape(client)
        assert len(lines) == before
        assert "made-up" not in "\n".join(lines)


async def test_statistics_of_one_all_and_unknown_models() -> None:
    async with serving(Echo(), Failing(), Rows(), memory=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(get("/v2/models/stats"))
        assert [entry["name"] for entry in answer.json["model_stats"]] == ["echo", "failing", "rows"]
        assert list(answer.json["model_stats"][0]) == [
            "name",
            "version",
            "last_inference",
            "inference_count",
            "execution_count",
            "inference_stats",
            "response_stats",
            "batch_stats",
            "memory_usage",
        ]
        document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 1], "data": [1, 2, 3]}]}
        for _ in range(2):
            assert (await client.ask(post("rows", "infer", document))).status == 200
        entry = await books(client, "rows/versions/1")
        assert (entry["inference_count"], entry["execution_count"]) == (6, 2)
        assert [each["batch_size"] for each in entry["batch_stats"]] == [3]
        assert {part: value["count"] for part, value in entry["inference_stats"].items()} == {
            "success": 2,
            "fail": 0,
            "queue": 2,
            "compute_input": 2,
            "compute_infer": 2,
            "compute_output": 2,
            "cache_hit": 0,
            "cache_miss": 0,
        }
        for path, status, error in (
            ("/v2/models/nobody/stats", 400, "requested model 'nobody' is not available"),
            ("/v2/models/rows/versions/7/stats", 400, "requested model version is not available for model 'rows'"),
            ("/v2/models/rows/stats/", 404, "Not Found"),
        ):
            answer = await client.ask(get(path))
            assert (answer.status, answer.json) == (status, {"error": error})
        assert (await client.ask(post("rows", "stats", {}))).status == 405


async def test_tritonclient_reads_the_statistics_as_perf_analyzer_does() -> None:
    async with serving(Echo(), Failing()) as served:

        def talk() -> None:
            with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
                tensor = tritonclient.http.InferInput("x", [2], "FP32")
                tensor.set_data_from_numpy(np.array([1, 2], "f4"))
                for _ in range(3):
                    client.infer("echo", [tensor])
                window = client.get_inference_statistics("echo", "1")["model_stats"][0]
                assert window["inference_count"] == window["execution_count"] == 3
                stats = window["inference_stats"]
                assert stats["success"]["count"] == stats["queue"]["count"] == stats["compute_infer"]["count"] == 3
                parts = ("queue", "compute_input", "compute_infer", "compute_output")
                assert 0 < sum(stats[part]["ns"] for part in parts) <= stats["success"]["ns"]
                assert len(client.get_inference_statistics()["model_stats"]) == 2
                assert "statistics" in client.get_server_metadata()["extensions"]
                with pytest.raises(tritonclient.http.InferenceServerException, match="is not available"):
                    client.get_inference_statistics("nobody")

        await trio.to_thread.run_sync(talk)


def test_the_command_serves_metrics_on_a_port_of_their_own_and_says_if_that_is_taken() -> None:
    command = Command.start("--metrics-config=summary_latencies=true", "--metrics-config", "counter_latencies=false")
    try:
        command.ready()
        port = int(command.await_log("metrics on http://127.0.0.1:").rpartition(":")[2].rstrip('"'))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        assert "nv_inference_request_summary_us" in text
        assert "# TYPE nv_inference_request_duration_us" not in text
        other = Command.start(f"--metrics-port={port}")
        assert "--metrics-port" in other.await_log(f"port {port} is in use")
        assert other.process.wait(20) == 1
    finally:
        command.process.kill()
        command.process.wait()
