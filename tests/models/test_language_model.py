"""The packaged language model: one request has one answer, whoever else is there."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from desk import Guest, desk
from support import post, serving
from trio_infer import InferError, InferRequest
from trio_infer.models.packaged import Scribe
from trio_infer.models.packaged.scribe.tokens import Vocabulary
from trio_infer.models.packaged.scribe.transformer import CHUNK, Transformer
from trio_infer.models.token_runner import TokenRunner

PROMPTS = ["And it came to pass", "In the beginning", "Blessed is the man that", "x", "The king said unto " * 12]


@pytest.fixture(scope="module")
def scribe() -> Scribe:
    model = Scribe()
    model._load()
    return model


def ask(scribe: Scribe, text: str | bytes, **fields: Any) -> InferRequest:
    inputs = {"text_input": np.array([text.encode() if isinstance(text, str) else text], object)}
    for name, value in fields.items():
        inputs[name] = np.array([value], next(spec.datatype.dtype for spec in scribe.inputs if spec.name == name))
    return InferRequest("scribe", "1", inputs)


def text(guest: Guest) -> str:
    return b"".join(response.outputs["text_output"][0] for response in guest.responses).decode()


async def generate(*requests: InferRequest, gaps: tuple[int, ...] = ()) -> list[str]:
    async with desk(TokenRunner(Scribe())) as at:
        guests = []
        for number, request in enumerate(requests):
            guest = Guest(at, request)
            guests.append(guest)
            at._nursery.start_soon(guest.run, at)
            for _ in range(gaps[number] if number < len(gaps) else 0):
                await trio.sleep(0.003)
    return [text(guest) for guest in guests]


async def test_it_goes_on_in_words(scribe: Scribe) -> None:
    (answer,) = await generate(ask(scribe, "And it came to pass", max_tokens=40))
    assert len(answer.split()) > 10, answer
    assert answer.isascii()


async def test_an_answer_is_the_same_alone_and_in_company_with_and_without_chance(scribe: Scribe) -> None:
    requests = [
        ask(scribe, prompt, max_tokens=24, temperature=temperature, seed=seed)
        for prompt in PROMPTS
        for temperature, seed in ((0.0, 0), (0.9, 1), (0.9, 2))
    ]
    alone = [(await generate(request))[0] for request in requests]
    assert await generate(*requests, gaps=(1, 0, 3, 0, 0, 2, 5)) == alone
    assert len(set(alone)) > len(PROMPTS), "a seed makes a difference"


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_logits_are_bit_for_bit_the_same_in_any_slot_and_company(scribe: Scribe, data: Any) -> None:
    transformer = scribe._transformer
    tokens = np.array(scribe._vocabulary.encode(data.draw(st.sampled_from(PROMPTS)).encode()))
    answer = data.draw(st.lists(st.integers(0, 1023), min_size=1, max_size=6))

    def run(slot: int) -> list[bytes]:
        found = [transformer.prefill(slot, tokens).tobytes()]
        for number, token in enumerate(answer):
            others, positions = np.array(data.draw(st.lists(st.integers(0, 200), min_size=16, max_size=16))).reshape(
                2, 8
            )
            others[slot], positions[slot] = token, len(tokens) + number
            found.append(transformer.step(others, positions)[slot].tobytes())
            if data.draw(st.booleans()):
                transformer.prefill((slot + 3) % 8, tokens[:5])
        return found

    assert run(data.draw(st.integers(0, 7))) == run(data.draw(st.integers(0, 7)))


def test_a_step_after_a_prefill_is_what_a_longer_prefill_gives(scribe: Scribe) -> None:
    transformer = scribe._transformer
    tokens = np.array(scribe._vocabulary.encode((PROMPTS[4]).encode()))
    assert len(tokens) > CHUNK
    transformer.prefill(2, tokens[:-1])
    stepped = transformer.step(np.full(8, tokens[-1]), np.full(8, len(tokens) - 1))[2]
    np.testing.assert_allclose(stepped, transformer.prefill(5, tokens), rtol=1e-3, atol=1e-4)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_tokens_are_the_text_again(scribe: Scribe, content: bytes) -> None:
    vocabulary: Vocabulary = scribe._vocabulary
    tokens = vocabulary.encode(content)
    assert b"".join(vocabulary.pieces[token] for token in tokens) == content
    assert len(tokens) <= len(content)


def test_pieces_that_are_no_whole_character_are_held_back(scribe: Scribe) -> None:
    class Generation:  # all that is looked at of one; hence the ignored types below
        state = scribe.start(ask(scribe, "x")).state

    told = [scribe.output(Generation(), byte) for byte in "é!".encode()]  # type: ignore[arg-type]
    assert [None if each is None else each["text_output"][0] for each in told] == [None, "é".encode(), b"!"]
    scribe.output(Generation(), 0xC3)  # type: ignore[arg-type]
    assert scribe.finish(Generation())["text_output"][0] == "\ufffd".encode()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": ""}, "`text_input` must have from 1 to 255 tokens, got no text"),
        ({"text": "~" * 300}, "got 300 tokens"),
        ({"text": "x", "max_tokens": 0}, "`max_tokens` must be 1 or more, got 0"),
        ({"text": "x", "temperature": -1.0}, "`temperature` must be from 0 to 100, got -1"),
        ({"text": "x", "temperature": float("nan")}, "`temperature` must be from 0 to 100, got nan"),
    ],
)
def test_what_it_refuses(scribe: Scribe, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InferError, match=reason):
        scribe.start(ask(scribe, fields.pop("text"), **fields))


async def test_it_streams_and_answers_whole_over_http() -> None:
    async with serving(Scribe(), memory=True) as served:
        client = served.connect_in_memory()
        document = {"text_input": "In the beginning", "max_tokens": 12}
        whole = (await client.ask(post("scribe", "generate", document))).json["text_output"]
        stream = await client.ask(post("scribe", "generate_stream", document))
        events = [json.loads(line.removeprefix(b"data: ")) for line in stream.body.split(b"\n\n") if line]
        assert len(events) > 6
        assert "".join(event["text_output"] for event in events) == whole


def test_slots_start_afresh() -> None:
    rng = np.random.default_rng(1)
    names = {"tokens": (9, 8), "places": (64, 8), "last": (8,)}
    names |= {"blocks.0.qkv": (24, 8), "blocks.0.out": (8, 8), "blocks.0.up": (32, 8), "blocks.0.down": (8, 32)}
    names |= {"blocks.0.norm1": (8,), "blocks.0.norm2": (8,)}
    transformer = Transformer({name: rng.random(shape) for name, shape in names.items()}, heads=2, slots=2)
    fresh = transformer.prefill(0, np.array([1, 2, 3]))
    transformer.prefill(0, np.arange(60) % 9)
    assert (transformer.prefill(0, np.array([1, 2, 3])) == fresh).all()
