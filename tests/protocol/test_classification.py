"""Classes: the largest elements as text, in Triton's form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from trio_infer.errors import InferError
from trio_infer.protocol.classification import MOST_ELEMENTS, check_classifiable, classify
from trio_infer.protocol.datatypes import Datatype

NAN, INF = math.nan, math.inf


def classes(values, dtype="f4", most=9, labels=(), *, batched=False):
    array = classify(np.array(values, dtype), "Y", most, labels, batched=batched)
    return array.shape, [text.decode() for text in array.reshape(-1)]


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1, 3, 2], "f4", ["3.000000:1", "2.000000:2", "1.000000:0"]),
        ([0.1, 1e-7], "f4", ["0.100000:0", "0.000000:1"]),
        ([1e22], "f8", ["10000000000000000000000.000000:0"]),
        ([1, NAN, INF, -INF, NAN], "f4", ["inf:2", "1.000000:0", "-inf:3", "nan:1", "nan:4"]),
        ([2, 2, 1, 2], "f8", ["2.000000:0", "2.000000:1", "2.000000:3", "1.000000:2"]),
        ([-128, 127, -128], "i1", ["127:1", "-128:0", "-128:2"]),
        ([0, 2**64 - 1, 5, 5], "u8", ["18446744073709551615:1", "5:2", "5:3", "0:0"]),
        ([-(2**63), 2**63 - 1], "i8", ["9223372036854775807:1", "-9223372036854775808:0"]),
    ],
)
def test_elements_are_listed_from_the_largest(values, dtype, expected):
    assert classes(values, dtype) == ((len(values),), expected)


def test_each_row_of_a_batch_has_its_own_and_labels_are_added_where_there_are_some():
    assert classes([[1, 5, 3], [9, 7, 8]], "i4", 2, ["cat", "", "dog"], batched=True) == (
        (2, 2),
        ["5:1", "3:2:dog", "9:0:cat", "8:2:dog"],
    )
    assert classes([[[1, 5], [3, 4]]], "i4", 1, batched=True) == ((1, 1), ["5:1"]), "a row is flattened"
    assert classes([[1, 5], [3, 4]], "i4", 1) == ((1,), ["5:1"]), "without a batch, all of it is"
    assert classes(np.zeros((0, 3)), batched=True) == ((0, 0), [])
    assert classes(7.0) == ((1,), ["7.000000:0"])


@given(npst.arrays(st.sampled_from([np.int16, np.uint64, np.float32]), st.integers(0, 30)), st.integers(1, 40))
def test_it_is_a_stable_sort_cut_short(array, most):
    order = sorted(
        range(array.size),
        key=lambda index: (1, 0, index) if np.isnan(array[index]) else (0, -array[index].item(), index),
    )
    _, texts = classes(array, array.dtype, most)
    assert [int(text.split(":")[1]) for text in texts] == order[:most]


@pytest.mark.parametrize("name", ["BYTES", "BOOL", "FP16", "BF16"])
def test_types_without_numbers_of_their_own_are_refused(name):
    with pytest.raises(InferError, match=r"^class result not available for output due to unsupported type") as caught:
        check_classifiable(Datatype[name], "Y")
    assert caught.value.status == 400


def test_there_is_a_limit_for_each_row():
    with pytest.raises(InferError, match=r"^classification output tensor too large"):
        classify(np.zeros((1, MOST_ELEMENTS + 1), "i1"), "Y", 1, (), batched=True)
    assert classify(np.zeros((2, MOST_ELEMENTS), "i1"), "Y", 1, (), batched=True).shape == (2, 1)
