"""Compressed bodies: any cut, any lie, and what is chosen for the answer."""

import gzip
import zlib
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_infer.errors import InferError
from trio_infer.protocol.compression import Decompressor, choose_encoding, compress, parse_content_encoding


def raw_deflate(data):
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


PACK = {
    "gzip": ("gzip", gzip.compress),
    "two gzip members": ("gzip", lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:])),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
}


def inflate(encoding, chunks, max_size=2**20):
    stream = Decompressor(encoding, max_size)
    out = b"".join([stream.feed(chunk) for chunk in chunks])
    stream.finish()
    return out


@pytest.mark.parametrize("form", PACK)
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 400), max_size=6))
@settings(max_examples=40)
def test_any_cut_gives_the_same_bytes(form, data, cuts):
    encoding, pack = PACK[form]
    packed = pack(data)
    edges = [0, *sorted(min(cut, len(packed)) for cut in cuts), len(packed)]
    assert inflate(encoding, [packed[a:b] for a, b in pairwise(edges)]) == data


@pytest.mark.parametrize("form", PACK)
def test_byte_by_byte_gives_the_same_bytes(form):
    encoding, pack = PACK[form]
    assert inflate(encoding, [bytes([byte]) for byte in pack(b"tensor" * 50)]) == b"tensor" * 50


@pytest.mark.parametrize("form", PACK)
def test_a_truncated_body_is_refused(form):
    encoding, pack = PACK[form]
    packed = pack(b"tensor" * 50)
    for end in (0, 1, 2, 10, len(packed) - 1):
        with pytest.raises(InferError) as caught:
            inflate(encoding, [packed[:end]])
        assert caught.value.status == 400


@pytest.mark.parametrize("form", ["gzip", "deflate", "raw deflate"])
@pytest.mark.parametrize("junk", [b"x", b"\0" * 20])
def test_anything_behind_the_end_is_refused(form, junk):
    encoding, pack = PACK[form]
    for chunks in ([pack(b"abc") + junk], [pack(b"abc"), junk]):
        with pytest.raises(InferError) as caught:
            inflate(encoding, chunks)
        assert caught.value.status == 400


def test_a_corrupt_checksum_is_refused():
    packed = bytearray(gzip.compress(b"abc" * 100))
    packed[-6] ^= 1
    with pytest.raises(InferError, match="not valid gzip"):
        inflate("gzip", [packed])


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=60))
@settings(max_examples=60)
def test_arbitrary_bytes_are_inflated_or_refused(encoding, data):
    with suppress(InferError):
        inflate(encoding, [data])


@pytest.mark.parametrize("form", PACK)
def test_a_bomb_costs_no_more_than_the_bound(form):
    encoding, pack = PACK[form]
    stream = Decompressor(encoding, 1000)
    with pytest.raises(InferError) as caught:
        stream.feed(pack(bytes(10_000_000)))
    assert caught.value.message.endswith("Use --http-max-input-size to increase the limit.")
    assert caught.value.status == 400


@pytest.mark.parametrize("form", PACK)
def test_exactly_the_bound_is_allowed(form):
    encoding, pack = PACK[form]
    assert len(inflate(encoding, [pack(bytes(1000))], 1000)) == 1000
    with pytest.raises(InferError):
        inflate(encoding, [pack(bytes(1001))], 1000)


def test_the_number_of_gzip_members_is_bounded():
    with pytest.raises(InferError, match="1024 members"):
        inflate("gzip", [gzip.compress(b"") * 1025])


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "\ud800"])
def test_other_encodings_are_not_supported(encoding):
    for make in (lambda: parse_content_encoding(encoding), lambda: Decompressor(encoding, 10)):
        with pytest.raises(InferError, match=r"^Unsupported compression type") as caught:
            make()
        assert caught.value.status == 501


def test_content_encoding_is_read_in_any_case():
    assert [parse_content_encoding(value) for value in (None, "", "identity", " GZip ", "deflate")] == [
        None,
        None,
        None,
        "gzip",
        "deflate",
    ]


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, None),
        ("", None),
        ("identity", None),
        ("gzip", "gzip"),
        ("gzip, deflate, br", "gzip"),  # aiohttp
        ("deflate, gzip, br, zstd", "deflate"),  # curl --compressed
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("identity;q=0.9, gzip;q=0.5", None),
        ("gzip;q=0.5, identity;q=0.5", "gzip"),
        ("*", None),
        ("*, gzip;q=0", None),
        ("gzip;q=0, deflate;q=0.001", "deflate"),
        ("GZIP ; Q=1.0", "gzip"),
        ("gzip;q=nan, deflate;q=x, ;;,", None),
        ("gzip;q=2, br", None),
        ("gzip;q=1.5, deflate;q=.5", "deflate"),
    ],
)
def test_the_answer_is_compressed_as_wanted_most(accept, chosen):
    assert choose_encoding(accept) == chosen


@given(st.text(max_size=60) | st.text("gzipdeflat;q=0.1, *", max_size=60))
@settings(max_examples=100)
def test_no_accept_encoding_is_an_error(accept):
    assert choose_encoding(accept) in (None, "gzip", "deflate")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_is_compressed_is_inflated_again(encoding):
    packed = compress(encoding, [b"head", memoryview(b"tail" * 100), b""])
    assert inflate(encoding, [packed]) == b"head" + b"tail" * 100
    assert (gzip.decompress if encoding == "gzip" else zlib.decompress)(packed) == b"head" + b"tail" * 100
