"""Bad input of every kind, over HTTP: its status, its text, and the connection that lives on.

After each refusal a valid request on the same connection is answered 200: one client's mistake costs nobody a
connection, and leaves nothing behind.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np
import pytest

from support import post, serving
from trio_infer import InferRequest, Limits, Model, TensorSpec

F = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}
HALF = "FP16 data via JSON is not supported. Please use the binary data format for"
ONLY_X = {"outputs": [{"name": "x"}]}
DEEP = b"[" * 250_000
LENGTH = "Inference-Header-Content-Length"


def doc(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{**F, **changes}], **ONLY_X}


def without(field: str) -> dict[str, Any]:
    return {"inputs": [{key: value for key, value in F.items() if key != field}], **ONLY_X}


def in_bytes(size: int) -> dict[str, Any]:
    document = without("data")
    document["inputs"][0]["parameters"] = {"binary_data_size": size}
    return document


def wanting(name: str = "x", **parameters: Any) -> dict[str, Any]:
    return {**doc(), "outputs": [{"name": name, "parameters": parameters}]}


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {**doc(), "parameters": parameters}


class Plain(Model):
    """Gives back what it gets, in each of three ways."""

    name = "plain"
    inputs = (
        TensorSpec("x", "FP32", [-1], optional=True),
        TensorSpec("n", "UINT8", [-1, 2], optional=True),
        TensorSpec("text", "BYTES", [-1], optional=True),
        TensorSpec("half", "FP16", [-1], optional=True),
        TensorSpec("flag", "BOOL", [-1], optional=True),
        TensorSpec("big", "INT64", [-1], optional=True),
    )
    outputs = (
        TensorSpec("x", "FP32", [-1]),
        TensorSpec("half", "FP16", [-1]),
        TensorSpec("text", "BYTES", [-1]),
    )

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        x = request.inputs.get("x", np.zeros(1, "f4"))
        return {"x": x, "text": np.array([b"\xff"], object), "half": np.ones(1, "f2")}


class Batching(Model):
    """Takes four rows at most."""

    name = "batching"
    max_batch_size = 4
    inputs = (TensorSpec("a", "INT32", [2]), TensorSpec("b", "INT32", [1]))
    outputs = (TensorSpec("a", "INT32", [2]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        return {"a": request.inputs["a"]}


def rows(a: list[Any], b: list[Any], **more: Any) -> dict[str, Any]:
    inputs = [
        {"name": "a", "datatype": "INT32", "shape": a, "data": [0] * int(np.prod(a))},
        {"name": "b", "datatype": "INT32", "shape": b, "data": [0] * int(np.prod(b))},
    ]
    return {"inputs": inputs, **more}


def tensor(name: str, datatype: str, data: list[Any]) -> dict[str, Any]:
    shape = [len(data) // 2, 2] if name == "n" else [len(data)]
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}], **ONLY_X}


# What is sent to plain/infer; the status; how the text begins, or what is in it.
INFER: list[tuple[str, Any, int, str]] = [
    # JSON
    ("no JSON", b"{", 500, "failed to parse the request JSON buffer"),
    ("no object", b"[]", 500, "Unable to parse 'request': attempt to access JSON non-object as object"),
    ("not UTF-8", b'{"id": "\xff"}', 500, "failed to parse the request JSON buffer"),
    ("a nesting bomb", DEEP, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    ("a nesting bomb inside", b'{"inputs": ' + DEEP, 400, "JSON nesting depth exceeds"),
    ("a number no double holds", json.dumps(doc()).replace("[1, 2]", "[1e400, 2]").encode(), 500, "failed to parse"),
    # Fields
    ("no inputs", {}, 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    ("inputs no array", {"inputs": {}}, 500, "Unable to parse 'inputs'"),
    ("an input no object", {"inputs": [5], **ONLY_X}, 500, "Unable to parse 'inputs'"),
    ("no name", without("name"), 500, "Unable to parse 'name'"),
    ("no datatype", without("datatype"), 500, "Unable to parse 'datatype'"),
    ("no shape", without("shape"), 500, "Unable to parse 'shape'"),
    ("id no string", {**doc(), "id": 5}, 500, "Unable to parse 'id'"),
    ("outputs no array", {**doc(), "outputs": 5}, 500, "Unable to parse 'outputs'"),
    ("unknown datatype", doc(datatype="FLOAT"), 400, "invalid datatype for input x"),
    ("negative shape", doc(shape=[-1]), 500, "Unable to parse 'shape'"),
    ("boolean shape", doc(shape=[True]), 500, "Unable to parse 'shape'"),
    ("overflow of elements", doc(shape=[2**62, 4]), 400, "causes total element count to exceed maximum size of"),
    ("overflow of bytes", doc(shape=[2**62]), 400, "byte size overflow for input"),
    # Where the data is
    ("no data", without("data"), 400, "exactly one of"),
    ("data twice", doc(parameters={"binary_data_size": 8}), 400, "exactly one of"),
    (
        "too few bytes",
        in_bytes(8),
        400,
        "unexpected size for input 'x', expecting 8 additional bytes for model 'plain'",
    ),
    (
        "another size than the shape",
        in_bytes(0),
        400,
        "input byte size mismatch for input 'x' for model 'plain'. Expected 8, got 0",
    ),
    # Elements
    ("too many elements", doc(data=[1, 2, 3]), 500, "Unable to parse 'data': Shape does not match true shape"),
    ("too few elements", doc(data=[1]), 500, "Failed to parse 'data' field: shape does not match true shape"),
    ("text for a number", doc(data=["1", "2"]), 500, "Unable to parse 'data'"),
    ("null for a number", doc(data=[None, 2]), 500, "Unable to parse 'data'"),
    ("a fraction for an integer", tensor("big", "INT64", [1.0]), 500, "Unable to parse 'data'"),
    ("a negative unsigned", tensor("n", "UINT8", [-1, 1]), 500, "Unable to parse 'data'"),
    ("an integer of 64 bits and more", tensor("big", "INT64", [2**63]), 500, "Unable to parse 'data'"),
    ("an integer its type can't hold", tensor("n", "UINT8", [1, 300]), 400, "element 1 of input 'n' is 300"),
    ("a number for a boolean", tensor("flag", "BOOL", [1]), 500, "Unable to parse 'data'"),
    ("a number for text", tensor("text", "BYTES", [5]), 500, "Unable to parse JSON bytes array"),
    ("half precision in JSON", tensor("half", "FP16", [1.0]), 400, f"receiving {HALF} input half"),
    # Against the model
    ("an unknown input", doc(name="q"), 400, "unexpected inference input 'q' for model 'plain'"),
    (
        "an input twice",
        {"inputs": [F, F], **ONLY_X},
        400,
        "[request id: <id_unknown>] input 'x' already exists in request",
    ),
    (
        "an input twice, with id",
        {"inputs": [F, F], "id": "7", **ONLY_X},
        400,
        "[request id: 7] input 'x' already",
    ),
    (
        "another datatype",
        doc(datatype="INT32"),
        400,
        "[request id: <id_unknown>] inference input 'x' data-type is 'INT32', but model 'plain' expects 'FP32'",
    ),
    (
        "another shape",
        doc(shape=[1, 2]),
        400,
        "[request id: <id_unknown>] unexpected shape for input 'x' for model 'plain'. Expected [-1], got [1,2].",
    ),
    ("an unknown output", wanting("q"), 400, "unexpected inference output 'q' for model 'plain'"),
    ("an output twice", {**doc(), "outputs": [{"name": "x"}] * 2}, 400, "output 'x' already exists in request"),
    ("half precision out", wanting("half"), 400, f"sending {HALF} output half"),
    ("half precision by default", {"inputs": [F]}, 400, f"sending {HALF} output half"),
    ("bytes that are no text, out", wanting("text"), 400, "output 'text' holds bytes that are not UTF-8"),
    ("classes of text", wanting("text", classification=1), 400, "class result not available for output due to unsupp"),
    ("classes of halves", wanting("half", classification=1), 400, "class result not available for output due to uns"),
    ("shared memory", wanting(shared_memory_region="r", shared_memory_byte_size=8), 501, "Client shared memory is"),
    (
        "shared memory and binary",
        wanting(shared_memory_region="r", binary_data=True),
        400,
        "output 'x' can't have both 'shared_memory_region' and 'binary_data'",
    ),
    # Parameters
    ("a parameter that is an object", with_parameters(p={}), 400, "parameter 'p' has invalid type. It should be ei"),
    ("a reserved parameter", with_parameters(triton_p=1), 400, "parameter keys starting with 'triton_' are reserved"),
    ("a fraction for a priority", with_parameters(priority=1.5), 500, "Unable to parse 'priority'"),
    ("parameters no object", {**doc(), "parameters": 5}, 500, "Unable to parse 'parameters'"),
    # Sizes
    ("too much JSON", {**doc(), "id": "x" * 300_000}, 400, "Use --http-max-input-size to increase the limit."),
]

GENERATE: list[tuple[str, Any, int, str]] = [
    ("no JSON", b"{", 500, "failed to parse the request JSON buffer"),
    ("an empty body", b"", 500, "failed to parse the request JSON buffer"),
    ("no object", b"[]", 500, "Unable to parse 'request'"),
    ("a nesting bomb", DEEP, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    ("id no string", {"id": 5}, 500, "Unable to parse 'id'"),
    ("text for a number", {"x": "1"}, 500, "Unable to parse 'data'"),
    (
        "a number for text",
        {"text": 5},
        500,
        "Unable to parse JSON bytes array: attempt to access JSON non-string as str",
    ),
    ("an object for an input", {"x": {}}, 500, "Unable to parse 'data'"),
    ("half precision", {"half": 1.0}, 400, f"receiving {HALF} input half"),
    ("no shape fits", {"n": [1, 2, 3]}, 400, "The schema can not convert input 'n' to tensor with proper shape"),
    ("a parameter that is an object", {"p": {}}, 400, "parameter 'p' has invalid type. It should be either 'int',"),
    ("parameters no object", {"parameters": 5}, 400, "Expected JSON object for keyword: 'parameters'"),
    (
        "an object inside parameters",
        {"parameters": {"p": []}},
        400,
        "Converting keyword: 'parameters': parameter 'p' has invalid type.",
    ),
    ("half precision out", {}, 400, f"sending {HALF} output half"),
    ("too much JSON", {"p": "x" * 300_000}, 400, "Use --http-max-input-size to increase the limit."),
]

BATCHES: list[tuple[str, Any, int, str]] = [
    ("too many rows", rows([5, 2], [5, 1]), 400, "inference request batch-size must be <= 4 for 'batching'"),
    ("unequal batches", rows([2, 2], [1, 1]), 400, "input 'b' batch size does not match other inputs for 'batching'"),
    ("no batch dimension", rows([2], [1]), 400, "Expected [-1,2], got [2]. NOTE"),
    ("none of two", {"inputs": []}, 400, "expected 2 inputs but got 0 inputs for model 'batching'. Got input(s) []"),
    ("one of two", {"inputs": rows([1, 2], [1, 1])["inputs"][:1]}, 400, "but missing required input(s) ['b']"),
]

HEADERS: list[tuple[str, bytes, tuple[str, ...], int, str]] = [
    ("a length beyond", b"{}", (f"{LENGTH}: 3",), 400, "inference header size should be in range (0, 2), got: 3"),
    ("a negative length", b"{}", (f"{LENGTH}: -1",), 400, "inference header size should be in range (0, 2), got: -1"),
    ("a length no number", b"{}", (f"{LENGTH}: x",), 400, f"Unable to parse {LENGTH}"),
    (
        "bytes left over",
        json.dumps(doc()).encode() + b"1234",
        (f"{LENGTH}: {len(json.dumps(doc()))}",),
        400,
        "unexpected additional input data for model 'plain'",
    ),
    (
        "raw, of several inputs",
        b"1234",
        (f"{LENGTH}: 0",),
        400,
        "Raw request must only have 1 input (found 1) to be de",
    ),
    ("an unknown compression", b"{}", ("Content-Encoding: br",), 501, "Unsupported compression type"),
    ("no gzip", b"{}", ("Content-Encoding: gzip",), 400, ""),
    ("a bomb", gzip.compress(bytes(2**22)), ("Content-Encoding: gzip",), 400, "Use --http-max-input-size to increase"),
]

CASES = [
    *[("plain", "infer", what, body, (), status, text) for what, body, status, text in INFER],
    *[("plain", "generate", what, body, (), status, text) for what, body, status, text in GENERATE],
    *[("plain", "generate_stream", what, body, (), status, text) for what, body, status, text in GENERATE],
    *[("batching", "infer", what, body, (), status, text) for what, body, status, text in BATCHES],
    *[("plain", "infer", what, body, headers, status, text) for what, body, headers, status, text in HEADERS],
    (
        "plain",
        "generate",
        "compressed",
        b"{}",
        ("Content-Encoding: gzip",),
        400,
        "Unsupported content-encoding, only 'id",
    ),
    ("nobody", "infer", "an unknown model", b"{}", (), 404, "Request for unknown model: 'nobody' is not found"),
    ("nobody", "generate", "an unknown model", b"{}", (), 404, "Request for unknown model: 'nobody' is not found"),
]

VALID = post("plain", "infer", {**doc(), **ONLY_X})


@pytest.mark.parametrize(
    ("model", "action", "body", "headers", "status", "text"),
    [pytest.param(model, action, *rest, id=f"{action}: {what}") for model, action, what, *rest in CASES],
)
async def test_bad_input_is_refused_in_triton_s_words_and_the_connection_lives_on(
    model: str, action: str, body: Any, headers: tuple[str, ...], status: int, text: str
) -> None:
    async with serving(Plain(), Batching(), memory=True, limits=Limits(http_max_input_size=270_000)) as served:
        client = served.connect_in_memory()
        answer = await client.ask(post(model, action, body, *headers))
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json"), answer.body
        assert list(answer.json) == ["error"]
        assert text in answer.json["error"]
        assert len(answer.body) < 1500
        if answer.headers.get("connection") == "close":
            assert "--http-max-input-size" in text, "only where a body was not read to its end"
            client = served.connect_in_memory()
        answer = await client.ask(VALID)
        assert (answer.status, answer.json["outputs"][0]["data"]) == (200, [1.0, 2.0])


async def test_classes_come_as_text_in_json_and_in_bytes() -> None:
    async with serving(Plain(), Batching(), memory=True) as served:
        client = served.connect_in_memory()
        document = {**doc(data=[1, 3]), "outputs": [{"name": "x", "parameters": {"classification": 5}}]}
        answer = await client.ask(post("plain", "infer", document))
        assert answer.json["outputs"] == [
            {"name": "x", "datatype": "BYTES", "shape": [2], "data": ["3.000000:1", "1.000000:0"]}
        ]
        document = rows([2, 2], [2, 1])
        document["inputs"][0]["data"] = [1, 2, 4, 3]
        document["outputs"] = [{"name": "a", "parameters": {"classification": 1, "binary_data": True}}]
        answer = await client.ask(post("batching", "infer", document))
        length = int(answer.headers["inference-header-content-length"])
        assert json.loads(answer.body[:length])["outputs"] == [
            {"name": "a", "datatype": "BYTES", "shape": [2, 1], "parameters": {"binary_data_size": 14}}
        ]
        assert answer.body[length:] == b"\3\0\0\x002:1\3\0\0\x004:0"


async def test_an_upload_in_too_many_chunks_is_refused_and_the_connection_closed() -> None:
    async with serving(Plain(), memory=True) as served:
        client = served.connect_in_memory()
        head = b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send(head + b"1\r\n \r\n" * 65_537)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert answer.json["error"] == (
            "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."
        )
