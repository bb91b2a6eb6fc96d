"""`/infer` answers: from whatever a model gave to what its client asked for."""

import json

import attrs
import ml_dtypes
import numpy as np
import pytest

from trio_infer.errors import InferError
from trio_infer.protocol.infer import encode_response
from trio_infer.protocol.values import (
    InferRequest,
    InferResponse,
    RequestedOutput,
    ResponsePlan,
    Signature,
    TensorSpec,
)

MODEL = Signature(
    "M",
    "3",
    inputs=(),
    outputs=(TensorSpec("A", "INT32", (-1,)), TensorSpec("B", "FP32", (-1,)), TensorSpec("S", "BYTES", (-1,))),
)
A, B, S = np.array([1, 2], "i4"), np.array([0.5], "f4"), np.array(["x"], object)


def encode(outputs, plan=None, signature=MODEL, request_id="", **response):
    plan = plan or ResponsePlan()
    names = tuple(output.name for output in plan.outputs)
    request = InferRequest("M", "3", {}, id=request_id, requested_outputs=names)
    encoded = encode_response(InferResponse(outputs, **response), request, plan, signature)
    header, *buffers = encoded.buffers
    assert encoded.header_length == (len(header) if buffers else None)
    return json.loads(header), [bytes(buffer) for buffer in buffers]


def one(datatype, value):
    signature = Signature("M", "3", (), (TensorSpec("Y", datatype, (-1,)),))
    document, _ = encode({"Y": value}, signature=signature)
    return document["outputs"][0]


def failure(datatype, value):
    with pytest.raises(InferError) as caught:
        one(datatype, value)
    assert caught.value.status == 500
    return caught.value.message


def test_all_outputs_are_sent_as_json_unless_asked_otherwise():
    document, buffers = encode({"S": S, "A": A, "B": B})
    assert document == {
        "model_name": "M",
        "model_version": "3",
        "outputs": [
            {"name": "A", "datatype": "INT32", "shape": [2], "data": [1, 2]},
            {"name": "B", "datatype": "FP32", "shape": [1], "data": [0.5]},
            {"name": "S", "datatype": "BYTES", "shape": [1], "data": ["x"]},
        ],
    }
    assert buffers == []


def test_the_id_and_the_response_parameters_are_sent_along():
    document, _ = encode({"A": A}, request_id="7", parameters={"k": True, "n": 2**64, "f": np.float64(0.5)})
    assert document["id"] == "7"
    assert document["parameters"] == {"k": True, "n": 2**64, "f": 0.5}


def test_binary_outputs_follow_the_json_in_the_order_asked_for():
    plan = ResponsePlan((RequestedOutput("S", True), RequestedOutput("B", False), RequestedOutput("A", True)))
    document, buffers = encode({"A": A, "B": B, "S": S}, plan)
    assert [output["name"] for output in document["outputs"]] == ["S", "B", "A"]
    assert [output.get("parameters") for output in document["outputs"]] == [
        {"binary_data_size": 5},
        None,
        {"binary_data_size": 8},
    ]
    assert buffers == [b"\x01\0\0\0x", A.tobytes()]


def test_outputs_not_asked_for_are_dropped():
    document, _ = encode({"A": A, "B": B}, ResponsePlan((RequestedOutput("B", False),)))
    assert [output["name"] for output in document["outputs"]] == ["B"]


def test_the_binary_default_holds_only_where_nothing_is_listed():
    document, buffers = encode({"A": A}, ResponsePlan(binary_default=True))
    assert document["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert buffers == [A.tobytes()]
    document, buffers = encode({"A": A}, ResponsePlan((RequestedOutput("A", False),), binary_default=True))
    assert document["outputs"][0]["data"] == [1, 2]
    assert buffers == []


def test_binary_outputs_without_a_byte_make_plain_json():
    document, buffers = encode({"A": np.zeros(0, "i4"), "S": []}, ResponsePlan(binary_default=True))
    assert [output["parameters"] for output in document["outputs"]] == [{"binary_data_size": 0}] * 2
    assert buffers == []


def test_the_content_type_says_whether_there_is_more_than_json():
    request, response = InferRequest("M", "3", {}), InferResponse({"A": A})
    assert encode_response(response, request, ResponsePlan(), MODEL).content_type == "application/json"
    binary = encode_response(response, request, ResponsePlan(binary_default=True), MODEL)
    assert binary.content_type == "application/octet-stream"


def test_not_a_number_is_written_bare():
    request = InferRequest("M", "3", {})
    response = InferResponse({"B": np.array([np.nan, np.inf, 0.1], "f4")})
    (text,) = encode_response(response, request, ResponsePlan(), MODEL).buffers
    assert b'"data":[NaN,Infinity,0.10000000149011612]}' in text


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_as_json_is_an_error_and_no_broken_json(datatype):
    signature = Signature("M", "3", (), (TensorSpec("Y", datatype, (-1,)),))
    with pytest.raises(InferError) as caught:
        encode({"Y": [1.0]}, signature=signature)
    assert caught.value.status == 400
    assert caught.value.message == (
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output Y"
    )


def test_bytes_that_are_not_utf8_are_refused_as_json_and_sent_as_bytes():
    outputs = {"S": np.array([b"\xff\0"], object)}
    with pytest.raises(InferError, match="binary data format for output S"):
        encode(outputs)
    assert encode(outputs, ResponsePlan(binary_default=True))[1] == [b"\x02\0\0\0\xff\0"]


@pytest.mark.parametrize(
    ("datatype", "value", "shape", "data"),
    [
        ("INT32", [[1, 2], [3, 4]], [2, 2], [1, 2, 3, 4]),
        ("INT32", np.arange(4, dtype=">i8").reshape(2, 2).T, [2, 2], [0, 2, 1, 3]),
        ("UINT8", [0, 255], [2], [0, 255]),
        ("INT64", np.uint32(7), [], [7]),
        ("FP32", [1, 2], [2], [1.0, 2.0]),
        ("FP32", 0.5, [], [0.5]),
        ("FP32", np.array([0.1]), [1], [0.10000000149011612]),
        ("FP64", np.array([0.5], ">f2"), [1], [0.5]),
        ("BOOL", [True, False], [2], [True, False]),
        ("BYTES", ["é", b"a\0"], [2], ["é", "a\0"]),
        ("BYTES", b"a\0", [], ["a\0"]),
        ("BYTES", np.array([["é"]]), [1, 1], ["é"]),
        ("BYTES", np.array([b"ab"]), [1], ["ab"]),
        ("BYTES", np.array([np.str_("a"), bytearray(b"b")], object), [2], ["a", "b"]),
        ("BYTES", np.array([]), [0], []),
        ("INT32", [], [0], []),
        ("FP32", np.zeros((0, 3), object), [0, 3], []),
    ],
)
def test_whatever_numpy_takes_is_made_into_what_was_declared(datatype, value, shape, data):
    assert one(datatype, value) == {"name": "Y", "datatype": datatype, "shape": shape, "data": data}


@pytest.mark.parametrize(
    ("datatype", "value", "words"),
    [
        ("INT32", np.array([0.5]), "must be INT32 (numpy int32), got numpy float64"),
        ("INT32", [True], "must be INT32 (numpy int32), got numpy bool"),
        ("INT32", ["1"], "must be INT32 (numpy int32), got numpy <U1"),
        ("INT8", np.array([1, 200]), "must be INT8 (numpy int8), got numpy int64 with values from 1 to 200"),
        ("UINT8", [-1], "must be UINT8 (numpy uint8), got numpy int64 with values from -1 to -1"),
        ("FP32", np.array([1]), "must be FP32 (numpy float32), got numpy int64"),
        ("FP32", np.array([1j]), "must be FP32 (numpy float32), got numpy complex128"),
        ("BOOL", np.array([1]), "must be BOOL (numpy bool), got numpy int64"),
        ("BYTES", np.array([1]), "must be BYTES (str or bytes elements), got numpy int64"),
        ("BYTES", [1], "must be BYTES (str or bytes elements), got an element of type int"),
        ("BYTES", ["\ud800"], "must be BYTES (str or bytes elements), got a str that UTF-8 can't carry"),
        ("FP32", [[1.0], [1.0, 2.0]], "must be FP32 (numpy float32), got list: "),
    ],
)
def test_what_would_lose_its_meaning_is_the_models_mistake(datatype, value, words):
    assert f"output 'Y' of model 'M' {words}" in failure(datatype, value)


def test_floats_are_narrowed_without_a_warning():
    assert one("FP32", np.array([1e300]))["data"] == [np.inf]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_bf16_is_sent_from_any_float_type(dtype):
    signature = Signature("M", "3", (), (TensorSpec("Y", "BF16", (-1,)),))
    values = np.array([1.0, -2.5, np.inf], dtype)
    _, buffers = encode({"Y": values}, ResponsePlan(binary_default=True), signature)
    assert buffers == [values.astype(ml_dtypes.bfloat16).tobytes()]


def test_an_output_asked_for_and_not_given_is_the_models_mistake():
    with pytest.raises(InferError) as caught:
        encode({"A": A}, ResponsePlan((RequestedOutput("B", False),)))
    assert caught.value.message == "model 'M' gave no output 'B'; it declares ['A', 'B', 'S'] and gave ['A']"
    assert caught.value.status == 500


def test_a_declared_output_may_be_absent_and_an_undeclared_one_is_dropped():
    assert [output["name"] for output in encode({"A": A})[0]["outputs"]] == ["A"]
    document, _ = encode({"A": A, "B": B, "S": S, "debug": A})
    assert [output["name"] for output in document["outputs"]] == ["A", "B", "S"]


def test_a_misspelt_output_is_the_models_mistake():
    with pytest.raises(InferError, match=r"gave no output 'A'.*gave \['a', 'B', 'S'\]"):
        encode({"a": A, "B": B, "S": S})


def test_parameters_that_have_no_json_form_are_the_models_mistake():
    with pytest.raises(InferError, match="parameters that JSON can't carry") as caught:
        encode({"A": A}, parameters={"k": object()})
    assert caught.value.status == 500


def test_an_array_that_cannot_be_made_is_the_models_mistake():
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("still on the GPU")

    assert "got Broken: still on the GPU" in failure("FP32", Broken())


def test_the_batch_dimension_is_part_of_the_shape():
    signature = attrs.evolve(MODEL, max_batch_size=4)
    document, _ = encode({"A": A.reshape(1, 2)}, signature=signature)
    assert document["outputs"][0]["shape"] == [1, 2]
