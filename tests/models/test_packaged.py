"""The models that are served when no repository is given."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import trio

from support import get, post, serving
from trio_infer import InferError, InferRequest
from trio_infer.models.packaged import Summarize, packaged_models
from trio_infer.models.packaged.summarize import MOST_BYTES, MOST_SENTENCES, split_sentences

STORY = (
    "The lighthouse keeper counted the ships that passed the lighthouse each night. "
    "He had soup for lunch. "
    "Every ship that passed was written into a book, and the lighthouse book was never wrong. "
    "Every ship that passed was written into the book, and the lighthouse book was never wrong. "
    "One night no ships passed, and the keeper wrote nothing. "
    "The wind was cold."
)


async def summary(text: str | bytes, **parameters: Any) -> list[str]:
    data = text if isinstance(text, bytes) else text.encode()
    request = InferRequest("summarize", "1", {"text_input": np.array([data], object)}, parameters=parameters)
    return [bytes(output["text_output"][0]).decode() async for output in Summarize().infer(request)]


# -- All ------------------------------------------------------------------------------------------------------------


async def test_each_is_ready_and_describes_itself(autojump_clock: Any) -> None:
    async with serving(*packaged_models(), memory=True) as served:
        client = served.connect_in_memory()
        for name in ("identity", "slow", "summarize"):
            assert (await client.ask(get(f"/v2/models/{name}"))).json["name"] == name
            assert (await client.ask(get(f"/v2/models/{name}/ready"))).status == 200


# -- identity -------------------------------------------------------------------------------------------------------


async def test_identity_gives_back_what_it_gets(autojump_clock: Any) -> None:
    numbers = {"name": "INPUT", "datatype": "FP32", "shape": [3], "data": [1, 2.5, -3]}
    texts = {"name": "BYTES_INPUT", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]}
    async with serving(*packaged_models(), memory=True) as served:
        client = served.connect_in_memory()
        for inputs in ([numbers], [texts], [numbers, texts]):
            answer = await client.ask(post("identity", "infer", {"inputs": inputs}))
            assert [output["data"] for output in answer.json["outputs"]] == [tensor["data"] for tensor in inputs]


async def test_identity_of_nothing_is_refused(autojump_clock: Any) -> None:
    async with serving(*packaged_models(), memory=True) as served:
        answer = await served.connect_in_memory().ask(post("identity", "generate", {}))
        assert (answer.status, "INPUT or BYTES_INPUT" in answer.json["error"]) == (400, True)


# -- slow -----------------------------------------------------------------------------------------------------------


async def test_slow_counts_its_steps_for_infer_and_for_generate(autojump_clock: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "trio_infer.models")
    async with serving(*packaged_models(), memory=True) as served:
        client = served.connect_in_memory()
        assert (await client.ask(post("slow", "generate", {"steps": 3}))).json["steps_done"] == 3
        assert [record.getMessage() for record in caplog.records] == [f"slow: step {step} of 3" for step in (1, 2, 3)]
        steps = {"name": "steps", "datatype": "INT32", "shape": [1], "data": [2]}
        answer = await client.ask(post("slow", "infer", {"inputs": [steps]}))
        assert answer.json["outputs"][0]["data"] == [2]
        before = trio.current_time()
        assert (await client.ask(post("slow", "generate", {}))).json["steps_done"] == 100
        assert trio.current_time() - before == pytest.approx(10, abs=0.5)


async def test_slow_says_at_which_step_it_was_stopped(autojump_clock: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "trio_infer.models")
    async with serving(*packaged_models(), memory=True) as served:
        client = served.connect_in_memory()
        await client.send(post("slow", "generate", {"steps": 100}))
        await trio.sleep(2.35)
        await client.close()
        await served.ended(1)
    assert caplog.records[-1].getMessage() == "slow: stopped at step 23"


@pytest.mark.parametrize("steps", [0, -1, 36_001])
async def test_slow_refuses_steps_out_of_bounds(steps: int, autojump_clock: Any) -> None:
    async with serving(*packaged_models(), memory=True) as served:
        answer = await served.connect_in_memory().ask(post("slow", "generate", {"steps": steps}))
        assert (answer.status, answer.json["error"]) == (400, f"'steps' must be from 1 to 36000, got {steps}")


# -- summarize ------------------------------------------------------------------------------------------------------


async def test_the_summary_is_of_the_central_sentences_in_the_texts_order() -> None:
    sentences = split_sentences(STORY)
    chosen = [sentences.index(sentence) for sentence in await summary(STORY)]
    assert chosen == sorted(chosen)
    assert len(chosen) == 3
    assert 1 not in chosen
    assert 5 not in chosen


async def test_of_two_sentences_that_say_the_same_only_one_is_chosen() -> None:
    chosen = await summary(STORY, max_sentences=2)
    assert sum("never wrong" in sentence for sentence in chosen) == 1


async def test_the_same_text_gives_the_same_summary() -> None:
    assert await summary(STORY) == await summary(STORY)


async def test_a_text_shorter_than_its_summary_comes_back_whole() -> None:
    assert await summary("One sentence.") == ["One sentence."]
    assert await summary("Same. Same. Same.", max_sentences=20) == ["Same."] * 3


async def test_sentences_are_streamed_one_by_one(autojump_clock: Any) -> None:
    async with serving(*packaged_models(), memory=True) as served:
        client = served.connect_in_memory()
        document = {"text_input": STORY, "max_sentences": 2}
        await client.send(post("summarize", "generate_stream", document))
        assert (await client.head()).headers["content-type"].startswith("text/event-stream")
        chunks = [await client.chunk() for _ in range(3)]
        assert [chunk.startswith(b"data: {") for chunk in chunks] == [True, True, False]
        one = await client.ask(post("summarize", "generate", document | {"max_sentences": 1}))
        assert one.json["text_output"] in STORY


@pytest.mark.parametrize(
    ("text", "parameters", "message"),
    [
        ("", {}, "'text_input' is empty: there is nothing to summarise"),
        (" \n ... ", {}, "'text_input' is empty: there is nothing to summarise"),
        ("a" * (MOST_BYTES + 1), {}, f"'text_input' must have at most {MOST_BYTES} bytes, got {MOST_BYTES + 1}"),
        ("Word one. " * (MOST_SENTENCES + 1), {}, "'text_input' must have at most 500 sentences"),
        (b"\xff", {}, "'text_input' must be UTF-8: invalid start byte at byte 0"),
        ("a.", {"max_sentences": 0}, "'max_sentences' must be a whole number from 1 to 20, got 0"),
        ("a.", {"max_sentences": 21}, "'max_sentences' must be a whole number from 1 to 20, got 21"),
        ("a.", {"max_sentences": True}, "'max_sentences' must be a whole number from 1 to 20, got True"),
        ("a.", {"max_sentences": "3"}, "'max_sentences' must be a whole number from 1 to 20, got '3'"),
    ],
)
async def test_what_can_not_be_summarised_is_refused(
    text: str | bytes, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InferError) as caught:
        await summary(text, **parameters)
    assert caught.value.message.startswith(message)
    assert caught.value.status == 400


async def test_leaving_in_the_midst_of_the_computation_ends_it() -> None:
    text = " ".join(f"Word{n} and word{n + 1} and word{n + 2} met." for n in range(MOST_SENTENCES))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def leave_soon() -> None:
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            nursery.start_soon(leave_soon)
            await summary(text)
            raise AssertionError("it should have been stopped")
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        (
            "Dr. Who met e.g. J. S. Bach. He was 3.5 feet tall.",
            ["Dr. Who met e.g. J. S. Bach.", "He was 3.5 feet tall."],
        ),
        ('"Really?" he said.\nYes…  so it was.', ['"Really?"', "he said.", "Yes…", "so it was."]),
        ("A title\n\nand a line\nbroken in two", ["A title", "and a line broken in two"]),
        ("这是一。那是二！", ["这是一。", "那是二！"]),
        ("... !!! ???", []),
    ],
)
def test_text_is_split_into_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences
