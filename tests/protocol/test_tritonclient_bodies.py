"""Both directions against the bodies that the real `tritonclient.http` builds and reads."""

import gzip

import ml_dtypes
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from trio_infer.limits import Limits
from trio_infer.protocol.compression import compress
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.infer import decode_request, encode_response
from trio_infer.protocol.values import InferResponse, Signature, TensorSpec

VALUES = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 65535]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-(2**15), 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "FP16": np.array([[0, -0.0, 65504, 6e-8, np.inf, np.nan]], np.float16),
    "FP32": np.array([[0.1, -0.0, np.nan, np.inf, -np.inf, 3e38]], np.float32),
    "FP64": np.array([[0.1, -0.0, np.nan, np.inf, 1e308]], np.float64),
    "BF16": np.array([[0, -0.0, 65504, 6e-8, np.inf, np.nan]], ml_dtypes.bfloat16),
    "BYTES": np.array([[b"a", "é".encode(), b""]], object),
}
WAYS = [
    (name, binary_in, binary_out)
    for name in VALUES
    for binary_in in (True, False)
    for binary_out in (True, False)
    if Datatype[name].in_json or (binary_in and binary_out)
]


def echo(datatype):
    spec = (-1,)
    return Signature("m", "1", (TensorSpec("X", datatype, spec),), (TensorSpec("Y", datatype, spec),), max_batch_size=8)


def run(name, value, outputs, binary_in, packed=None, **options):
    """A client's request through decode, echo and encode, and back into the client."""
    given = InferInput("X", list(value.shape), name)
    given.set_data_from_numpy(value, binary_data=binary_in)
    body, header_length = InferenceServerClient.generate_request_body([given], outputs=outputs, **options)
    signature = echo(name)
    request, plan = decode_request(body, header_length, signature, limits=Limits())
    encoded = encode_response(InferResponse({"Y": request.inputs["X"]}), request, plan, signature)
    answer = compress(packed, encoded.buffers) if packed else b"".join(encoded.buffers)
    result = InferenceServerClient.parse_response_body(
        answer, header_length=encoded.header_length, content_encoding=packed
    )
    return request, result


@pytest.mark.parametrize(("name", "binary_in", "binary_out"), WAYS)
def test_every_datatype_goes_there_and_back(name, binary_in, binary_out):
    value = VALUES[name]
    _, result = run(name, value, [InferRequestedOutput("Y", binary_data=binary_out)], binary_in)
    back = result.as_numpy("Y")
    assert back.shape == value.shape
    if name == "BYTES":
        assert [item if isinstance(item, bytes) else item.encode() for item in back.flat] == list(value.flat)
    else:
        assert back.astype(value.dtype).tobytes() == value.tobytes()


def test_without_outputs_the_client_gets_all_of_them_as_bytes():
    _, result = run("FP32", VALUES["FP32"], None, binary_in=True)
    assert result.get_output("Y")["parameters"] == {"binary_data_size": 24}


def test_bytes_with_nul_and_ff_go_as_binary():
    value = np.array([[b"\0"], [b"\xff\0"]], object)
    request, result = run("BYTES", value, None, binary_in=True)
    assert request.inputs["X"].tolist() == value.tolist()
    assert result.as_numpy("Y").tolist() == value.tolist()


def test_an_empty_tensor_goes_there_and_back():
    value = np.zeros((1, 0), np.float32)
    _, result = run("FP32", value, None, binary_in=True)
    assert result.as_numpy("Y").shape == (1, 0)


@pytest.mark.parametrize("packed", ["gzip", "deflate"])
def test_the_client_reads_compressed_answers(packed):
    _, result = run("INT32", VALUES["INT32"], None, binary_in=True, packed=packed)
    np.testing.assert_array_equal(result.as_numpy("Y"), VALUES["INT32"])


def test_the_clients_id_and_parameters_arrive():
    request, result = run(
        "INT32",
        VALUES["INT32"],
        None,
        binary_in=False,
        request_id="r1",
        sequence_id=3,
        sequence_start=True,
        priority=2,
        timeout=1000,
        parameters={"mine": "x"},
    )
    assert request.id == result.get_response()["id"] == "r1"
    assert request.parameters == {
        "sequence_id": 3,
        "sequence_start": True,
        "sequence_end": False,
        "priority": 2,
        "timeout": 1000,
        "mine": "x",
    }


def test_a_gzipped_body_counts_its_header_uncompressed():
    given = InferInput("X", [1, 2], "INT32")
    given.set_data_from_numpy(VALUES["INT32"])
    body, header_length = InferenceServerClient.generate_request_body([given])
    request, _ = decode_request(gzip.decompress(gzip.compress(body)), header_length, echo("INT32"), limits=Limits())
    np.testing.assert_array_equal(request.inputs["X"], VALUES["INT32"])
