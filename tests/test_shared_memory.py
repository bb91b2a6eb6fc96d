"""Shared memory: its endpoints, tensors through it, and that no client can hurt the server by it."""

from __future__ import annotations

import gc
import json
import os
import sys
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory as posix
from typing import Any

import numpy as np
import pytest
import trio

from support import Echo, Ticker, get, post, serving
from trio_infer import InferRequest, Model, TensorSpec
from trio_infer.api.regions import RegionRegistry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory has files on Linux only")

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


class Words(Model):
    """Gives back texts, and their lengths."""

    name = "words"
    inputs = (TensorSpec("x", "BYTES", [-1]),)
    outputs = (TensorSpec("x", "BYTES", [-1]), TensorSpec("length", "INT64", [-1]))

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        x = request.inputs["x"]
        return {"x": x, "length": np.array([len(word) for word in x], np.int64)}


@pytest.fixture
def memory() -> Iterator[posix.SharedMemory]:
    """4 KiB, the first 12 bytes of which are three numbers."""
    block = posix.SharedMemory(f"trio-infer-test-{uuid.uuid4().hex}", create=True, size=4096)
    block.buf[:12] = np.array([1, 2, 3], "<f4").tobytes()
    yield block
    block.close()
    block.unlink()


def act(operation: str, region: str = "", document: object = b"", kind: str = "system") -> bytes:
    path = f"/v2/{kind}sharedmemory{f'/region/{region}' if region else ''}/{operation}"
    if operation == "status":
        return get(path)
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return get(path, f"Content-Length: {len(body)}", method="POST") + body


def infer(
    *, region: str = "r", size: int = 12, offset: int | None = None, output: dict[str, Any] | None = None
) -> bytes:
    parameters: dict[str, Any] = {"shared_memory_region": region, "shared_memory_byte_size": size}
    if offset is not None:
        parameters["shared_memory_offset"] = offset
    document = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "parameters": parameters}],
        "outputs": [{"name": "x", "parameters": output or {}}],
    }
    return post("echo", "infer", document)


async def test_regions_are_registered_told_of_and_unregistered(memory: posix.SharedMemory) -> None:
    async with serving(Echo(), memory=True, allow_client_shm=True) as served:
        client = served.connect_in_memory()
        assert (await client.ask(act("status"))).json == []
        whole = {"key": f"/{memory.name}", "offset": 0, "byte_size": 4096}
        answer = await client.ask(act("register", "a%20b", whole))
        assert (answer.status, answer.body) == (200, b"")
        assert (await client.ask(act("register", "r", {"key": memory.name, "offset": 8, "byte_size": 4}))).status == 200
        first = {"name": "a b", **whole}
        assert (await client.ask(act("status"))).json == [
            first,
            {"name": "r", "key": memory.name, "offset": 8, "byte_size": 4},
        ]
        assert (await client.ask(act("status", "a%20b"))).json == [first]
        answer = await client.ask(act("status", "a%20b", kind="cuda"))
        assert answer.status == 404
        assert "is registered as system shared memory, not CUDA" in answer.json["error"]
        answer = await client.ask(act("register", "r", whole))
        assert (answer.status, answer.json["error"]) == (400, "shared memory region 'r' already in manager")
        assert (await client.ask(act("unregister", "r"))).status == 200
        assert (await client.ask(act("unregister", "never-seen"))).status == 200
        assert [region["name"] for region in (await client.ask(act("status"))).json] == ["a b"]
        assert (await client.ask(act("unregister"))).status == 200
        assert (await client.ask(act("status"))).json == []
        answer = await client.ask(act("status", "r"))
        assert (answer.status, answer.json["error"]) == (404, "Unable to find system shared memory region: 'r'")


@pytest.mark.parametrize(
    ("document", "status", "error"),
    [
        ({"byte_size": 4}, 400, "Shared memory register request has no 'key' field"),
        ({"key": "/k"}, 400, "Shared memory register request has no 'byte_size' field"),
        ({"key": 5, "byte_size": 4}, 500, "Unable to parse 'key'"),
        ({"key": "/k", "byte_size": -4}, 500, "Unable to parse 'byte_size'"),
        ({"key": "/no-such-object-here", "byte_size": 4}, 500, "Unable to open shared memory region: '/no-such-object"),
        ({"key": "/", "byte_size": 4}, 400, "cannot register shared memory region 'r' - invalid shm key '/'"),
        ({"key": "", "byte_size": 4}, 400, "cannot register shared memory region 'r' - invalid shm key ''"),
        ({"key": "..", "byte_size": 4}, 400, "cannot register"),
        ({"key": "/../../etc/passwd", "byte_size": 4}, 400, "cannot register"),
        ({"key": "a\0b", "byte_size": 4}, 400, "cannot register"),
        ({"key": "k" * 300, "byte_size": 4}, 400, "cannot register"),
        ({"key": "triton_python_backend_shm_region_1", "byte_size": 4}, 400, "cannot register"),
        ({"key": "trio_infer_1", "byte_size": 4}, 400, "cannot register"),
        ({"key": "THE BLOCK", "byte_size": 4097}, 400, "failed to register shared memory region 'r': invalid args"),
        ({"key": "THE BLOCK", "offset": 4096, "byte_size": 1}, 400, "failed to register"),
        ({"key": "THE BLOCK", "offset": 2**64 - 1, "byte_size": 2**64 - 1}, 400, "failed to register"),
        ({"key": "THE BLOCK", "byte_size": 0}, 400, "failed to register"),
        ([], 500, "Unable to parse 'request'"),
        (b"{", 500, "failed to parse the request JSON buffer"),
    ],
)
async def test_what_can_not_be_registered(memory: posix.SharedMemory, document: Any, status: int, error: str) -> None:
    if isinstance(document, dict) and document.get("key") == "THE BLOCK":
        document = {**document, "key": memory.name}
    async with serving(Echo(), memory=True, allow_client_shm=True) as served:
        client = served.connect_in_memory()
        answer = await client.ask(act("register", "r", document))
        assert answer.status == status
        assert answer.json["error"].startswith(error)
        assert (await client.ask(act("status"))).json == []


async def test_only_regular_files_of_the_directory_are_opened(tmp_path: Any, memory: posix.SharedMemory) -> None:
    link, pipe = f"trio-infer-test-{uuid.uuid4().hex}", f"trio-infer-test-{uuid.uuid4().hex}"
    (tmp_path / "secret").write_bytes(b"1234")
    os.symlink(tmp_path / "secret", f"/dev/shm/{link}")
    os.mkfifo(f"/dev/shm/{pipe}")
    try:
        async with serving(Echo(), memory=True, allow_client_shm=True) as served:
            client = served.connect_in_memory()
            assert (await client.ask(act("register", "r", {"key": link, "byte_size": 4}))).status == 500
            assert (await client.ask(act("register", "r", {"key": pipe, "byte_size": 4}))).status == 400
    finally:
        os.unlink(f"/dev/shm/{link}")
        os.unlink(f"/dev/shm/{pipe}")


async def test_cuda_answers_as_on_a_machine_without_a_gpu() -> None:
    async with serving(Echo(), memory=True, allow_client_shm=True) as served:
        client = served.connect_in_memory()
        assert (await client.ask(act("status", kind="cuda"))).json == []
        assert (await client.ask(act("status", "r", kind="cuda"))).status == 404
        assert (await client.ask(act("unregister", kind="cuda"))).status == 200
        answer = await client.ask(act("register", "r", {}, kind="cuda"))
        assert (answer.status, answer.json["error"]) == (
            400,
            "failed to register CUDA shared memory region: 'r', GPUs not supported",
        )
        for kind in ("cuda", "system"):
            answer = await client.ask(act("register", kind=kind))
            assert answer.json["error"] == f"'region name' is necessary to register {kind} shared memory region"
        assert (await client.ask(get("/v2/systemsharedmemory/register"))).status == 405
        assert (await client.ask(get("/v2/systemsharedmemory"))).status == 404
        assert "system_shared_memory" in (await client.ask(get("/v2"))).json["extensions"]


async def test_it_is_off_by_default() -> None:
    async with serving(Echo(), memory=True) as served:
        client = served.connect_in_memory()
        for kind in ("system", "cuda"):
            assert (await client.ask(act("status", kind=kind))).json == []
            assert (await client.ask(act("status", "r", kind=kind))).status == 404
            for operation in ("register", "unregister"):
                answer = await client.ask(act(operation, "r", {}, kind=kind))
                assert (answer.status, answer.json["error"]) == (501, DISABLED)
        assert (await client.ask(infer())).status == 501
        assert "system_shared_memory" not in (await client.ask(get("/v2"))).json["extensions"]


async def test_tensors_come_from_and_go_to_regions(memory: posix.SharedMemory) -> None:
    async with serving(Echo(), Words(), memory=True, allow_client_shm=True) as served:
        client = served.connect_in_memory()
        await client.ask(act("register", "r", {"key": memory.name, "offset": 0, "byte_size": 4096}))
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 100, "shared_memory_offset": 1001}
        answer = await client.ask(infer(output={**place, "binary_data": False}))
        assert answer.json["outputs"] == [{"name": "x", "datatype": "FP32", "shape": [3]}]
        assert answer.headers["content-type"] == "application/json"
        assert bytes(memory.buf[1001:1015]) == np.array([1, 2, 3], "<f4").tobytes() + b"\0\0"
        assert (await client.ask(infer(offset=4))).json["outputs"][0]["data"] == [2, 3, 0]

        memory.buf[2000:2011] = b"\2\0\0\0ab\1\0\0\0c"
        document = {
            "inputs": [
                {
                    "name": "x",
                    "datatype": "BYTES",
                    "shape": [2],
                    "parameters": {
                        "shared_memory_region": "r",
                        "shared_memory_byte_size": 11,
                        "shared_memory_offset": 2000,
                    },
                }
            ],
            "outputs": [{"name": "x", "parameters": {**place, "shared_memory_offset": 3000}}, {"name": "length"}],
        }
        answer = await client.ask(post("words", "infer", document))
        assert answer.json["outputs"] == [
            {"name": "x", "datatype": "BYTES", "shape": [2]},
            {"name": "length", "datatype": "INT64", "shape": [2], "data": [2, 1]},
        ]
        assert bytes(memory.buf[3000:3012]) == b"\2\0\0\0ab\1\0\0\0c\0"


@pytest.mark.parametrize(
    ("request_", "status", "error"),
    [
        (infer(region="q"), 404, "Unable to find shared memory region: 'q'"),
        (infer(offset=4096), 400, "Invalid offset for shared memory region: 'r'"),
        (infer(size=4097), 400, "Invalid offset + byte size for shared memory region: 'r'"),
        (infer(offset=4090), 400, "Invalid offset + byte size for shared memory region: 'r'"),
        (
            infer(size=2**64 - 1, offset=1),
            400,
            "Integer overflow detected: byte_size (18446744073709551615) + offset (1)",
        ),
        (infer(size=16), 400, "[request id: <id_unknown>] input byte size mismatch for input 'x' for model 'echo'."),
        (infer(output={"shared_memory_region": "r"}), 500, "Unable to parse 'shared_memory_byte_size'"),
        (
            infer(output={"shared_memory_region": "r", "shared_memory_byte_size": 1}),
            400,
            "shared memory size specified with the request for output 'x' (1 bytes) should be at least 12 bytes",
        ),
        (
            infer(output={"shared_memory_region": "r", "shared_memory_byte_size": 12, "classification": 1}),
            400,
            "output 'x' can't have both",
        ),
    ],
)
async def test_what_is_wrong_with_a_place_is_said(
    memory: posix.SharedMemory, request_: bytes, status: int, error: str
) -> None:
    async with serving(Echo(), memory=True, allow_client_shm=True) as served:
        client = served.connect_in_memory()
        await client.ask(act("register", "r", {"key": memory.name, "byte_size": 4096}))
        answer = await client.ask(request_)
        assert answer.status == status
        assert answer.json["error"].startswith(error)
        assert (await client.ask(infer())).status == 200


async def test_an_object_that_its_client_truncates_is_an_error_and_not_the_end_of_the_server(
    memory: posix.SharedMemory,
) -> None:
    async with serving(Echo(), memory=True, allow_client_shm=True) as served:
        client = served.connect_in_memory()
        await client.ask(act("register", "r", {"key": memory.name, "byte_size": 4096}))
        os.truncate(f"/dev/shm/{memory.name}", 8)
        answer = await client.ask(infer())
        assert (answer.status, answer.json["error"]) == (
            400,
            "shared memory region 'r' is shorter than it was when it was registered",
        )
        document = {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}],
            "outputs": [
                {"name": "x", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 12}},
            ],
        }
        assert (await client.ask(post("echo", "infer", document))).status == 400
        assert os.stat(f"/dev/shm/{memory.name}").st_size == 8, "it was not made longer again"
        os.truncate(f"/dev/shm/{memory.name}", 4096)


async def test_a_running_request_keeps_the_region_that_it_is_to_write_to(
    memory: posix.SharedMemory, autojump_clock: Any
) -> None:
    ticker = Ticker()
    async with serving(ticker, memory=True, allow_client_shm=True) as served:
        client, other = served.connect_in_memory(), served.connect_in_memory()
        await other.ask(act("register", "r", {"key": memory.name, "byte_size": 4096}))
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 4, "shared_memory_offset": 64}
        document = {
            "inputs": [{"name": "ticks", "datatype": "INT32", "shape": [1], "data": [5]}],
            "outputs": [{"name": "ticks", "parameters": place}],
        }
        await client.send(post("ticker", "infer", document))
        await ticker.started.wait()
        assert (await other.ask(act("unregister", "r"))).status == 200
        assert (await other.ask(act("status"))).json == []
        answer = await client.answer()
        assert answer.json["outputs"] == [{"name": "ticks", "datatype": "INT32", "shape": [1]}]
        assert bytes(memory.buf[64:68]) == b"\5\0\0\0"


def test_a_region_is_closed_with_its_last_holder(memory: posix.SharedMemory) -> None:
    def held() -> int:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(memory.name in os.readlink(link) for link in links if os.path.lexists(link))

    before = held()
    registry = RegionRegistry()
    registry.register("r", memory.name, 0, 4096)
    place = registry.find("r", 0, 4)
    registry.unregister()
    assert held() == before + 1
    place.write([b"abcd"])
    assert bytes(place.read()) == b"abcd"
    del place
    gc.collect()
    assert held() == before


async def test_tritonclient_passes_tensors_through_shared_memory() -> None:
    tritonclient = pytest.importorskip("tritonclient.http")
    shm = pytest.importorskip("tritonclient.utils.shared_memory")

    def run(port: int) -> None:
        key = f"/trio-infer-test-{uuid.uuid4().hex}"
        handle = shm.create_shared_memory_region("data", key, 128)
        client = tritonclient.InferenceServerClient(f"127.0.0.1:{port}")
        try:
            client.unregister_system_shared_memory()  # as perf_analyzer begins and ends
            client.unregister_cuda_shared_memory()
            values = np.array([1.5, -2, 3e8], np.float32)
            shm.set_shared_memory_region(handle, [values])
            client.register_system_shared_memory("data", key, 128)
            assert client.get_system_shared_memory_status("data")[0]["byte_size"] == 128
            given = tritonclient.InferInput("x", [3], "FP32")
            given.set_shared_memory("data", 12)
            wanted = tritonclient.InferRequestedOutput("x")
            wanted.set_shared_memory("data", 12, offset=64)
            result = client.infer("echo", [given], outputs=[wanted])
            assert result.get_output("x")["shape"] == [3]
            assert shm.get_contents_as_numpy(handle, np.float32, [3], offset=64).tolist() == values.tolist()
            client.unregister_system_shared_memory("data")
            assert client.get_system_shared_memory_status() == []
        finally:
            client.close()
            shm.destroy_shared_memory_region(handle)

    async with serving(Echo(), allow_client_shm=True) as served:
        await trio.to_thread.run_sync(run, served.port)
