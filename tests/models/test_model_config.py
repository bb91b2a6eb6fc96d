from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from trio_infer.errors import ModelLoadError
from trio_infer.protocol.config_schema import SCHEMA
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.model_config import ModelConfig, VersionPolicy
from trio_infer.protocol.values import Signature, TensorSpec

WHERE = Path("m/config.pbtxt")


def parse(text: str) -> ModelConfig:
    return ModelConfig.parse(text, name="m", where=WHERE)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('\nnam: "m"', 2, "ModelConfig has no field 'nam'; did you mean name?"),
        ("input {\n  dtype: TYPE_FP32 }", 2, "ModelInput has no field 'dtype'"),
        ("input {\n  data_type: TYPE_FLOAT32 }", 2, "DataType has no value TYPE_FLOAT32; did you mean TYPE_FP32?"),
        ("instance_group { kind: KIND_TPU }", 1, "Kind has no value KIND_TPU"),
        ('\n\nmax_batch_size: "8"', 3, "couldn't parse integer"),
        ("max_batch_size: 99999999999", 1, "out of range"),
        ("name: m", 1, "expected string"),
        ("input {", 1, 'expected "}"'),
        ('name: "m', 1, "missing ending quote"),
        ("max_batch_size: 1\nmax_batch_size: 2", 2, 'multiple "max_batch_size"'),
        ("dynamic_batching {}\nsequence_batching {}", 2, "scheduling_choice"),
        ('backend: "python"\nname: "other"', 2, "it is named 'other' but its directory is 'm'"),
        ("\nmax_batch_size: -1", 2, "`max_batch_size` must be 0 or more, got -1"),
        ("instance_group {\n count: -2 }", 2, "must be 1 or more"),
        ('parameters {\n key: "on_disconnect" value { string_value: "stop" } }', 2, "'cancel' or 'finish', got 'stop'"),
        ("version_policy { latest { num_versions: 0 } }", 1, "at least 1"),
        ("version_policy { specific { } }", 1, "each 1 or more"),
        ("max_batch_size: 4\ndynamic_batching {\n preferred_batch_size: [ 8 ] }", 3, "from 1 to `max_batch_size` (4)"),
    ],
)
def test_a_wrong_configuration_is_one_sentence_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse(text)
    assert words in caught.value.reason
    assert caught.value.line == line
    assert str(caught.value).startswith("model 'm' can't be loaded: ")
    assert str(caught.value).endswith(f"(m/config.pbtxt:{line})")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ('input { name: "x" data_type: TYPE_FP32 }', "input 'x' has no `dims`"),
        ('input { name: "x" dims: [ 1 ] }', "input 'x' has no `data_type`"),
        ("output { data_type: TYPE_FP32 dims: [ 1 ] }", "output number 1 has no name"),
        ('output { name: "y" data_type: TYPE_FP32 dims: [ 0 ] }', "has dims [0]"),
        *(
            (
                f'input {{ name: "x" data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {shape} }} }}',
                f"from {dims} to {shape}",
            )
            for dims, shape in (
                ([4], [3]),
                ([4], []),
                ([-1], [3]),
                ([4], [2, -1]),
                ([-1], [-1, -1]),
                ([4], [-2, -2]),
                ([4], [0]),
            )
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }',
            "twice",
        ),
    ],
)
def test_incomplete_tensors_are_found_only_when_asked_for(tensor: str, words: str) -> None:
    config = parse(tensor)
    with pytest.raises(ModelLoadError) as caught:
        config.check_tensors()
    assert words in caught.value.reason


@pytest.mark.parametrize(
    ("dims", "shape"), [([1], []), ([1, 1], []), ([4], [2, 2]), ([-1], [1, -1]), ([2, -1, 3], [-1, 6])]
)
def test_a_reshape_that_keeps_the_size_is_taken(dims: list[int], shape: list[int]) -> None:
    config = parse(f'output {{ name: "y" data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {shape} }} }}')
    config.check_tensors()
    assert config.reshapes == {"y": (tuple(dims), tuple(shape))}
    assert config.as_json()["output"][0]["reshape"] == {"shape": shape}


def test_both_ways_of_writing_a_list_and_all_kinds_of_syntax_are_read() -> None:
    config = parse("""
        # a comment
        name: "m", backend: "pyt" "hon"
        max_batch_size: 4
        input [ { name: "a" data_type: TYPE_STRING dims: [ 1, -1 ] optional: True },
                { name: "b" data_type: TYPE_BF16 dims: 3 dims: 4 } ]
        output { name: "c", data_type: TYPE_INT64; dims: [ 2 ], reshape { shape: [ ] } }
        instance_group [ { count: 2 kind: KIND_CPU }, { name: "g" kind: KIND_GPU gpus: [ 0, 3 ] } ]
        parameters { key: "on_disconnect" value { string_value: "finish" } }
        parameters { key: "k" value: { string_value: "v" } }
        model_transaction_policy { decoupled: true }
        version_policy: { specific { versions: [ 1, 3 ] } }
    """)
    assert config.inputs == (
        TensorSpec("a", Datatype.BYTES, (1, -1), optional=True),
        TensorSpec("b", Datatype.BF16, (3, 4)),
    )
    assert config.outputs == (TensorSpec("c", Datatype.INT64, (2,)),)
    assert config.reshapes == {"c": ((2,), ())}
    assert (config.name, config.backend, config.platform, config.max_batch_size) == ("m", "python", "", 4)
    assert config.decoupled
    assert config.on_disconnect == "finish"
    assert config.parameters == {"k": "v", "on_disconnect": "finish"}
    assert config.default_model_filename == "model.py"
    assert config.instance_count == 4
    assert [config.instance_name(index) for index in range(4)] == ["m_0_0", "m_0_1", "g_0", "g_1"]
    assert [config.instance_device(index) for index in (0, 3)] == [("CPU", 0), ("GPU", 3)]
    with pytest.raises(IndexError, match="has 4 instances, no number 4"):
        config.instance_name(4)


def test_versions_are_picked_by_the_policy() -> None:
    assert parse("").version_policy == VersionPolicy(latest=1)
    assert parse("").version_policy.pick([1, 10, 9]) == (10,)
    assert parse("version_policy { latest { num_versions: 2 } }").version_policy.pick([1, 10, 9]) == (9, 10)
    assert parse("version_policy { all { } }").version_policy.pick([1, 10, 9]) == (1, 9, 10)
    assert parse("version_policy { specific { versions: [ 9, 4 ] } }").version_policy.pick([1, 10, 9]) == (9,)


def test_an_empty_configuration_is_shown_with_everything_at_its_default() -> None:
    assert parse('backend: "python"').as_json() == {
        "name": "m",
        "platform": "",
        "backend": "python",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [],
        "output": [],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
        "instance_group": [
            {
                "name": "m",
                "kind": "KIND_CPU",
                "count": 1,
                "gpus": [],
                "secondary_devices": [],
                "profile": [],
                "passive": False,
                "host_policy": "",
            }
        ],
        "default_model_filename": "model.py",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }


def test_the_schedulers_are_shown_normalised_and_with_numbers() -> None:
    config = parse("""
        max_batch_size: 8
        dynamic_batching {
          max_queue_delay_microseconds: 5000000000
          priority_queue_policy { key: 2 value { timeout_action: DELAY } }
        }
    """)
    batching = json.loads(config.json_text)["dynamic_batching"]
    assert batching["preferred_batch_size"] == [8]
    assert batching["max_queue_delay_microseconds"] == 5_000_000_000
    assert batching["priority_queue_policy"]["2"]["timeout_action"] == "DELAY"
    assert "default_queue_policy" not in batching
    sequences = parse("sequence_batching { direct { minimum_slot_utilization: 0.1 } }").as_json()["sequence_batching"]
    assert sequences["max_sequence_idle_microseconds"] == 1_000_000
    assert sequences["direct"]["minimum_slot_utilization"] == 0.1
    assert "oldest" not in sequences


def test_a_configuration_survives_its_own_json() -> None:
    config = parse(
        'input { name: "a" data_type: TYPE_FP32 dims: [ -1 ] } model_warmup { inputs { key: "a" value {} } }'
    )
    assert ModelConfig.of_json(config.as_json(), name="m").as_json() == config.as_json()


def test_json_may_have_numbers_as_strings_and_may_leave_things_out() -> None:
    assert ModelConfig.of_json({"max_batch_size": "16"}, name="m").max_batch_size == 16
    with pytest.raises(ModelLoadError, match="no field named"):
        ModelConfig.of_json({"max_batch": 16}, name="m")


def test_a_signature_becomes_a_configuration() -> None:
    signature = Signature(
        "m", "1", (TensorSpec("a", "FP32", (2,), optional=True),), (TensorSpec("b", "BYTES", ()),), 4, decoupled=True
    )
    config = ModelConfig.of_signature(signature, instances=3)
    assert config.backend == "trio_infer"
    assert config.instance_count == 3
    assert config.signature("1") == signature
    assert config.as_json()["model_transaction_policy"] == {"decoupled": True}
    assert ModelConfig.of_signature(signature, instances=None).instance_count == 1


def test_the_compiled_schema_is_that_of_the_proto_file(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    out = tmp_path / "model_config.binpb"
    source = SCHEMA.with_suffix(".proto")
    assert protoc.main(["protoc", f"-I{source.parent}", f"--descriptor_set_out={out}", source.name]) == 0
    fresh = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    assert fresh == descriptor_pb2.FileDescriptorSet.FromString(SCHEMA.read_bytes())


def test_the_schema_agrees_with_the_triton_clients() -> None:
    pytest.importorskip("grpc_tools")  # brings the grpc that tritonclient's own copy of the schema needs
    theirs = importlib.import_module("tritonclient.grpc.model_config_pb2")
    ours = parse('backend: "python" max_batch_size: 2 dynamic_batching {} model_metrics {}').message
    message = theirs.ModelConfig.FromString(ours.SerializeToString())
    assert message.dynamic_batching.preferred_batch_size == [2]
    assert {(f.name, f.number) for f in message.DESCRIPTOR.fields} <= {
        (f.name, f.number) for f in ours.DESCRIPTOR.fields
    }
