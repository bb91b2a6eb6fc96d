"""The response cache: answers by what was asked, in memory, bounded by bytes; the longest unused go first.

What is asked. A request's digest is a SHA-256 over its inputs (names, datatypes, shapes, bytes), the names of the
outputs that it wants, and its parameters. It must be a strong one: with a weaker hash a stranger could make up a
request that is answered with somebody else's answer. Not in it are the parameters that say only when a request is to
run (`TIMING`), and the request's id: who has a model that answers by the id must not cache it.

What is kept. An answer is copied once, when the model gives it: a model may use its output buffer again, or hand out a
view of something much larger. The copies are read-only, because all who ask get the same arrays.

Facts (OpenSSL's SHA-256 with the CPU's own instructions, 2 cores): 1.4 GB/s, so that `OFF_THE_LOOP` bytes take 0.2 ms,
and a trip to a thread costs 0.1 ms. BLAKE2b was rejected: 0.5 GB/s.

What this does not do: nothing is kept on disk or shared between processes, and nothing grows old. An answer is there
until it has to make room, or until its model is loaded again or unloaded.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs
import numpy as np
import trio

from trio_infer.protocol.outputs import select
from trio_infer.protocol.values import Array, InferRequest, InferResponse, Signature

__all__ = ["CacheStatistics", "Key", "ResponseCache", "digest", "owned", "wait_digest"]

Key = tuple[object, bytes]
"""The model, as an object of its own, and a request's digest."""

TIMING: Final = frozenset({"priority", "timeout"})
"""Parameters that don't change an answer."""

OFF_THE_LOOP: Final = 256 * 1024
"""Bytes of inputs from which they are hashed in a thread."""

STRINGS_OFF_THE_LOOP: Final = 4096
"""Elements of BYTES tensors that take as long."""

PER_ENTRY: Final = 768
PER_ARRAY: Final = 160
PER_STRING: Final = 41
"""Bytes that an entry, an array and an element of a BYTES tensor take besides their contents (CPython 3.11)."""


def digest(request: InferRequest) -> bytes:
    """What the request asks, as 32 bytes; equal if and only if the answers must be."""
    hasher = hashlib.sha256()

    def put(*texts: str | bytes) -> None:
        for text in texts:
            data = text.encode() if isinstance(text, str) else text
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)

    wanted = sorted(set(request.requested_outputs))
    parameters = {name: value for name, value in request.parameters.items() if name not in TIMING}
    put(f"{len(wanted)} {len(parameters)} {len(request.inputs)}", *wanted)
    for name in sorted(parameters):
        put(name, f"{type(parameters[name]).__name__} {parameters[name]!r}")
    for name in sorted(request.inputs):
        array = request.inputs[name]
        put(name, f"{array.dtype.str} {array.shape}")
        if array.dtype.hasobject:
            items = _strings(array)
            hasher.update(np.fromiter(map(len, items), "<u8", len(items)).data)
            hasher.update(b"".join(items))
        else:
            hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.digest()


async def wait_digest(request: InferRequest) -> bytes:
    """As `digest`; large requests are hashed in a thread, so that others are heard meanwhile.

    Cancellation: leaves at once; a thread goes on to its end.
    """
    strings = sum(array.size for array in request.inputs.values() if array.dtype.hasobject)
    if strings < STRINGS_OFF_THE_LOOP and sum(map(_size, request.inputs.values())) < OFF_THE_LOOP:
        return digest(request)
    return await trio.to_thread.run_sync(digest, request, abandon_on_cancel=True)


def owned(response: InferResponse, request: InferRequest, signature: Signature) -> InferResponse:
    """What the request asked for of what the model gave, in arrays that nobody else has and nobody can change.

    Raises:
        InferError: INTERNAL: the model didn't give it, or in a wrong type.
    """
    outputs = {}
    for spec, array in select(response, request.requested_outputs, signature):
        copied = outputs[spec.name] = np.array(array)
        copied.flags.writeable = False
    return InferResponse(MappingProxyType(outputs), MappingProxyType(dict(response.parameters)))


def _strings(array: Array) -> list[bytes]:
    return [item if isinstance(item, bytes) else str(item).encode() for item in array.reshape(-1).tolist()]


def _size(array: Array) -> int:
    """Bytes that it takes in memory, but for what any array takes."""
    if not array.dtype.hasobject:
        return array.nbytes
    return sum(PER_STRING + (len(item) if isinstance(item, str | bytes) else 0) for item in array.flat)


@attrs.frozen
class CacheStatistics:
    """How the cache stands, now.

    Attributes:
        byte_size: of all that it may hold.
        used: bytes that its entries take.
        entries: how many there are.
        hits, misses: lookups that found an answer, or none.
        joined: lookups that found that the answer was being computed.
        evicted: entries that had to make room.
        too_large: answers that weren't kept because they would have taken more than all there is.
    """

    byte_size: int
    used: int
    entries: int
    hits: int
    misses: int
    joined: int
    evicted: int
    too_large: int


@attrs.frozen
class _Entry:
    response: InferResponse
    size: int


class ResponseCache:
    """The answers of all models of a server that are to be cached.

    Args:
        byte_size: that the answers may take together, what is needed to find them included.
    """

    def __init__(self, byte_size: int) -> None:
        self._byte_size = byte_size
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._of: dict[object, set[Key]] = {}
        self._used = self._hits = self._misses = self._evicted = self._too_large = 0
        self.joined: int = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def find(self, key: Key) -> InferResponse | None:
        """The answer, if it is there; it is then the last to go."""
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return entry.response

    def put(self, key: Key, response: InferResponse) -> bool:
        """Keep an answer, in place of those that have been unused for the longest time.

        Args:
            response: made by `owned`.

        Returns:
            whether it is kept; not if it is larger than the whole cache.
        """
        size = PER_ENTRY + _weight(response.outputs.values(), response.parameters)
        if size > self._byte_size:
            self._too_large += 1
            return False
        if key in self._entries:
            self._remove(key)
        while self._used + size > self._byte_size:
            self._remove(next(iter(self._entries)))
            self._evicted += 1
        self._entries[key] = _Entry(response, size)
        self._of.setdefault(key[0], set()).add(key)
        self._used += size
        return True

    def drop(self, model: object) -> None:
        """Forget all answers of a model."""
        for key in list(self._of.get(model, ())):
            self._remove(key)

    def statistics(self) -> CacheStatistics:
        """How it stands, now."""
        return CacheStatistics(
            byte_size=self._byte_size,
            used=self._used,
            entries=len(self._entries),
            hits=self._hits,
            misses=self._misses - self.joined,
            joined=self.joined,
            evicted=self._evicted,
            too_large=self._too_large,
        )

    def _remove(self, key: Key) -> None:
        self._used -= self._entries.pop(key).size
        keys = self._of[key[0]]
        keys.remove(key)
        if not keys:
            del self._of[key[0]]


def _weight(arrays: Iterable[Array], parameters: Mapping[str, Any]) -> int:
    texts = sum(2 * PER_STRING + len(name) + len(str(value)) for name, value in parameters.items())
    return texts + sum(PER_ARRAY + _size(array) for array in arrays)
