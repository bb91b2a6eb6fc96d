from __future__ import annotations

import gc
import importlib.util
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_infer.models import triton_utils as pb_utils
from trio_infer.models.triton_dlpack import _bfloat16_bits, exported, imported
from trio_infer.models.triton_tensors import Tensor, wire_array
from trio_infer.protocol.datatypes import Datatype

FLOATS = st.floats(width=32) | st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32))


class Source:
    """An object of another library, that gives a capsule."""

    def __init__(self, capsule: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.capsule = capsule
        self.device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@given(st.lists(FLOATS, max_size=20))
def test_bfloat16_goes_through_a_capsule_and_back_as_ml_dtypes_rounds_it(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        expected = array.astype(ml_dtypes.bfloat16)
    nan = np.isnan(array)
    assert np.array_equal(_bfloat16_bits(array)[~nan], expected.view(np.uint16)[~nan])
    again, bfloat16 = imported(exported(array, bfloat16=True))
    assert bfloat16
    assert np.array_equal(again, expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_all_other_numbers_share_their_memory(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    tensor = pb_utils.Tensor("x", array)
    for source in (tensor.to_dlpack(), tensor, Source(tensor.to_dlpack())):
        again = pb_utils.Tensor.from_dlpack("y", source)
        assert again.name() == "y"
        assert again.triton_dtype() == tensor.triton_dtype()
        assert np.shares_memory(again.array, array) or not array.size
        assert np.array_equal(again.as_numpy(), array)
    assert tensor.__dlpack_device__() == (1, 0)


def test_a_bf16_tensor_is_had_by_dlpack_only() -> None:
    tensor = Tensor.received("x", np.array([1.5, -2.0], np.float32), Datatype.BF16)
    with pytest.raises(pb_utils.TritonModelException, match=r"'x' is of TYPE_BF16, which numpy does not have"):
        tensor.as_numpy()
    assert (tensor.triton_dtype(), tensor.shape()) == (14, [2])
    again = pb_utils.Tensor.from_dlpack("y", tensor)
    assert again.triton_dtype() == 14
    assert wire_array(again).tolist() == [1.5, -2.0]
    assert wire_array(again).dtype == np.float32


def test_memory_lives_as_long_as_whoever_took_it() -> None:
    tensor = pb_utils.Tensor("x", np.arange(1000))
    again = np.from_dlpack(tensor)  # type: ignore[arg-type]
    capsule = tensor.to_dlpack()
    del tensor
    gc.collect()
    assert again.sum() == 499500
    assert pb_utils.Tensor.from_dlpack("y", capsule).as_numpy().sum() == 499500


def test_the_protocols_newer_arguments_are_understood() -> None:
    tensor = pb_utils.Tensor("x", array := np.zeros(3))
    copied = np.from_dlpack(Source(tensor.__dlpack__(stream=None, max_version=(1, 0), copy=True)))  # type: ignore[arg-type]
    assert not np.shares_memory(copied, array)
    with pytest.raises(BufferError, match=r"can't be given on device \(2, 0\)"):
        tensor.__dlpack__(dl_device=(2, 0))
    read_only = Tensor.received("x", np.frombuffer(b"\0" * 8, dtype=np.float32), Datatype.FP32)
    assert np.from_dlpack(read_only).shape == (2,)  # type: ignore[arg-type]
    assert pb_utils.Tensor.from_dlpack("y", array).as_numpy() is array


def test_what_is_not_contiguous_is_copied() -> None:
    array = np.arange(6).reshape(2, 3)
    again = pb_utils.Tensor.from_dlpack("y", Source(array.T.__dlpack__()))
    assert again.as_numpy().tolist() == array.T.tolist()
    assert again.as_numpy().flags.c_contiguous


def test_what_can_not_be_taken_says_why() -> None:
    used = pb_utils.Tensor("x", np.zeros(1)).to_dlpack()
    np.from_dlpack(Source(used))  # type: ignore[arg-type]
    strings = pb_utils.Tensor("x", np.array(["a"]))
    with pytest.raises(BufferError, match="strings"):
        strings.to_dlpack()
    for source, words in (
        ("nothing of the kind", "got str"),
        (used, "unused DLPack capsule"),
        (Source(np.zeros(1, np.complex64).__dlpack__()), "complex64"),
        (Source(np.zeros(1).__dlpack__(), (2, 0)), r"is on device \(2, 0\), not in the CPU's memory"),
        (strings, "strings"),
    ):
        with pytest.raises(pb_utils.TritonModelException, match=words):
            pb_utils.Tensor.from_dlpack("y", source)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_takes_and_gives_them() -> None:
    import torch

    tensor = Tensor.received("x", np.array([1.5, -2.0], np.float32), Datatype.BF16)
    taken = torch.from_dlpack(tensor)
    assert taken.dtype == torch.bfloat16
    assert taken.tolist() == [1.5, -2.0]
    given = pb_utils.Tensor.from_dlpack("y", torch.tensor([0.5], dtype=torch.bfloat16))
    assert (given.triton_dtype(), wire_array(given).tolist()) == (14, [0.5])
    assert torch.utils.dlpack.from_dlpack(pb_utils.Tensor("x", np.ones(2)).to_dlpack()).sum() == 2
