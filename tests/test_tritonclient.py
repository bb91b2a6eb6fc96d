"""Triton's own Python client, sync and asyncio, unchanged, against a real server."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils

from support import Echo, Failing, Served, Streamer, Ticker, serving
from trio_infer import ControlPolicy, Datatype, InferRequest, Model, ModelRepository, TensorSpec

VALUES: dict[str, np.ndarray[Any, Any]] = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 1, 255]], np.uint8),
    "UINT16": np.array([[0, 1, 65535]], np.uint16),
    "UINT32": np.array([[0, 1, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 1, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 0, 127]], np.int8),
    "INT16": np.array([[-(2**15), 0, 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 0, 2**63 - 1]], np.int64),
    "FP16": np.array([[0.0, -0.0, 65504, 6e-8, np.inf, np.nan]], np.float16),
    "FP32": np.array([[0.1, -0.0, np.inf, -np.inf, np.nan]], np.float32),
    "FP64": np.array([[0.1, -0.0, np.inf, -np.inf, np.nan]], np.float64),
    "BF16": np.array([[0.0, -0.0, 1.5, np.inf, np.nan]], ml_dtypes.bfloat16),
    "BYTES": np.array([[b"a", b"\x00\xff", b"", "\u00e9".encode()]], np.object_),
}


class EchoAny(Model):
    """Gives back one tensor of its datatype, with a batch dimension in front."""

    max_batch_size = 8

    def __init__(self, datatype: Datatype) -> None:
        self.name = f"echo_{datatype.value.lower()}"
        self.inputs = (TensorSpec("x", datatype, [-1]),)
        self.outputs = (TensorSpec("y", datatype, [-1]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        return {"y": request.inputs["x"]}


async def in_thread(served: Served, talk: Callable[[tritonclient.http.InferenceServerClient], Any]) -> Any:
    def run() -> Any:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
            return talk(client)

    return await trio.to_thread.run_sync(run)


async def in_asyncio(served: Served, talk: Callable[[tritonclient.http.aio.InferenceServerClient], Any]) -> Any:
    async def run() -> Any:
        async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
            return await talk(client)

    return await trio.to_thread.run_sync(asyncio.run, run())


def ticks_input(ticks: int) -> Any:
    tensor = tritonclient.http.InferInput("ticks", [1], "INT32")
    tensor.set_data_from_numpy(np.array([ticks], np.int32))
    return tensor


def round_trip(client: Any, datatype: str, *, binary_in: bool, binary_out: bool, **compression: str) -> None:
    value = VALUES[datatype]
    tensor = tritonclient.http.InferInput("x", list(value.shape), datatype)
    tensor.set_data_from_numpy(value, binary_data=binary_in)
    wanted = tritonclient.http.InferRequestedOutput("y", binary_data=binary_out)
    result = client.infer(f"echo_{datatype.lower()}", [tensor], outputs=[wanted], request_id="7", **compression)
    output = result.as_numpy("y")
    assert output.shape == value.shape
    if datatype == "BYTES":
        sent = [item if isinstance(item, bytes) else item.encode() for item in value.flat]
        assert [item if isinstance(item, bytes) else item.encode() for item in output.flat] == sent
    else:
        assert output.tobytes() == value.astype(output.dtype).tobytes(), "bit for bit"
    response = result.get_response()
    assert (response["model_version"], response["id"]) == ("1", "7")


async def test_every_datatype_goes_in_and_out_unchanged() -> None:
    def talk(client: Any) -> None:
        for datatype in VALUES:
            round_trip(client, datatype, binary_in=True, binary_out=True)
            if datatype not in {"FP16", "BF16", "BYTES"}:
                round_trip(client, datatype, binary_in=False, binary_out=False)
                round_trip(client, datatype, binary_in=False, binary_out=True)
            for algorithm in ("gzip", "deflate"):
                round_trip(
                    client,
                    datatype,
                    binary_in=True,
                    binary_out=True,
                    request_compression_algorithm=algorithm,
                    response_compression_algorithm=algorithm,
                )

    async with serving(*(EchoAny(datatype) for datatype in Datatype)) as served:
        await in_thread(served, talk)
        assert set(served.outcomes()) == {"completed"}


async def test_health_metadata_and_config_read_as_the_client_expects() -> None:
    def talk(client: Any) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo_fp32")
        assert client.is_model_ready("echo_fp32", "1")
        assert not client.is_model_ready("nobody")
        assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
        metadata = client.get_model_metadata("echo_fp32", "1")
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
        assert client.get_model_config("echo_fp32")["max_batch_size"] == 8

    async with serving(EchoAny(Datatype.FP32)) as served:
        await in_thread(served, talk)


async def test_errors_come_as_the_clients_own_exception_with_status_and_text() -> None:
    def talk(client: Any) -> None:
        for model, status, text in [
            ("nobody", "404", "unknown model"),
            ("failing", "500", "boom-42"),
            ("streamer", "501", "decoupled"),
        ]:
            with pytest.raises(tritonclient.utils.InferenceServerException, match=text) as caught:
                client.infer(model, [])
            assert caught.value.status() == status

    async with serving(Failing(), Streamer()) as served:
        await in_thread(served, talk)


async def test_many_requests_at_once_through_async_infer() -> None:
    def run() -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.port}", concurrency=8) as client:
            pending = [client.async_infer("ticker", [ticks_input(ticks % 3)]) for ticks in range(8)]
            assert [int(item.get_result().as_numpy("ticks")[0]) for item in pending] == [0, 1, 2, 0, 1, 2, 0, 1]

    async with serving(Ticker()) as served:
        await trio.to_thread.run_sync(run)


async def test_the_clients_timeout_frees_the_server_and_the_client_stays_usable() -> None:
    def run() -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.port}", network_timeout=0.3) as client:
            for _ in range(3):
                with pytest.raises((tritonclient.utils.InferenceServerException, OSError), match="timed out"):
                    client.infer("ticker", [ticks_input(400)])
            assert client.infer("ticker", [ticks_input(1)]).as_numpy("ticks")[0] == 1

    model = Ticker(instances=1)
    async with serving(model) as served:
        await trio.to_thread.run_sync(run)
        await served.ended(4)
        assert served.cancelled() == {("client disconnected", "running"): 3}
        assert model.ticks < 40, "never more than one run at a time, and none of them to its end"


async def test_the_asyncio_client_works_too_and_its_cancelled_task_cancels_the_inference() -> None:
    async def talk(client: Any) -> None:
        assert await client.is_server_ready()
        assert (await client.get_model_metadata("ticker"))["name"] == "ticker"
        result = await client.infer("ticker", [ticks_input(2)])  # asks for gzip by default
        assert result.as_numpy("ticks")[0] == 2
        task = asyncio.ensure_future(client.infer("ticker", [ticks_input(400)]))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.infer("ticker", [ticks_input(1)])).as_numpy("ticks")[0] == 1

    model = Ticker(instances=1)
    async with serving(model, Echo()) as served:
        await in_asyncio(served, talk)
        await served.ended(5)
        assert served.outcomes() == {"completed": 4, "cancelled": 1}


GREET = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([VERSION], np.int32))]) for _ in requests]
"""
GREET_CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
    "parameters": {"execution": {"string_value": "thread"}},
}


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    (tmp_path / "greet" / "1").mkdir(parents=True)
    (tmp_path / "greet" / "config.pbtxt").write_text(
        'backend: "python" input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } '
        'output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }'
    )
    (tmp_path / "greet" / "1" / "model.py").write_text(f"VERSION = 1\n{GREET}")
    return ModelRepository([tmp_path], execution="thread")


def greeted(result: Any) -> int:
    return int(result.as_numpy("OUT")[0])


async def test_it_loads_and_unloads_models_with_a_configuration_and_files_of_its_own(
    repository: ModelRepository,
) -> None:
    def talk(client: tritonclient.http.InferenceServerClient) -> None:
        number = tritonclient.http.InferInput("IN", [1], "INT32")
        number.set_data_from_numpy(np.array([0], np.int32))
        assert client.get_model_repository_index() == [{"name": "greet"}]
        client.load_model("greet")
        assert client.is_model_ready("greet")
        assert greeted(client.infer("greet", [number])) == 1
        files = {"file:7/model.py": f"VERSION = 7\n{GREET}".encode()}
        client.load_model("greet", config=json.dumps(GREET_CONFIG), files=files)
        assert client.get_model_repository_index() == [{"name": "greet", "version": "7", "state": "READY"}]
        assert greeted(client.infer("greet", [number])) == 7
        with pytest.raises(tritonclient.utils.InferenceServerException, match="failed to poll from model repository"):
            client.load_model("nobody")
        client.unload_model("greet")
        assert not client.is_model_ready("greet")
        with pytest.raises(tritonclient.utils.InferenceServerException, match="has no available versions"):
            client.infer("greet", [number])

    control = ControlPolicy(model_control_mode="explicit")
    async with serving(repository=repository, control=control) as served:
        await in_thread(served, talk)


async def test_the_asyncio_client_loads_and_unloads_and_is_told_where_that_is_not_allowed(
    repository: ModelRepository,
) -> None:
    async def talk(client: Any) -> None:
        await client.load_model("greet")
        assert await client.is_model_ready("greet")
        assert (await client.get_model_repository_index())[0]["state"] == "READY"
        await client.unload_model("greet")
        assert not await client.is_model_ready("greet")

    async def refused(client: Any) -> None:
        for ask in (client.load_model, client.unload_model):
            with pytest.raises(
                tritonclient.utils.InferenceServerException,
                match="explicit model load / unload is not allowed if polling is enabled",
            ):
                await ask("greet")

    async with serving(repository=repository, control=ControlPolicy(model_control_mode="explicit")) as served:
        await in_asyncio(served, talk)
    async with serving(repository=repository) as served:
        await in_asyncio(served, refused)


async def test_a_client_process_that_is_killed_frees_the_server() -> None:
    script = textwrap.dedent(
        """
        import sys, numpy, tritonclient.http
        client = tritonclient.http.InferenceServerClient("127.0.0.1:" + sys.argv[1])
        ticks = tritonclient.http.InferInput("ticks", [1], "INT32")
        ticks.set_data_from_numpy(numpy.array([400], numpy.int32))
        client.infer("ticker", [ticks])
        """
    )
    model = Ticker()
    async with serving(model) as served:
        async with trio.open_nursery() as nursery:
            run = partial(trio.run_process, [sys.executable, "-c", script, str(served.port)], check=False)
            process = await nursery.start(run)
            await model.started.wait()
            process.kill()
            with trio.fail_after(5):
                await model.stopped.wait()
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "running"): 1}
