"""JSON text: what orjson won't do, and what no text may do to the server."""

import gc
import json
import math
from contextlib import suppress

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_infer.errors import BadJSONError, InferError
from trio_infer.protocol.jsontext import dumps, error_json, loads

plain_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def read(text):
    return loads(text, max_depth=100)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":', b'["\\"[", [', b"[1,"])
def test_a_quarter_million_levels_are_refused_by_depth(opening):
    with pytest.raises(InferError) as caught:
        read(opening * 250_000)
    assert caught.value.message == "JSON nesting depth exceeds maximum allowed limit (100)"
    assert caught.value.status == 400


def test_depth_is_counted_exactly():
    assert read(b"[" * 100 + b"]" * 100)
    with pytest.raises(InferError, match="nesting depth"):
        read(b"[" * 101 + b"]" * 101)


def test_many_brackets_are_fine_if_they_are_not_deep():
    rows = [[float(i), i] for i in range(1000)]
    assert read(json.dumps(rows).encode()) == rows


def test_brackets_in_strings_do_not_count():
    value = ["[" * 300, '"' * 7 + "\\" * 5 + "[" * 300, "\\", "{" * 300]
    assert read(json.dumps(value).encode()) == value


def test_depth_is_measured_across_blocks():
    filler = b'"' + b"[" * 400_000 + b'",'
    assert len(read(b"[" + filler + b"1]")) == 2
    with pytest.raises(InferError, match="nesting depth"):
        read(b"[" + filler + b"[" * 100 + b"]" * 101)


def test_depth_is_measured_across_blocks_without_a_bracket():
    with pytest.raises(InferError, match="nesting depth"):
        read(b"[" * 60 + b" " * 600_000 + b"[" * 60)


def test_brackets_beyond_the_end_of_a_broken_text_do_not_matter():
    with pytest.raises(BadJSONError):
        read(b'["open' + b"[" * 500)


@given(plain_json)
@settings(max_examples=60)
def test_whatever_is_written_is_read_back(value):
    assert repr(read(dumps(value))) == repr(value)


@given(st.binary(max_size=40) | st.text('[]{}",:\\ NaNInfinity-1e0.tru', max_size=40).map(str.encode))
@settings(max_examples=150)
def test_arbitrary_bytes_are_read_or_refused(data):
    with suppress(InferError):
        read(data)


def test_bare_tokens_are_read_and_the_same_words_in_strings_left_alone():
    value = read(b'{"NaN": [NaN, Infinity, -Infinity, "Infinity \\" NaN", 1.5]}')
    nan, infinity, negative, text, number = value["NaN"]
    assert math.isnan(nan)
    assert (infinity, negative, text, number) == (math.inf, -math.inf, 'Infinity " NaN', 1.5)


@pytest.mark.parametrize("text", [b"-NaN", b"1NaN", b"NaNNaN", b"[NaN,]", b"[NaN, 1e400]", b'["\\ud800", NaN]'])
def test_bare_tokens_open_no_other_door(text):
    with pytest.raises(BadJSONError):
        read(text)


def test_the_collector_rests_during_a_large_text_and_is_as_it_was_afterwards():
    text = b"[" + b"[]," * 10_000 + b"NaN]"
    for switch in (gc.disable, gc.enable):
        switch()
        before = gc.isenabled()
        assert len(read(text)) == 10_001
        with pytest.raises(BadJSONError):
            read(text[:-1])
        assert gc.isenabled() is before


def test_an_unclosed_string_full_of_escapes_takes_linear_time():
    with pytest.raises(BadJSONError):
        read(b'[NaN, "' + b'\\"' * 500_000)


@pytest.mark.parametrize(
    ("text", "position"),
    [(b"A", 0), (b"", 0), (b" ", 0), (b"\0", 0), (b'{"a":', 5), (b"[1.0,]", 4), (b"[1e400]", 1), (b"[1, tru]", 4)],
)
def test_bad_json_says_where(text, position):
    with pytest.raises(BadJSONError) as caught:
        read(text)
    assert caught.value.message.startswith(f"failed to parse the request JSON buffer: Invalid value. at {position} (")
    assert caught.value.status == 500


@pytest.mark.parametrize("text", ["[1]".encode("utf-16"), b"\xef\xbb\xbf[]", b'"\xff"', b'["\xff", NaN]'])
def test_only_utf8_is_read(text):
    with pytest.raises(BadJSONError):
        read(text)


def test_a_view_is_read_like_bytes():
    assert read(memoryview(b"xx[1]")[2:]) == read(bytearray(b"[1]")) == [1]


def test_not_a_number_is_written_bare_wherever_it_is():
    text = dumps({"a": [math.nan, (math.inf,), None, "null"], "b": np.float32(-np.inf), "c": orjson.Fragment(b"[NaN]")})
    assert text == b'{"a":[NaN,[Infinity],null,"null"],"b":-Infinity,"c":[NaN]}'


def test_text_above_ascii_is_not_escaped():
    assert dumps({"é": "日"}) == '{"é":"日"}'.encode()


def test_large_integers_are_written_as_digits():
    assert dumps([2**64, -(2**63) - 1, 2**63]) == b"[18446744073709551616,-9223372036854775809,9223372036854775808]"


def test_what_has_no_json_form_is_a_type_error():
    with pytest.raises(TypeError):
        dumps({"a": object()})


@given(st.text())
@settings(max_examples=30)
def test_any_message_makes_an_error_body(message):
    assert list(json.loads(error_json(message))) == ["error"]


def test_an_error_body_is_one_object_with_the_text():
    assert error_json('no "é" \ud800') == '{"error":"no \\"é\\" \\\\ud800"}'.encode()
