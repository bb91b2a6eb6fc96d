"""`/generate`: flat JSON in, flat JSON out, server-sent events."""

import json

import attrs
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_infer.errors import BadJSONError, InferError
from trio_infer.limits import Limits
from trio_infer.protocol.generate import decode_generate, encode_generate, sse_event
from trio_infer.protocol.values import InferRequest, InferResponse, Signature, TensorSpec

PREFIX = "[request id: <id_unknown>] "
LLM = Signature(
    "llm",
    "1",
    inputs=(TensorSpec("text_input", "BYTES", (1,)), TensorSpec("STREAM", "BOOL", (1,), optional=True)),
    outputs=(TensorSpec("TEXT", "BYTES", (1,)), TensorSpec("N", "INT32", (-1,))),
    max_batch_size=4,
    decoupled=True,
)


def model(shape, datatype="INT32", **options):
    return Signature("m", "1", (TensorSpec("X", datatype, shape),), (), **options)


def decode(document, signature=LLM, **options):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_generate(body, signature, limits=Limits(), **options)


def refusal(document, signature=LLM):
    with pytest.raises(InferError) as caught:
        decode(document, signature)
    return caught.value


def test_keys_become_inputs_or_parameters():
    request = decode({"text_input": "hi", "STREAM": True, "max_tokens": 7, "parameters": {"top_p": 0.5, "id": "inner"}})
    assert request.inputs["text_input"].tolist() == [[b"hi"]]
    assert request.inputs["STREAM"].tolist() == [[True]]
    assert request.parameters == {"max_tokens": 7, "top_p": 0.5, "id": "inner"}
    assert request.id == ""
    assert request.requested_outputs == ()


def test_an_input_may_stand_inside_parameters():
    assert decode({"parameters": {"text_input": "hi"}}).inputs["text_input"].tolist() == [[b"hi"]]
    assert "given twice" in refusal({"text_input": "a", "parameters": {"text_input": "b"}}).message


def test_the_id_is_also_a_parameter():
    request = decode({"text_input": "hi", "id": "7"})
    assert request.id == "7"
    assert request.parameters == {"id": "7"}


def test_a_list_of_one_is_taken_like_its_element():
    assert decode({"text_input": ["a"]}).inputs["text_input"].tolist() == [[b"a"]]


def test_is_cancelled_reaches_the_request():
    assert decode({"text_input": "a"}, is_cancelled=lambda: True).is_cancelled()


@pytest.mark.parametrize(
    ("dims", "batch", "count", "shape"),
    [
        ((), 0, 1, ()),
        ((1,), 0, 1, (1,)),
        ((2, 3), 0, 6, (2, 3)),
        ((-1,), 0, 5, (5,)),
        ((-1,), 0, 0, (0,)),
        ((2, -1), 0, 6, (2, 3)),
        ((-1, 2, -1), 0, 6, (1, 2, 3)),
        ((-1, 2), 0, 6, (3, 2)),
        ((-1,), 8, 5, (1, 5)),
        ((2,), 8, 6, (3, 2)),
        ((), 8, 3, (3,)),
    ],
)
def test_the_number_of_elements_is_fitted_to_the_shape(dims, batch, count, shape):
    request = decode({"X": list(range(count))}, model(dims, max_batch_size=batch))
    assert request.inputs["X"].shape == shape
    assert request.inputs["X"].reshape(-1).tolist() == list(range(count))


@pytest.mark.parametrize(("dims", "count"), [((2,), 3), ((2,), 0), ((2, -1), 3), ((), 2), ((2, 2), 2)])
def test_a_number_of_elements_that_fits_no_shape_is_refused(dims, count):
    error = refusal({"X": [1] * count}, model(dims))
    assert error.message.startswith("The schema can not convert input 'X' to tensor with proper shape")
    assert error.status == 400


def test_more_rows_than_the_model_takes_are_refused():
    assert refusal({"text_input": ["a"] * 5}).message.startswith(
        PREFIX + "inference request batch-size must be <= 4 for 'llm'"
    )


def test_a_missing_input_is_named():
    error = refusal({"x": 1})
    assert error.message == (
        PREFIX + "expected number of inputs between 1 and 2 but got 0 inputs for model 'llm'. Got input(s) [], but "
        "missing required input(s) ['text_input']. Please provide all required input(s)."
    )
    assert error.status == 400


@pytest.mark.parametrize(
    ("document", "text", "status"),
    [
        ({"text_input": 123}, "Unable to parse JSON bytes array: attempt to access JSON non-string as string", 500),
        ({"text_input": {}}, "Unable to parse JSON bytes array: attempt to access JSON non-string as string", 500),
        ({"STREAM": "false"}, "Unable to parse 'data': attempt to access JSON non-boolean as boolean", 500),
        ({"P": {}}, "parameter 'P' has invalid type. It should be either 'int', 'bool', or 'string'.", 400),
        ({"P": None}, "parameter 'P' has invalid type. It should be either 'int', 'bool', or 'string'.", 400),
        (
            {"parameters": {"P": {}}},
            "Converting keyword: 'parameters': parameter 'P' has invalid type. "
            "It should be either 'int', 'bool', or 'string'.",
            400,
        ),
        ({"parameters": 1}, "Expected JSON object for keyword: 'parameters'", 400),
        ({"triton_x": 1}, "parameter keys starting with 'triton_' are reserved", 400),
        ({"id": 1}, "Unable to parse 'id': attempt to access JSON non-string as string", 500),
        (b"[]", "Unable to parse 'request': attempt to access JSON non-object as object", 500),
        (b"", "failed to parse the request JSON buffer: Invalid value. at 0", 500),
        (b'{"text_input":' + b"[" * 250_000, "JSON nesting depth exceeds maximum allowed limit (100)", 400),
    ],
)
def test_bad_types_are_refused(document, text, status):
    error = refusal(document)
    assert error.message.startswith(text)
    assert error.status == status


@pytest.mark.parametrize("body", [b" ", b"\0", b"null", b"{", "{}".encode("utf-16")])
def test_a_body_that_is_no_json_object_is_refused(body):
    assert isinstance(refusal(body), BadJSONError)


def test_half_precision_input_is_refused():
    error = refusal({"X": 1.0}, model((1,), "FP16"))
    assert error.message.startswith("receiving FP16 data via JSON is not supported.")


def test_the_size_limit_covers_the_body():
    with pytest.raises(InferError, match=r"Use --http-max-input-size to increase the limit\.$"):
        decode_generate(b'{"text_input":"%s"}' % (b"x" * 100), LLM, limits=Limits(http_max_input_size=100))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
nested = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)
keys = st.sampled_from(["text_input", "STREAM", "X", "id", "parameters", "triton_x", "other"])


@given(
    st.binary(max_size=30) | st.dictionaries(keys, nested, max_size=4).map(json.dumps).map(str.encode),
    st.sampled_from(
        [LLM, model(()), model((2, -1), "FP32"), model((-1,), "UINT8", max_batch_size=2), model((1,), "BF16")]
    ),
)
@settings(max_examples=200)
def test_whatever_a_client_sends_is_taken_or_refused(body, signature):
    message = ""
    try:
        decode(body, signature)
    except InferError as error:
        message = error.message
    orjson.dumps(message)


def encode(outputs, request_id="", **response):
    return encode_generate(InferResponse(outputs, **response), InferRequest("llm", "1", {}, id=request_id), LLM)


def test_one_element_is_sent_bare_and_others_as_a_flat_array():
    text = encode({"TEXT": [["hé"]], "N": np.array([[1, 2], [3, 4]], "i4")})
    assert text == '{"model_name":"llm","model_version":"1","TEXT":"hé","N":[1,2,3,4]}'.encode()


def test_no_element_is_sent_as_an_empty_array():
    assert json.loads(encode({"TEXT": np.array([])}))["TEXT"] == []


def test_the_id_and_the_response_parameters_stand_beside_the_outputs():
    document = json.loads(encode({"N": [5]}, request_id="7", parameters={"final": True}))
    assert document == {"id": "7", "model_name": "llm", "model_version": "1", "final": True, "N": 5}


def test_floats_are_written_as_in_infer():
    signature = attrs.evolve(LLM, outputs=(TensorSpec("P", "FP32", (-1,)),))
    response = InferResponse({"P": np.array([np.nan], "f4")})
    assert b'"P":NaN}' in encode_generate(response, InferRequest("llm", "1", {}), signature)


def test_the_models_mistakes_are_told():
    for outputs, parameters in (({"N": ["a"]}, {}), ({"N": [1]}, {"k": object()})):
        with pytest.raises(InferError) as caught:
            encode(outputs, parameters=parameters)
        assert caught.value.status == 500


def test_an_event_is_one_data_line():
    text = encode({"TEXT": ["a\n\nb\r\u2028"]})
    event = sse_event(text)
    assert event == b"data: " + text + b"\n\n"
    assert event.count(b"\n") == 2
