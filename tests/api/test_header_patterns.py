"""The operator's pattern for header names: as RE2 reads it, and in time that no client can stretch."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_infer.api.header_patterns import LONGEST, HeaderPattern
from trio_infer.errors import SetupError


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("x-tenant", ["x-tenant", "my-x-tenant-id"], ["x-tenan", "tenant"]),
        ("^X-(Tenant|User)$", ["x-tenant", "x-user"], ["x-users", "ax-user"]),
        ("^x-[a-c0-9_]{2,3}$", ["x-ab", "x-c0_"], ["x-a", "x-abcd", "x-zz"]),
        ("^a.c$", ["abc", "a-c"], ["ac", "abbc"]),
        (r"^\w+\.\d$", ["abc.1"], ["abc-1", ".1", "abc."]),
        ("^(?:a|b)*c+?$", ["c", "ababcc"], ["ab", "ca"]),
        ("(?i)^(?P<name>q)[^a-y]?$", ["q", "qz", "q1"], ["qa"]),
        ("^[[:alpha:]]+[[:digit:]]{2}$", ["abc12"], ["abc1", "a-12"]),
        ("^$|^y", ["y", "yy"], ["x"]),
        ("a{2", ["ba{2"], ["aa"]),
        ("^a||b", ["whatever"], []),
        (r"\Aid\z", ["id"], ["id2"]),
        (".*", ["anything"], ["a" * (LONGEST + 1)]),
        ("(a*)*b", ["aab", "b"], ["aa"]),
    ],
)
def test_a_pattern_matches_as_re2_does(pattern: str, matching: list[str], others: list[str]) -> None:
    compiled = HeaderPattern(pattern)
    assert [name for name in matching if not compiled.matches(name)] == []
    assert [name for name in others if compiled.matches(name)] == []


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a", "missing ) at character 3"),
        ("a)", "unexpected )"),
        ("[a", "missing ]"),
        ("*a", "nothing to repeat"),
        ("a**", "bad repetition operator"),
        ("a{3,2}", "invalid repeat count"),
        (r"(a)\1", r"invalid escape sequence \1"),
        ("(?=a)", "invalid group (?="),
        ("[b-a]", "bad character range"),
        ("[[:nope:]]", "unknown class"),
        ("(a{100}){100}", "too large"),
        ("(" * 60 + ")" * 60, "too deeply nested"),
        ("a\\", "invalid escape sequence"),
    ],
)
def test_what_is_no_pattern_is_refused_at_the_start(pattern: str, why: str) -> None:
    with pytest.raises(SetupError) as caught:
        HeaderPattern(pattern)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


_PIECE = st.sampled_from(["a", "b", "-", ".", "[ab]", "[^a]", r"\w", r"\d", "(?:ab|b)", "(a|)", "^", "$"])
_PATTERN = st.lists(st.tuples(_PIECE, st.sampled_from(["", "", "*", "+", "?", "{1,2}", "{2}", "+?"])), max_size=6).map(
    lambda pieces: "".join(piece + ("" if piece in "^$" else sign) for piece, sign in pieces)
)


@given(_PATTERN, st.lists(st.text("ab-1", min_size=1, max_size=8), max_size=5))
def test_it_agrees_with_python_where_both_understand_a_pattern(pattern: str, names: list[str]) -> None:
    compiled, python = HeaderPattern(pattern), re.compile(pattern)
    for name in names:
        assert compiled.matches(name) == (python.search(name) is not None), (pattern, name)


@given(st.text("ab()[]{}|*+?^$\\d,2:-", max_size=12))
def test_any_text_is_compiled_or_refused(text: str) -> None:
    with suppress(SetupError):
        HeaderPattern(text).matches("ab-2")


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*)*x", "a.*a.*a.*a.*a.*=", "(a?){60}a{60}"])
def test_no_name_takes_long_to_match_whatever_the_pattern(pattern: str) -> None:
    compiled = HeaderPattern(pattern)
    began = time.process_time()
    for number in range(60):
        compiled.matches("a" * 200 + f"!{number}")
    assert time.process_time() - began < 2  # Python's re would take more than the age of the universe


def test_headers_become_parameters_under_the_names_that_the_client_wrote() -> None:
    pattern = HeaderPattern("^x-|timeout")
    headers = [("X-Tenant", "a"), ("x-b", "1"), ("X-Tenant", "c"), ("Timeout", "5"), ("host", "h")]
    assert pattern.parameters(headers) == {"X-Tenant": "a, c", "x-b": "1"}
