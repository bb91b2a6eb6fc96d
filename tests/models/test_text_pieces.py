"""From tokens to text that can be sent, and what a request may ask of a text; without any model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_infer.errors import InferError
from trio_infer.models.backends.text_options import TextOptions, read_options
from trio_infer.models.backends.text_pieces import TextPieces


def decode(tokens: Sequence[int]) -> str:
    """Each token is a byte, as in byte-level tokenizers; from 256 on it is special, and no text."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def words(tokens: Sequence[int]) -> str:
    """Each token is a word with a space before it, which the first one loses, as in SentencePiece tokenizers."""
    return "".join(f" {'abcdefgh'[token]}" for token in tokens if token < 8).removeprefix(" ")


def pieces_of(tokens: Sequence[int], *stops: str, prompt: Sequence[int] = ()) -> list[str]:
    """What goes out for each token, as long as no stop string has come, and at the end."""
    pieces = TextPieces(decode, prompt, stops)
    out = []
    for token in tokens:
        out.append(pieces.add(token))
        if pieces.stopped:
            break
    return [*out, pieces.rest()]


# ---- pieces


def test_a_character_of_several_tokens_goes_out_whole() -> None:
    assert pieces_of("aé🍵b".encode()) == ["a", "", "é", "", "", "", "🍵", "b", ""]


def test_a_character_that_is_never_finished_goes_out_at_the_end() -> None:
    assert pieces_of("a🍵".encode()[:3]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_character_do_not_hold_up_what_follows() -> None:
    assert pieces_of(b"\xffab") == ["", "\ufffda", "b", ""]


def test_special_tokens_are_no_text() -> None:
    assert pieces_of([*b"a", 300, *b"b"]) == ["a", "", "b", ""]


def test_the_first_word_keeps_the_space_that_parts_it_from_the_prompt() -> None:
    pieces = TextPieces(words, [0, 1], [])
    assert [pieces.add(2), pieces.add(9), pieces.add(3), pieces.rest()] == [" c", "", " d", ""]


@given(st.binary(), st.binary(max_size=20).map(lambda data: data.decode(errors="ignore").encode()))
def test_the_pieces_are_the_text(data: bytes, prompt: bytes) -> None:
    assert "".join(pieces_of(data, prompt=prompt)) == data.decode(errors="replace")


# ---- stop strings


def test_a_stop_string_is_no_part_of_the_answer() -> None:
    assert pieces_of(b"one\n\ntwo", "\n\n") == ["o", "n", "e", "", "", ""]


def test_text_that_may_begin_a_stop_string_waits_until_it_does_not() -> None:
    assert pieces_of(b"abad", "abac") == ["", "", "", "abad", ""]


def test_text_that_began_a_stop_string_goes_out_at_the_end() -> None:
    assert pieces_of(b"xaba", "abac") == ["x", "", "", "", "aba"]


def test_a_stop_string_may_be_finished_by_what_was_held_back() -> None:
    assert pieces_of(b"a\xff", "\ufffd") == ["a", "", ""]


def test_it_does_not_matter_how_tokens_cut_the_text() -> None:
    pieces = TextPieces(lambda tokens: "abcd" * len(tokens), [], ["abcd", "bc"])
    assert (pieces.add(0), pieces.stopped) == ("a", True)
    assert pieces_of(b"abcd", "abcd", "bc") == ["", "", "a", ""]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_the_answer_ends_before_the_stop_string_that_ends_first(text: str, stops: list[str]) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(pieces_of(text.encode(), *stops)) == (text[: min(ends)[1]] if ends else text)


# ---- options


def read(stop: Sequence[bytes] = (), context: int | None = 100, **parameters: Any) -> TextOptions:
    return read_options(parameters, stop, TextOptions(top_k=50), context)


def test_what_is_not_given_is_as_the_model_says() -> None:
    assert read() == TextOptions(top_k=50)
    assert read(unknown=1) == TextOptions(top_k=50)


def test_what_is_given_counts() -> None:
    options = read(
        [b"a", "ü".encode()], max_tokens=7, temperature=1, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2, seed=0
    )
    assert options == TextOptions(7, 1.0, 3, 0.5, 0.1, 2.0, 0, ("a", "ü"))
    assert read(max_new_tokens=100).max_tokens == 100
    assert (read(top_k=-1).top_k, read(top_k=0).top_k, read(temperature=0).temperature) == (0, 0, 0.0)
    assert read(context=None, max_tokens=1_000_000).max_tokens == 1_000_000


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 0, "`max_tokens` must be a whole number from 1 to 100, .*, got 0$"),
        ("max_tokens", 101, "got 101$"),
        ("max_tokens", 5.0, "got 5.0$"),
        ("max_tokens", True, "got true$"),
        ("max_new_tokens", "5", "`max_new_tokens` must be a whole number .* got '5'$"),
        ("temperature", -1, "`temperature` must be 0, or a number from 0.01 to 100, got -1$"),
        ("temperature", math.nan, "got nan$"),
        ("temperature", math.inf, "got inf$"),
        ("temperature", 1e-30, "got 1e-30$"),
        ("temperature", "x" * 10_000, "got 'x{56}\\.\\.\\.$"),
        ("temperature", False, "got false$"),
        ("top_p", 0, "`top_p` must be a number above 0, at most 1, got 0$"),
        ("top_p", 1.1, "got 1.1$"),
        ("top_k", -2, "`top_k` must be a whole number of tokens, 1 or more; 0 or -1 for all, got -2$"),
        ("top_k", 2**40, "got 1099511627776$"),
        ("min_p", 1.5, "`min_p` must be a number from 0 to 1, got 1.5$"),
        ("repetition_penalty", 0, "`repetition_penalty` must be a number from 0.01 to 100, got 0$"),
        ("seed", -1, "`seed` must be a whole number from 0 to 2\\^63 - 1, got -1$"),
        ("seed", 2**63, "got 9223372036854775808$"),
    ],
)
def test_what_cannot_be_is_refused_in_words(name: str, value: Any, words: str) -> None:
    with pytest.raises(InferError, match=words) as caught:
        read(**{name: value})
    assert caught.value.status == 400
    assert len(caught.value.message) < 250


def test_two_names_for_one_thing_are_refused() -> None:
    with pytest.raises(InferError, match="are the same: give one of them"):
        read(max_tokens=1, max_new_tokens=1)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ([b"x"] * 17, "`stop` must have at most 16 strings, got 17"),
        ([b""], "each string of `stop` must have from 1 to 1024 characters, got 0"),
        ([b"x" * 1025], "got 1025"),
        ([b"\xff"], "`stop` must be UTF-8"),
    ],
)
def test_stop_strings_that_cannot_be_are_refused(stop: list[bytes], words: str) -> None:
    with pytest.raises(InferError, match=words):
        read(stop)
