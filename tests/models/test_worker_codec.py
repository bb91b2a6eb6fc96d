from __future__ import annotations

import gc
import itertools
import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trio_infer.errors import ErrorCode, InferError
from trio_infer.models.worker.codec import (
    INLINE,
    CodecError,
    Inbox,
    Kind,
    encode,
    error_fields,
    pack,
    read_error,
    unpack,
)
from trio_infer.models.worker.memory import KEEP, Blocks, Memory, create
from trio_infer.protocol.datatypes import Datatype

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
messages = st.tuples(st.sampled_from(Kind), st.dictionaries(st.text(), values, max_size=4), st.binary(max_size=200))
numeric = st.sampled_from([datatype.dtype for datatype in Datatype if datatype is not Datatype.BYTES])
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
arrays = numeric.flatmap(lambda dtype: hnp.arrays(dtype, shapes)) | hnp.arrays(object, shapes, elements=st.binary())


@pytest.fixture(scope="module")
def memory() -> Any:
    fd, memory = create()
    os.close(fd)
    return memory


@settings(max_examples=50, deadline=None)
@given(st.lists(messages, max_size=5), st.integers(1, 64))
def test_messages_come_out_as_they_went_in_however_they_were_cut(said: Any, size: int) -> None:
    stream = b"".join(encode(*message) for message in said)
    inbox, heard = Inbox(), []
    for start in range(0, len(stream), size):
        inbox.feed(stream[start : start + size])
        while (message := inbox.next()) is not None:
            heard.append((message.kind, message.fields, bytes(message.tail)))
    assert heard == said


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=100) | st.binary(max_size=60).map(lambda end: encode(Kind.RUN, {})[:9] + end))
def test_bytes_that_are_no_message_are_refused_or_waited_for(garbage: bytes) -> None:
    inbox = Inbox()
    inbox.feed(garbage)
    try:
        while inbox.next() is not None:
            pass
    except CodecError:
        pass


@settings(max_examples=50, deadline=None)
@given(tensors=st.dictionaries(st.text(), arrays, max_size=4), shared=st.booleans(), transposed=st.booleans())
def test_tensors_come_out_as_they_went_in_and_writable(
    memory: Memory, tensors: dict[str, Any], shared: bool, transposed: bool
) -> None:
    if transposed:
        tensors = {name: array.T for name, array in tensors.items()}
    blocks = Blocks(memory, upper=False) if shared else None
    described, tail = pack(tensors, blocks)
    taken = unpack(json.loads(json.dumps(described)), bytearray(tail), memory)
    assert list(taken) == list(tensors)
    for name, array in tensors.items():
        assert taken[name].dtype == array.dtype
        assert taken[name].shape == array.shape
        assert np.array_equal(taken[name], array, equal_nan=array.dtype.kind == "f")
        assert taken[name].flags.writeable or not taken[name].size


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.text(), st.sampled_from(["<f4", "|O", "|b1", "x"]), values, values, values), max_size=2)
    | values,
    st.binary(max_size=40),
)
def test_tensors_that_do_not_add_up_are_refused(memory: Memory, described: Any, tail: bytes) -> None:
    try:
        taken = unpack(described, bytearray(tail), memory)
    except CodecError:
        return
    assert sum(array.nbytes for array in taken.values() if array.dtype.kind != "O") <= len(tail)


@pytest.mark.parametrize(
    "described",
    [
        [["x", "<f4", [2], 4, -1]],  # less than its shape
        [["x", "<f4", [1], 4, 8]],  # a block among the flags
        [["x", "<f4", [2**40], 2**42, 2**40]],  # beyond the end
        [["x", "<f4", [1], 4, -1], ["y", "<f4", [1], 4, -1]],  # more than is there
        [["x", "|O", [2], 4, -1]],  # strings that are not there
        [["x", "<c8", [1], 8, -1]],  # a type that the protocol lacks
    ],
)
def test_a_description_that_lies_is_refused(memory: Memory, described: Any) -> None:
    with pytest.raises(CodecError):
        unpack(described, bytearray(4), memory)


def test_a_large_tensor_goes_by_a_block_that_is_free_when_the_last_view_of_it_is_gone(memory: Memory) -> None:
    blocks = Blocks(memory, upper=True)
    original = np.arange(INLINE, dtype="<f4").reshape(2, -1)
    described, tail = pack({"x": original}, blocks)
    assert (tail, blocks.taken) == (b"", 1)
    array = unpack(described, bytearray(), memory)["x"]
    assert np.array_equal(array, original)
    row = memoryview(array[1:].ravel()[::2])  # as far from the first array as views get
    del array
    gc.collect()
    assert not memory.freed
    del row
    gc.collect()
    (offset,) = memory.take_freed()
    blocks.free(offset)
    assert blocks.taken == 0
    with pytest.raises(ValueError, match="no block"):
        blocks.free(offset)
    assert blocks.take(original.nbytes) == offset, "its pages are there already"


def test_strings_in_a_block_leave_it_at_once(memory: Memory) -> None:
    described, _ = pack({"x": np.array([b"a" * INLINE, b"b"], object)}, Blocks(memory, upper=True))
    assert described[0][4] >= 0
    array = unpack(described, bytearray(), memory)["x"]
    gc.collect()
    assert memory.take_freed() == [described[0][4]]
    assert array[1] == b"b"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3 * 2**20) | st.just(0), max_size=40))
def test_blocks_in_hand_never_overlap(memory: Memory, steps: list[int]) -> None:
    blocks = Blocks(memory, upper=True, keep=2**20)
    held: list[tuple[int, int]] = []
    for size in steps:
        if size:
            held.append((blocks.take(size), size))
        elif held:
            blocks.free(held.pop(len(held) // 2)[0])
        regions = sorted(held)
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(regions))
    assert blocks.taken == len(held)


def test_memory_that_lies_free_beyond_the_bound_goes_back_to_the_kernel() -> None:
    fd, memory = create()
    blocks = Blocks(memory, upper=False)
    offsets = [blocks.take(KEEP // 2) for _ in range(4)]
    for offset in offsets:
        view = np.frombuffer(memory.view(offset, KEEP // 2), np.uint8)
        view[::4096] = 1
        del view
    assert os.fstat(fd).st_blocks * 512 >= 2 * KEEP
    for offset in offsets:
        blocks.free(offset)
    assert os.fstat(fd).st_blocks * 512 <= KEEP + 2**20
    os.close(fd)


def test_neither_side_can_cut_the_memory_off_under_the_other() -> None:
    fd, _ = create()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)


def test_room_that_is_used_up_is_an_error_and_takes_nothing(memory: Memory) -> None:
    blocks = Blocks(memory, upper=True)
    with pytest.raises(MemoryError, match="no room"):
        blocks.take(2**37)
    assert blocks.taken == 0


def test_an_error_keeps_its_message_code_status_and_traceback() -> None:
    error = InferError("no", ErrorCode.NOT_FOUND, status=418)
    error.__cause__ = ValueError("boom-42")
    again = read_error(json.loads(json.dumps(error_fields(error, repr))))
    assert (again.message, again.code, again.status) == ("no", ErrorCode.NOT_FOUND, 418)
    assert "boom-42" in str(again.__cause__)
    for nonsense in (None, [], ["x", 99, 400, None], ["x", "1", 400, None]):
        with pytest.raises(CodecError):
            read_error(nonsense)
