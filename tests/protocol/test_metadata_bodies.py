"""What the server and its models say about themselves."""

import attrs
import pytest

from trio_infer.protocol.metadata import model_metadata, server_metadata
from trio_infer.protocol.values import Signature, TensorSpec

MODEL = Signature("m", "2", (TensorSpec("X", "FP32", (3, -1)),), (TensorSpec("Y", "BYTES", ()),))


def test_the_server_says_its_name_and_what_it_serves():
    assert server_metadata("triton", "1.0", ("parameters",)) == {
        "name": "triton",
        "version": "1.0",
        "extensions": ["parameters"],
    }


def test_a_datatype_that_there_is_not_is_told_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"`datatype` must be one of BOOL, UINT8, .*, BYTES, got 'float32'"):
        TensorSpec("X", "float32", (1,))


def test_a_model_says_its_tensors():
    assert model_metadata(MODEL, ["1", "2"], "python") == {
        "name": "m",
        "versions": ["1", "2"],
        "platform": "python",
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [3, -1]}],
        "outputs": [{"name": "Y", "datatype": "BYTES", "shape": []}],
    }


def test_a_batch_dimension_is_shown_in_front():
    document = model_metadata(attrs.evolve(MODEL, max_batch_size=1), ["2"], "python")
    assert document["inputs"][0]["shape"] == [-1, 3, -1]
    assert document["outputs"][0]["shape"] == [-1]
