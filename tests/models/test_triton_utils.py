from __future__ import annotations

import json
import logging
import timeit
from typing import Any

import numpy as np
import pytest

from trio_infer.errors import ErrorCode
from trio_infer.lifecycle import CancelReason, Life
from trio_infer.models import triton_utils as pb_utils
from trio_infer.models.triton_autocomplete import AutoCompleteConfig
from trio_infer.models.triton_messages import InferenceRequest
from trio_infer.models.triton_tensors import Tensor, reshaped, wire_array
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest


class NoWork:
    def promise(self) -> None: ...

    def put(self, response: object, *, final: bool) -> None: ...


def received(outputs: tuple[str, ...] = (), **parameters: Any) -> InferenceRequest:
    request = InferRequest("m", "2", {}, id="r1", parameters=parameters, requested_outputs=outputs)
    tensor = Tensor.received("IN", np.zeros(2, dtype=np.float32), Datatype.FP32)
    return InferenceRequest.received(request, [tensor], ["A", "B"], NoWork())  # type: ignore[arg-type]


def test_a_tensor_tells_what_it_is() -> None:
    tensor = pb_utils.Tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    assert (tensor.name(), tensor.triton_dtype(), tensor.shape(), tensor.is_cpu()) == ("x", 11, [2, 3], True)
    assert pb_utils.triton_to_numpy_type(tensor.triton_dtype()) is np.float32
    assert tensor.as_numpy().sum() == 15


def test_arrays_that_are_not_contiguous_are_copied_and_keep_their_shape() -> None:
    array = np.arange(6).reshape(2, 3).T
    tensor = pb_utils.Tensor("x", array)
    assert tensor.as_numpy().flags.c_contiguous
    assert np.array_equal(tensor.as_numpy(), array)
    assert pb_utils.Tensor("x", np.array(1.5)).shape() == []


def test_read_only_inputs_can_be_written_and_are_copied_once() -> None:
    array = np.frombuffer(b"\0" * 8, dtype=np.float32)
    tensor = Tensor.received("x", array, Datatype.FP32)
    tensor.as_numpy()[0] = 7
    assert tensor.as_numpy()[0] == 7
    assert array[0] == 0


@pytest.mark.parametrize(("array", "words"), [([1.0], "wrap it in numpy.array"), (np.array([1j]), "complex128")])
def test_what_is_no_tensor_is_refused(array: Any, words: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=words):
        pb_utils.Tensor("x", array)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", b"b", "ü"], dtype=object),
        np.array(["a", "b", "ü"]),
        np.array([b"a", b"b", "ü".encode()], dtype=object),
    ],
)
def test_strings_and_bytes_come_out_as_bytes(array: Any) -> None:
    out = wire_array(pb_utils.Tensor("x", array.reshape(3, 1)))
    assert out.tolist() == [[b"a"], [b"b"], ["ü".encode()]]
    assert out.dtype == object


def test_other_arrays_come_out_little_endian_and_uncopied() -> None:
    array = np.arange(3, dtype=np.int32)
    assert wire_array(pb_utils.Tensor("x", array)) is array
    assert wire_array(pb_utils.Tensor("x", array.astype(">i4"))).dtype.str == "<i4"
    assert wire_array(pb_utils.Tensor("x", np.array("a", dtype=object))).shape == ()


def test_reshape_takes_over_the_variable_sizes() -> None:
    array = np.zeros((2, 4, 6))
    assert reshaped(array, (4, -1), (2, 2, -1), batched=True).shape == (2, 2, 2, 6)
    assert reshaped(np.zeros((3, 1)), (1,), (), batched=True).shape == (3,)
    assert reshaped(np.zeros((5, 1, 7)), (-1, 1, -1), (-1, -1), batched=False).shape == (5, 7)
    with pytest.raises(ValueError, match="reshape"):
        reshaped(np.zeros(5), (4,), (2, 2), batched=False)


def test_tensors_go_through_dlpack_and_back() -> None:
    array = np.arange(4, dtype=np.float32)
    tensor = pb_utils.Tensor("x", array)
    again = pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack())
    assert np.shares_memory(again.array, array)
    assert np.array_equal(np.from_dlpack(tensor), array)  # type: ignore[arg-type]
    assert np.array_equal(pb_utils.Tensor.from_dlpack("y", array).as_numpy(), array)
    read_only = Tensor.received("x", np.frombuffer(b"\0" * 8, dtype=np.float32), Datatype.FP32)
    assert np.from_dlpack(read_only).shape == (2,)  # type: ignore[arg-type]
    with pytest.raises(pb_utils.TritonModelException, match="can't be taken from DLPack"):
        pb_utils.Tensor.from_dlpack("y", "nothing of the kind")


def test_errors_have_a_message_and_one_of_tritons_codes() -> None:
    error = pb_utils.TritonError("no", pb_utils.TritonError.CANCELLED)
    assert (error.message(), error.code(), str(error)) == ("no", ErrorCode.CANCELLED, "no")
    assert pb_utils.TritonError("no").code() is pb_utils.TritonError.INTERNAL
    assert {code.name for code in ErrorCode} <= set(dir(pb_utils.TritonError))
    assert pb_utils.TritonModelException("bad").message() == "bad"
    with pytest.raises(pb_utils.TritonModelException, match="code"):
        pb_utils.TritonError("no", 5)  # type: ignore[arg-type]


def test_a_response_has_tensors_or_an_error_and_parameters() -> None:
    tensor = pb_utils.Tensor("OUT", np.zeros(1))
    response = pb_utils.InferenceResponse([tensor], parameters={"a": 1})
    assert response.output_tensors() == [tensor]
    assert not response.has_error()
    assert response.error() is None
    assert json.loads(response.parameters()) == {"a": 1}
    assert pb_utils.get_output_tensor_by_name(response, "OUT") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "NO") is None
    failed = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError("no"))
    assert failed.has_error()
    for wrong in ({"output_tensors": [1]}, {"error": "text"}, {"parameters": {"a": [1]}}):
        with pytest.raises(pb_utils.TritonModelException):
            pb_utils.InferenceResponse(**wrong)  # type: ignore[arg-type]


def test_a_request_tells_everything_that_the_client_said() -> None:
    request = received(sequence_id="s", sequence_start=True, sequence_end=True, timeout=70, priority=3, mine=1.5)
    assert request.request_id() == "r1"
    assert request.correlation_id() == "s"
    assert request.flags() == (
        pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START | pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    )
    assert request.timeout() == 70
    assert json.loads(request.parameters()) == {"mine": 1.5}
    assert request.requested_output_names() == ["A", "B"]
    assert received(("B",)).requested_output_names() == ["B"]
    assert (request.model_name(), request.model_version()) == ("m", 2)
    assert request.preferred_memory() is None
    assert request.trace() is None
    tensor = pb_utils.get_input_tensor_by_name(request, "IN")
    assert tensor is request.inputs()[0]
    assert pb_utils.get_input_tensor_by_name(request, "NO") is None
    plain = received()
    assert (plain.correlation_id(), plain.flags(), plain.timeout(), plain.parameters()) == (0, 0, 0, "{}")
    plain.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)


def test_is_cancelled_is_the_requests_own_flag_and_costs_less_than_a_microsecond() -> None:
    life = Life()
    values = InferRequest("m", "1", {}, is_cancelled=lambda: life.reason is not None)
    request = InferenceRequest.received(values, [], [], NoWork())  # type: ignore[arg-type]
    sender = request.get_response_sender()
    assert min(timeit.repeat(request.is_cancelled, number=10_000, repeat=5)) / 10_000 < 1e-6
    assert not sender.is_cancelled()
    life.cancel(CancelReason.DISCONNECTED)
    assert request.is_cancelled()
    assert sender.is_cancelled()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "Without the final flag"),
        ((None, 4), "flags"),
        (("text",), "InferenceResponse, got str"),
    ],
)
def test_a_misused_sender_says_so(args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=rf"^Unable to send response\. .*{words}"):
        received().get_response_sender().send(*args)


def test_what_needs_a_server_or_is_not_supported_says_so() -> None:
    request = pb_utils.InferenceRequest(model_name="other", inputs=[], requested_output_names=["OUT"])
    calls = {
        r"^exec\(\) needs a server": request.exec,
        r"^async_exec\(\) needs a server": request.async_exec,
        r"only a request that execute": request.get_response_sender,
        r"only a request that execute\(\) was given can be resch": lambda: request.set_release_flags(
            pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        ),
        r"^MetricFamily\(\) needs": lambda: pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER),
        r"^load_model\(\) needs": lambda: pb_utils.load_model("m"),
        r"^unload_model\(\) needs": lambda: pb_utils.unload_model("m"),
        r"^is_model_ready\(\) needs": lambda: pb_utils.is_model_ready("m"),
    }
    for words, call in calls.items():
        with pytest.raises(pb_utils.TritonModelException, match=words):
            call()
    assert pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0).preferred_memory_type == 2
    assert pb_utils.InferenceTrace()


def test_types_translate_both_ways() -> None:
    for datatype in Datatype:
        if datatype is Datatype.BF16:
            continue
        kind = pb_utils.triton_string_to_numpy(datatype.config_name)
        assert np.dtype(kind) == datatype.dtype.newbyteorder("=")
        number = pb_utils.numpy_to_triton_type(kind)
        assert number is not None
        assert pb_utils.triton_to_numpy_type(number) is kind
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    assert pb_utils.triton_to_numpy_type(14) is None
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_X")


def test_byte_tensors_serialize_both_ways() -> None:
    encoded = pb_utils.serialize_byte_tensor(np.array([[b"ab"], ["ü"]], dtype=object))
    assert encoded == b"\2\0\0\0ab\2\0\0\0\xc3\xbc"
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"ab", "ü".encode()]
    assert pb_utils.serialize_byte_tensor(np.array([], dtype=object)) is None
    assert pb_utils.serialize_byte_tensor(np.array([1])) is None


def test_the_helpers_read_a_configuration() -> None:
    config = {"input": [{"name": "A"}], "output": [{"name": "B"}], "model_transaction_policy": {"decoupled": True}}
    assert pb_utils.get_input_config_by_name(config, "A") == {"name": "A"}
    assert pb_utils.get_output_config_by_name(config, "B") == {"name": "B"}
    assert pb_utils.get_input_config_by_name(config, "B") is None
    assert pb_utils.get_output_config_by_name({}, "A") is None
    assert pb_utils.using_decoupled_model_transaction_policy(config)
    assert not pb_utils.using_decoupled_model_transaction_policy({})


def test_the_logger_outside_of_a_model_uses_the_common_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="trio_infer.model"):
        pb_utils.Logger.log("100 %", pb_utils.Logger.WARNING)
        pb_utils.Logger.log_verbose("v")
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("trio_infer.model", "WARNING", "100 %"),
        ("trio_infer.model", "DEBUG", "v"),
    ]
    with pytest.raises(pb_utils.TritonModelException, match="own code"):
        pb_utils.get_model_dir()


def test_auto_complete_fills_in_and_refuses_to_contradict() -> None:
    parsed = ModelConfig.of_json(
        {"max_batch_size": 4, "input": [{"name": "A"}, {"name": "B", "data_type": "TYPE_FP32", "dims": [1]}]}, name="m"
    )
    config = AutoCompleteConfig(parsed.as_json())
    config.add_input({"name": "A", "data_type": "TYPE_INT8", "dims": [2], "optional": True})
    config.add_input({"name": "B", "data_type": "TYPE_FP32", "dims": (1,)})
    config.add_input({"name": "C", "data_type": "TYPE_FP32", "dims": [3]})
    config.add_output({"name": "D", "data_type": "TYPE_STRING", "dims": [-1]})
    config.set_max_batch_size(8)
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    config.set_model_transaction_policy({"decoupled": True})
    completed = ModelConfig.of_json(config.as_dict(), name="m")
    assert [spec.name for spec in completed.inputs] == ["A", "B", "C"]
    assert completed.inputs[0].optional
    assert completed.max_batch_size == 8
    assert completed.decoupled
    assert completed.as_json()["dynamic_batching"]["preferred_batch_size"] == [8]
    for call, words in (
        (lambda: config.set_max_batch_size(2), "max_batch_size 8"),
        (lambda: config.set_model_transaction_policy({"decoupled": False}), "decoupled True"),
        (lambda: config.set_model_transaction_policy({"x": False}), "only"),
        (lambda: config.add_input({"name": "B", "data_type": "TYPE_INT8", "dims": [1]}), "TYPE_FP32 in config"),
        (lambda: config.add_input({"name": "B", "data_type": "TYPE_FP32", "dims": [2]}), "dims"),
        (lambda: config.add_input({"name": "X", "dims": [2]}), "lacks"),
        (lambda: config.add_output({"name": "X", "optional": True}), "keys that it can't have"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
