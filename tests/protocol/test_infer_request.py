"""`/infer` requests: what is taken, and in which words the rest is refused."""

import json

import attrs
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_infer.errors import BadJSONError, InferError
from trio_infer.limits import Limits
from trio_infer.protocol.infer import decode_request, parse_header_length
from trio_infer.protocol.values import RequestedOutput, ResponsePlan, Signature, TensorSpec

LIMITS = Limits()
PREFIX = "[request id: <id_unknown>] "

ADD = Signature(
    "M",
    "1",
    inputs=(TensorSpec("A", "INT32", (16,)), TensorSpec("B", "INT32", (16,))),
    outputs=(TensorSpec("SUM", "INT32", (16,)), TensorSpec("DIFF", "INT32", (16,))),
    max_batch_size=8,
)


def echo(datatype, shape=(-1,), **options):
    return Signature("M", "1", (TensorSpec("X", datatype, shape),), (TensorSpec("Y", datatype, shape),), **options)


def tensor(name="X", datatype="INT32", shape=(1,), **more):
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


def decode(document, signature, tail=b"", limits=LIMITS):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_request(text + tail, len(text) if tail else None, signature, limits=limits)


def refusal(*args, **options):
    with pytest.raises(InferError) as caught:
        decode(*args, **options)
    return caught.value


def add_inputs(rows=1, columns=16):
    return [tensor(name, "INT32", (rows, columns), data=[1] * rows * columns) for name in ("A", "B")]


# Inference-Header-Content-Length


@pytest.mark.parametrize(("value", "length"), [(None, None), ("0", 0), ("10", 10), (" 3 ", 3)])
def test_the_header_length_says_where_the_json_ends(value, length):
    assert parse_header_length(value, 10) == length


@pytest.mark.parametrize("value", ["11", "-1", "99999999999999999999"])
def test_a_header_length_outside_the_body_is_refused(value):
    with pytest.raises(InferError) as caught:
        parse_header_length(value, 10)
    assert caught.value.message == f"inference header size should be in range (0, 10), got: {value}"
    assert caught.value.status == 400


@pytest.mark.parametrize("value", ["", "abc", "1.0", "1_0", "٣", "+1", "0x1", "9" * 5000])
def test_a_header_length_that_is_no_number_is_refused(value):
    with pytest.raises(InferError, match=r"^Unable to parse") as caught:
        parse_header_length(value, 10)
    assert caught.value.status == 400


def test_a_header_length_equal_to_the_body_is_all_json():
    body = json.dumps({"id": "", "inputs": [tensor(data=[1])]}).encode()
    request, plan = decode_request(body, len(body), echo("INT32"), limits=LIMITS)
    assert request.inputs["X"].tolist() == [1]
    assert request.id == ""
    assert plan == ResponsePlan()


# Raw requests


def test_a_header_length_of_0_makes_the_body_the_tensor():
    body = np.arange(6, dtype="<f4").tobytes()
    request, plan = decode_request(body, 0, echo("FP32", (2, -1), max_batch_size=4), limits=LIMITS)
    assert request.inputs["X"].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert plan == ResponsePlan(binary_default=True)


def test_an_empty_body_is_an_empty_tensor():
    request, plan = decode_request(b"", None, echo("FP32"), limits=LIMITS)
    assert request.inputs["X"].shape == (0,)
    assert plan.binary_default


def test_a_raw_string_needs_no_length_in_front():
    request, _ = decode_request(b"a\0b", 0, echo("BYTES", (1,), max_batch_size=4), limits=LIMITS)
    assert request.inputs["X"].tolist() == [[b"a\0b"]]


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        (ADD, "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'M' model configuration"),
        (echo("BYTES"), "For BYTE datatype raw input 'X', the model must have input shape [1]"),
        (echo("FP32", (-1, -1)), "The shape of the raw input 'X' can not be deduced because there are more than one "
                                 "variable-sized dimension"),
        (echo("FP32", (2,)), "input byte size mismatch for input 'X' for model 'M'. Expected 8, got 9"),
        (echo("FP32", (3, -1)), "input byte size mismatch for input 'X' for model 'M'. Expected a multiple of 12"),
    ],
)  # fmt: skip
def test_a_raw_request_whose_shape_does_not_follow_is_refused(signature, text):
    with pytest.raises(InferError) as caught:
        decode_request(b"123456789", 0, signature, limits=LIMITS)
    assert caught.value.message.startswith(PREFIX + text)
    assert caught.value.status == 400


# JSON


@pytest.mark.parametrize("body", [b" ", b"\0", b"[]", b"null", b"{", b"1", "{}".encode("utf-16")])
def test_a_body_that_is_no_json_object_is_refused(body):
    assert isinstance(refusal(body, echo("INT32")), BadJSONError)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": {}}, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": [1]}, "Unable to parse 'inputs': attempt to access JSON non-object as object"),
        ({"inputs": [], "id": 1}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"inputs": [], "parameters": []}, "Unable to parse 'parameters': attempt to access JSON non-object as object"),
        (
            {"inputs": [], "outputs": [{}]},
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        ({"inputs": [{}]}, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
        ({"inputs": [{"name": "X"}]}, "Unable to parse 'datatype': attempt to access non-existing object member"),
        (
            {"inputs": [{"name": "X", "datatype": "INT32"}]},
            "Unable to parse 'shape': attempt to access non-existing object member 'shape'",
        ),
        ({"inputs": [tensor(data=5)]}, "Unable to parse 'data': attempt to access JSON non-array as array"),
        (
            {"inputs": [tensor(parameters={"binary_data_size": -1})]},
            "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"inputs": [tensor(data=[1])], "outputs": [{"name": "Y", "parameters": {"binary_data": 1}}]},
            "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
        ),
    ],
)
def test_fields_of_the_wrong_json_type_are_refused(document, text):
    error = refusal(document, echo("INT32"))
    assert isinstance(error, BadJSONError)
    assert error.message.startswith(text)
    assert error.status == 500


@pytest.mark.parametrize("dim", [-1, 1.5, True, "16", None, 2**64])
def test_dimensions_must_be_unsigned_integers(dim):
    error = refusal({"inputs": [tensor(shape=[dim], data=[1])]}, echo("INT32"))
    assert error.message.startswith(
        "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
    )
    assert error.status == 500


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([2**62, 4], "causes total element count to exceed maximum size of 9223372036854775807"),
        ([0, 2**62, 4], "causes total element count to exceed maximum size of 9223372036854775807"),
        ([2**62], "byte size overflow for input 'X'"),
    ],
)
@pytest.mark.parametrize("binary", [False, True])
def test_shapes_that_overflow_are_refused(shape, text, binary):
    source = {"parameters": {"binary_data_size": 4}} if binary else {"data": [1]}
    error = refusal({"inputs": [tensor(shape=shape, **source)]}, echo("INT32", (-1,) * len(shape)), b"1234" * binary)
    assert text in error.message
    assert error.status == 400


def test_as_many_dimensions_as_a_client_likes_are_refused_not_tried():
    error = refusal({"inputs": [tensor(shape=[1] * 5000, data=[1])]}, echo("INT32"))
    assert "unexpected shape for input 'X'" in error.message
    assert len(error.message) < 300


def test_a_shape_of_many_huge_dimensions_is_refused_at_once():
    error = refusal({"inputs": [tensor(shape=[2**60] * 200_000, data=[1])]}, echo("INT32"))
    assert "causes total element count to exceed" in error.message
    assert len(error.message) < 600


def test_an_unknown_datatype_is_refused():
    error = refusal({"inputs": [tensor(datatype="FLOAT", data=[1])]}, echo("INT32"))
    assert error.message.startswith("invalid datatype for input X")
    assert error.status == 400


# Where the data is


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"data": [1], "parameters": {"binary_data_size": 4}},
        {"data": [1], "parameters": {"shared_memory_region": "r"}},
        {"parameters": {"shared_memory_region": "r", "binary_data_size": 4}},
    ],
)
def test_an_input_has_exactly_one_source_of_data(source):
    error = refusal({"inputs": [tensor(**source)]}, echo("INT32"))
    assert "exactly one of" in error.message
    assert error.status == 400


def test_shared_memory_is_refused_where_it_is_not_allowed():
    shared = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    assert refusal({"inputs": [tensor(parameters=shared)]}, echo("INT32")).status == 501
    document = {"inputs": [], "outputs": [{"name": "Y", "parameters": {**shared, "binary_data": False}}]}
    assert refusal(document, echo("INT32")).status == 501


@pytest.mark.parametrize("other", [{"binary_data": True}, {"classification": 2}])
def test_shared_memory_goes_with_nothing_else(other):
    document = {"inputs": [], "outputs": [{"name": "Y", "parameters": {"shared_memory_region": "r", **other}}]}
    assert refusal(document, echo("INT32")).status == 400


def test_binary_tensors_follow_each_other_in_the_order_of_inputs():
    a, b = np.arange(16, dtype="<i4"), np.arange(16, dtype="<i4") * 2
    inputs = [tensor(name, shape=(1, 16), parameters={"binary_data_size": 64}) for name in ("B", "A")]
    request, _ = decode({"inputs": inputs}, ADD, b.tobytes() + a.tobytes())
    assert list(request.inputs) == ["B", "A"]
    np.testing.assert_array_equal(request.inputs["A"], [a])
    np.testing.assert_array_equal(request.inputs["B"], [b])


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (b"123", "unexpected size for input 'X', expecting 1 additional bytes for model 'M'"),
        (b"12345", "unexpected additional input data for model 'M'"),
        (b"", "unexpected size for input 'X', expecting 4 additional bytes for model 'M'"),
    ],
)
def test_the_bytes_behind_the_json_must_be_those_announced(tail, text):
    error = refusal({"inputs": [tensor(parameters={"binary_data_size": 4})]}, echo("INT32"), tail)
    assert error.message.startswith(text)
    assert error.status == 400


def test_a_size_unlike_the_shape_is_refused():
    error = refusal(
        {"inputs": [tensor(shape=[16], parameters={"binary_data_size": 128})]}, echo("INT32", (16,)), bytes(128)
    )
    assert error.message == PREFIX + "input byte size mismatch for input 'X' for model 'M'. Expected 64, got 128"
    assert error.status == 400


# Against the model


def test_a_good_request_is_read_whole():
    document = {
        "id": "7",
        "parameters": {"sequence_id": 5, "priority": 1, "timeout": 10, "mine": 1.5, "binary_data_output": True},
        "inputs": add_inputs(2),
        "outputs": [{"name": "DIFF", "parameters": {"binary_data": True}}, {"name": "SUM"}],
    }
    request, plan = decode(document, ADD)
    assert (request.model_name, request.model_version, request.id) == ("M", "1", "7")
    assert request.inputs["A"].shape == (2, 16)
    assert request.parameters == {"sequence_id": 5, "priority": 1, "timeout": 10, "mine": 1.5}
    assert request.requested_outputs == ("DIFF", "SUM")
    # SUM is listed and doesn't say binary, so it is JSON although binary_data_output is true.
    assert plan == ResponsePlan((RequestedOutput("DIFF", True), RequestedOutput("SUM", False)), True)


def test_is_cancelled_reaches_the_request():
    body = json.dumps({"inputs": [tensor(data=[1])]}).encode()
    request, _ = decode_request(body, None, echo("INT32"), limits=LIMITS, is_cancelled=lambda: True)
    assert request.is_cancelled()


def with_inputs(*inputs):
    return {"inputs": list(inputs)}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (with_inputs(tensor("Q", data=[1])), "unexpected inference input 'Q' for model 'M'"),
        (
            with_inputs(tensor("A", "FP32", (1, 16), data=[1] * 16)),
            PREFIX + "inference input 'A' data-type is 'FP32', but model 'M' expects 'INT32'",
        ),
        (
            with_inputs(tensor("A", shape=(1, 8), data=[1] * 8)),
            PREFIX
            + "unexpected shape for input 'A' for model 'M'. Expected [-1,16], got [1,8]. NOTE: max_batch_size is 8",
        ),
        (
            with_inputs(tensor("A", shape=(), data=[1])),
            PREFIX + "input 'A' has no shape but model requires batch dimension for 'M'",
        ),
        (
            with_inputs(*add_inputs(9)),
            PREFIX + "inference request batch-size must be <= 8 for 'M'",
        ),
        (
            with_inputs(add_inputs(1)[0], add_inputs(2)[1]),
            PREFIX + "input 'B' batch size does not match other inputs for 'M'",
        ),
        (
            with_inputs(),
            PREFIX + "expected 2 inputs but got 0 inputs for model 'M'. Got input(s) [], but missing required input(s) "
            "['A','B']. Please provide all required input(s).",
        ),
        (
            with_inputs(add_inputs()[0]),
            PREFIX
            + "expected 2 inputs but got 1 inputs for model 'M'. Got input(s) ['A'], but missing required input(s) "
            "['B']. Please provide all required input(s).",
        ),
        (with_inputs(*add_inputs()[:1] * 2), PREFIX + "input 'A' already exists in request"),
        (
            {"inputs": add_inputs(), "outputs": [{"name": "Q"}]},
            "unexpected inference output 'Q' for model 'M'",
        ),
        (
            {"inputs": add_inputs(), "outputs": [{"name": "SUM"}] * 2},
            PREFIX + "output 'SUM' already exists in request",
        ),
    ],
)
def test_what_the_model_does_not_take_is_refused(document, text):
    error = refusal(document, ADD)
    assert error.message.startswith(text)
    assert error.status == 400


def test_the_prefix_names_the_request_by_its_id():
    assert refusal({"id": "a7", "inputs": []}, ADD).message.startswith("[request id: a7] expected 2 inputs")


@pytest.mark.parametrize(
    "document",
    [
        {"id": "x" * 10_000, "inputs": []},
        {"inputs": [tensor("x" * 10_000, data=[1])]},
        {"inputs": [], "outputs": [{"name": "x" * 10_000}]},
        {"inputs": [], "parameters": {"x" * 10_000: None}},
        {"inputs": [], "parameters": {"triton_" + "x" * 10_000: 1}},
        {"inputs": "x" * 10_000},
        {"inputs": [tensor(datatype="x" * 10_000, data=[1])]},
    ],
)
def test_an_error_does_not_repeat_a_long_text(document):
    assert len(refusal(document, echo("INT32")).message) < 500


def test_optional_inputs_may_be_left_out():
    spec = TensorSpec("C", "INT32", (16,), optional=True)
    signature = attrs.evolve(ADD, inputs=(*ADD.inputs, spec))
    assert list(decode({"inputs": add_inputs()}, signature)[0].inputs) == ["A", "B"]
    error = refusal({"inputs": add_inputs()[:1]}, signature)
    assert error.message.startswith(
        PREFIX + "expected number of inputs between 2 and 3 but got 1 inputs for model 'M'."
    )


def test_half_precision_output_as_json_is_refused_before_the_model_runs():
    document = {"inputs": [tensor(datatype="FP16", parameters={"binary_data_size": 2})]}
    text = "sending FP16 data via JSON is not supported. Please use the binary data format for output Y"
    assert refusal(document, echo("FP16"), b"12").message == text
    assert refusal(document | {"outputs": [{"name": "Y"}]}, echo("FP16"), b"12").message == text
    binary = {"outputs": [{"name": "Y", "parameters": {"binary_data": True}}]}
    assert decode(document | binary, echo("FP16"), b"12")
    assert decode(document | {"parameters": {"binary_data_output": True}}, echo("FP16"), b"12")


def test_half_precision_input_as_json_is_refused():
    document = {"inputs": [tensor(datatype="FP16", data=[1.0])], "parameters": {"binary_data_output": True}}
    assert refusal(document, echo("FP16")).message == (
        "receiving FP16 data via JSON is not supported. Please use the binary data format for input X"
    )


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0)])
def test_scalars_and_empty_tensors_are_taken(shape):
    data = [7] if shape == () else []
    signature = echo("INT32", (-1,) * len(shape))
    assert decode({"inputs": [tensor(shape=shape, data=data)]}, signature)[0].inputs["X"].shape == shape


# Parameters


@pytest.mark.parametrize(
    ("parameters", "text", "status"),
    [
        (
            {"mine": [1]},
            "parameter 'mine' has invalid type. It should be either 'int', 'bool', or 'string'.",
            400,
        ),
        ({"mine": None}, "parameter 'mine' has invalid type. It should be either 'int', 'bool', or 'string'.", 400),
        (
            {"triton_x": 1},
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            400,
        ),
        ({"sequence_start": 1}, "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean", 500),
        ({"binary_data_output": "1"}, "Unable to parse 'binary_data_output': attempt to access JSON non-boolean", 500),
        ({"priority": -1}, "Unable to parse 'priority': attempt to access JSON non-unsigned-integer", 500),
        ({"timeout": 1.5}, "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer", 500),
        ({"sequence_id": True}, "Unable to parse 'sequence_id': attempt to access JSON non-unsigned-integer", 500),
        ({"sequence_id": None}, "Unable to parse 'sequence_id': attempt to access JSON non-unsigned-integer", 500),
    ],
)
def test_parameters_of_the_wrong_kind_are_refused(parameters, text, status):
    error = refusal({"inputs": [tensor(data=[1])], "parameters": parameters}, echo("INT32"))
    assert error.message.startswith(text)
    assert error.status == status


def test_plain_parameters_go_to_the_model():
    parameters = {
        "a": True,
        "b": 1,
        "c": "x",
        "d": 0.5,
        "sequence_id": "s",
        "sequence_start": True,
        "sequence_end": False,
    }
    request, _ = decode({"inputs": [tensor(data=[1])], "parameters": parameters}, echo("INT32"))
    assert request.parameters == parameters


# Limits


def test_the_size_limit_covers_json_but_not_binary_tensors():
    limits = Limits(http_max_input_size=200)
    data = bytes(800)
    document = {"inputs": [tensor(shape=[200], parameters={"binary_data_size": 800})]}
    assert decode(document, echo("INT32"), data, limits)
    too_large = [
        ({"inputs": [tensor(shape=[1], data=[1])], "parameters": {"pad": "x" * 200}}, "Request JSON size of "),
        ({"inputs": [tensor(shape=[51], data=[1])]}, "Byte size of input 'X' of 204 bytes"),
    ]
    for document, text in too_large:
        error = refusal(document, echo("INT32"), limits=limits)
        assert error.message.startswith(text)
        assert error.message.endswith("Use --http-max-input-size to increase the limit.")
        assert error.status == 400
    with pytest.raises(InferError, match="Use --http-max-input-size"):
        decode_request(bytes(204), 0, echo("INT32"), limits=limits)


def test_deep_json_is_refused_as_too_deep():
    text = b'{"inputs":[{"name":"X","datatype":"INT32","shape":[1],"data":' + b"[" * 250_000
    error = refusal(text, echo("INT32"))
    assert error.message == "JSON nesting depth exceeds maximum allowed limit (100)"
    assert error.status == 400


def test_not_a_number_is_read_for_floats_only():
    text = b'{"inputs":[{"name":"X","datatype":"%s","shape":[3],"data":[NaN,Infinity,-Infinity]}]}'
    array = decode(text % b"FP32", echo("FP32"))[0].inputs["X"]
    np.testing.assert_array_equal(array, [np.nan, np.inf, -np.inf])
    assert isinstance(refusal(text % b"INT32", echo("INT32")), BadJSONError)


# Anything at all


def maybe(strategy):
    return st.one_of(strategy, st.none(), st.integers(-2, 3), st.just([]), st.just({}), st.text(max_size=2))


parameters = st.dictionaries(
    st.sampled_from(["binary_data_size", "binary_data", "classification", "shared_memory_region"]),
    maybe(st.booleans()),
    max_size=2,
)
one_input = st.fixed_dictionaries(
    {},
    optional={
        "name": maybe(st.sampled_from("AX")),
        "datatype": maybe(st.sampled_from(["INT32", "BYTES", "FP16", "BF16", "BOOL", "FP32", "UINT8"])),
        "shape": maybe(st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**40, 2**63, 1.0]), max_size=4)),
        "data": maybe(st.lists(maybe(st.lists(st.booleans() | st.floats() | st.integers())))),
        "parameters": maybe(parameters),
    },
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "id": maybe(st.text(max_size=3)),
        "inputs": maybe(st.lists(maybe(one_input), max_size=3)),
        "outputs": maybe(
            st.lists(maybe(st.fixed_dictionaries({"name": maybe(st.just("Y")), "parameters": parameters})))
        ),
        "parameters": maybe(parameters),
    },
)
SIGNATURES = [ADD, *(echo(name, (-1, -1)) for name in ("INT32", "BYTES", "FP16", "BF16", "BOOL", "FP32", "UINT8"))]


@given(
    st.binary(max_size=60) | documents.map(json.dumps).map(str.encode),
    st.none() | st.integers(0, 60),
    st.binary(max_size=12),
    st.sampled_from(SIGNATURES),
)
@settings(max_examples=250)
def test_whatever_a_client_sends_is_taken_or_refused(text, header_length, tail, signature):
    body = text + tail
    if header_length is not None:
        header_length = len(text) if header_length > 30 else min(header_length, len(body))
    message = ""
    try:
        decode_request(body, header_length, signature, limits=LIMITS)
    except InferError as error:
        message = error.message
    orjson.dumps(message)
