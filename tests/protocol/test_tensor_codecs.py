"""Each datatype, as JSON and as bytes, there and back."""

import json
import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trio_infer.errors import BadJSONError, InferError
from trio_infer.protocol.binary import bytes_to_array, to_buffer
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.jsontext import loads
from trio_infer.protocol.tensors import json_to_array, to_json

IN_JSON = [datatype for datatype in Datatype if datatype.in_json]


def arrays(datatype):
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    if datatype is Datatype.BYTES:
        return shapes.flatmap(
            lambda shape: st.lists(
                st.text(max_size=6).map(str.encode), min_size=math.prod(shape), max_size=math.prod(shape)
            ).map(lambda items: objects(items).reshape(shape))
        )
    if datatype is Datatype.BF16:
        return hnp.arrays(np.uint16, shapes).map(lambda bits: (bits.astype("<u4") << np.uint32(16)).view("<f4"))
    return hnp.arrays(datatype.dtype, shapes)


def objects(items):
    array = np.empty(len(items), object)
    array[:] = items
    return array


def from_bytes(data, datatype, shape):
    return bytes_to_array(memoryview(data), datatype, shape, "X", model="m", request_id="")


def from_json(text, datatype, shape):
    return json_to_array(loads(text, max_depth=100), datatype, shape, "X")


@pytest.mark.parametrize("datatype", IN_JSON)
@given(data=st.data())
@settings(max_examples=25)
def test_json_round_trip(datatype, data):
    array = data.draw(arrays(datatype))
    text = to_json(array, datatype, "X")
    back = from_json(text, datatype, array.shape)
    assert back.dtype == datatype.dtype
    np.testing.assert_array_equal(back, array)
    assert to_json(back, datatype, "X") == text


@pytest.mark.parametrize("datatype", list(Datatype))
@given(data=st.data())
@settings(max_examples=25)
def test_binary_round_trip(datatype, data):
    array = data.draw(arrays(datatype))
    raw = bytes(to_buffer(array, datatype, "X"))
    back = from_bytes(raw, datatype, array.shape)
    assert back.dtype == datatype.dtype
    assert back.shape == array.shape
    assert bytes(to_buffer(back, datatype, "X")) == raw
    np.testing.assert_array_equal(back, array)


@given(st.binary(max_size=40), st.integers(0, 5))
@settings(max_examples=80)
def test_arbitrary_bytes_are_strings_or_refused(data, count):
    with suppress(InferError):
        assert to_buffer(from_bytes(data, Datatype.BYTES, (count,)), Datatype.BYTES, "X") == data


def test_numeric_tensors_are_views_of_what_was_received():
    received = bytearray(b"xyz" + np.arange(3, dtype="<i4").tobytes())
    array = from_bytes(memoryview(received)[3:], Datatype.INT32, (3,))
    assert np.shares_memory(array, np.frombuffer(received, np.uint8))
    assert not array.flags.writeable
    assert array.tolist() == [0, 1, 2]


def test_contiguous_arrays_are_sent_without_a_copy():
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    assert np.shares_memory(np.frombuffer(to_buffer(array, Datatype.FP32, "X"), np.uint8), array)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_scalars_and_empty_tensors_have_buffers(shape):
    array = np.zeros(shape, "<f8")
    assert len(to_buffer(array, Datatype.FP64, "X")) == array.nbytes


@pytest.mark.parametrize(
    "layout", [lambda a: a.T, lambda a: a[::-1, ::2], lambda a: a.astype(a.dtype.newbyteorder(">"))]
)
def test_any_layout_is_sent_row_major_and_little_endian(layout):
    array = layout(np.arange(12, dtype="<i4").reshape(3, 4))
    expected = np.array(array.tolist(), "<i4")
    assert bytes(to_buffer(array, Datatype.INT32, "X")) == expected.tobytes()
    assert json.loads(to_json(array, Datatype.INT32, "X")) == expected.reshape(-1).tolist()


def test_fp32_is_written_as_the_double_it_equals():
    array = np.array([0.1, 1, 16777216, -0.0, np.nan, np.inf, -np.inf], "<f4")
    text = to_json(array, Datatype.FP32, "X")
    assert text == b"[0.10000000149011612,1.0,16777216.0,-0.0,NaN,Infinity,-Infinity]"


def test_text_above_ascii_is_not_escaped():
    assert to_json(objects(["é".encode(), b"a\0", b""]), Datatype.BYTES, "X") == '["é","a\\u0000",""]'.encode()


def test_an_element_too_long_for_its_length_prefix_is_an_error():
    class Huge(bytes):
        def __len__(self):
            return 2**32

    with pytest.raises(InferError, match="4 GiB") as caught:
        to_buffer(objects([Huge()]), Datatype.BYTES, "X")
    assert caught.value.status == 500


def test_bytes_that_are_not_utf8_point_to_binary_output():
    with pytest.raises(InferError, match=r"not UTF-8.*use the binary data format for output X") as caught:
        to_json(objects([b"\xff"]), Datatype.BYTES, "X")
    assert caught.value.status == 400


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.BF16])
def test_half_precision_has_no_json_form(datatype):
    name = datatype.value
    with pytest.raises(InferError) as caught:
        json_to_array([1.0], datatype, (1,), "IN")
    assert caught.value.message == (
        f"receiving {name} data via JSON is not supported. Please use the binary data format for input IN"
    )
    assert caught.value.status == 400
    with pytest.raises(InferError) as caught:
        to_json(np.zeros(1, datatype.dtype), datatype, "OUT")
    assert caught.value.message == (
        f"sending {name} data via JSON is not supported. Please use the binary data format for output OUT"
    )
    assert caught.value.status == 400


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], 2], 3, [[[4]]]], [[], [1, 2, 3], [[]], 4]])
def test_data_may_be_flat_or_nested_in_any_mix(data):
    assert json_to_array(data, Datatype.INT32, (2, 2), "X").tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("datatype", "value", "words"),
    [
        ("BOOL", 1, "non-boolean as boolean"),
        ("BOOL", "true", "non-boolean as boolean"),
        ("INT32", 1.0, "non-signed-integer as signed-integer"),
        ("INT32", True, "non-signed-integer as signed-integer"),
        ("INT32", "1", "non-signed-integer as signed-integer"),
        ("INT32", None, "non-signed-integer as signed-integer"),
        ("INT32", math.nan, "non-signed-integer as signed-integer"),
        ("INT64", 2**63, "non-signed-integer as signed-integer"),
        ("INT64", -(2**63) - 1, "non-signed-integer as signed-integer"),
        ("UINT8", -1, "non-unsigned-integer as unsigned-integer"),
        ("UINT64", -1, "non-unsigned-integer as unsigned-integer"),
        ("UINT64", 2**64, "non-unsigned-integer as unsigned-integer"),
        ("UINT32", True, "non-unsigned-integer as unsigned-integer"),
        ("FP32", "1", "non-number as double"),
        ("FP32", True, "non-number as double"),
        ("FP64", {}, "non-number as double"),
    ],
)
def test_elements_of_another_json_type_are_refused(datatype, value, words):
    with pytest.raises(BadJSONError) as caught:
        json_to_array([value], Datatype[datatype], (1,), "X")
    assert caught.value.message.startswith(f"Unable to parse 'data': attempt to access JSON {words} (got ")
    assert "element 0 of input 'X'" in caught.value.message
    assert caught.value.status == 500


@pytest.mark.parametrize("value", [1, None, True, {"b64": "YQ=="}])
def test_bytes_elements_must_be_strings(value):
    with pytest.raises(BadJSONError) as caught:
        json_to_array(["a", value], Datatype.BYTES, (2,), "X")
    assert caught.value.message.startswith(
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string (got "
    )


@pytest.mark.parametrize(
    ("datatype", "value"), [("UINT8", 300), ("INT8", 128), ("INT8", -129), ("INT16", 40_000), ("UINT32", 2**32)]
)
def test_integers_too_large_for_a_narrow_type_are_refused_instead_of_wrapped(datatype, value):
    with pytest.raises(InferError, match=f"element 1 of input 'X' is {value}, which {datatype} can't hold") as caught:
        json_to_array([0, value], Datatype[datatype], (2,), "X")
    assert caught.value.status == 400


def test_the_ends_of_each_integer_type_are_read():
    for datatype in Datatype:
        if datatype.dtype.kind in "iu":
            ends = [np.iinfo(datatype.dtype).min, np.iinfo(datatype.dtype).max]
            ends = [int(end) for end in ends]
            assert json_to_array(ends, datatype, (2,), "X").tolist() == ends


def test_floats_take_integers_and_overflow_to_infinity():
    assert json_to_array([1, 1e40, -1e40, 2**63], Datatype.FP32, (4,), "X").tolist() == [
        1,
        math.inf,
        -math.inf,
        2.0**63,
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (18, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (15, "Failed to parse 'data' field: shape does not match true shape"),
        (0, "Failed to parse 'data' field: shape does not match true shape"),
    ],
)
def test_another_number_of_elements_than_the_shape_says_is_refused(count, text):
    with pytest.raises(BadJSONError) as caught:
        json_to_array([0] * count, Datatype.INT32, (1, 16), "X")
    assert caught.value.message == f"{text} (input 'X' has shape [1,16], expected 16 elements, got {count})"
    assert caught.value.status == 500


# fmt: off
BF16_CASES = [  # FP32 bits, BF16 bits
    (0x00000000, 0x0000), (0x80000000, 0x8000), (0x3F800000, 0x3F80),
    (0x3F808000, 0x3F80), (0x3F818000, 0x3F82),  # ties go to even
    (0x3F808001, 0x3F81), (0x3F807FFF, 0x3F80),
    (0x7F7FFFFF, 0x7F80), (0x7F800000, 0x7F80), (0xFF800000, 0xFF80),  # overflow, infinities
    (0x7FC00000, 0x7FC0), (0x7F800001, 0x7FC0), (0xFFFFFFFF, 0xFFFF), (0x7FA10000, 0x7FA1),  # NaN stays NaN
]
# fmt: on


@pytest.mark.parametrize(("wide", "narrow"), BF16_CASES)
def test_bf16_is_rounded_to_nearest_even(wide, narrow):
    array = np.array([wide], "<u4").view("<f4")
    assert bytes(to_buffer(array, Datatype.BF16, "X")) == narrow.to_bytes(2, "little")


def test_every_bf16_value_comes_back_bit_by_bit():
    raw = np.arange(2**16, dtype="<u2").tobytes()
    assert bytes(to_buffer(from_bytes(raw, Datatype.BF16, (2**16,)), Datatype.BF16, "X")) == raw


def test_every_fp16_value_comes_back_bit_by_bit():
    raw = np.arange(2**16, dtype="<u2").tobytes()
    assert bytes(to_buffer(from_bytes(raw, Datatype.FP16, (2**16,)), Datatype.FP16, "X")) == raw


def test_booleans_other_than_0_and_1_are_made_1():
    array = from_bytes(b"\x00\x01\x02\xff", Datatype.BOOL, (4,))
    assert array.tolist() == [False, True, True, True]
    assert (array == True).sum() == 3  # noqa: E712


PREFIX = "[request id: <id_unknown>] "


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x01\0\0\0a", "expected 2 string elements for inference input 'X' for model 'm', got 1"),
        (b"\0\0\0\0" * 3, "unexpected number of string elements 3 for inference input 'X' for model 'm', expecting 2"),
        (b"\0\0\0\0\0\0\0", "incomplete string length indicator for inference input 'X' for model 'm', expecting 4"),
        (b"\xff\xff\xff\xffab", "incomplete string data for inference input 'X' for model 'm', expecting string of "
                               "length 4294967295 but only 2 bytes available"),
    ],
)  # fmt: skip
def test_length_prefixes_must_add_up(data, text):
    with pytest.raises(InferError) as caught:
        from_bytes(data, Datatype.BYTES, (2,))
    assert caught.value.message.startswith(PREFIX + text)
    assert caught.value.status == 400


def test_a_binary_tensor_must_be_as_long_as_its_shape_says():
    with pytest.raises(InferError) as caught:
        from_bytes(bytes(128), Datatype.INT32, (16,))
    assert caught.value.message == PREFIX + "input byte size mismatch for input 'X' for model 'm'. Expected 64, got 128"
    assert caught.value.status == 400
