"""Text generation with transformers, on a small model with random weights."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from text_models import edit_json, make_text_model, make_tokenizer
from triton_stage import Client, happens

from support import post, serving
from trio_infer.errors import InferError, ModelLoadError
from trio_infer.models.host import NoHost
from trio_infer.models.repository import find_models
from trio_infer.protocol.values import InferResponse

transformers = pytest.importorskip("transformers", reason="needs the extra `transformers`")
torch = pytest.importorskip("torch", reason="needs the extra `transformers`")

PROMPT = "The client left, "
DRAWN = {"temperature": 0.8, "seed": 5}
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
SOON = 30
"""Seconds that a test waits at most; machines may be slow."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model `m`."""
    root = tmp_path_factory.mktemp("repository")
    make_text_model(root / "m" / "1")
    return root


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The version directory of a model that a test may spoil."""
    return make_text_model(tmp_path / "m" / "1")


def only_runner(root: Path, **options: Any) -> Any:
    (runner,) = find_models([root], **options)
    return runner


async def loaded(root: Path) -> Any:
    runner = only_runner(root)
    await runner.load(NoHost())
    return runner


def network(runner: Any) -> Any:
    """The torch module of a runner's only instance."""
    return runner._loaded[0].model._text.network


def client(runner: Any, text: str | bytes = PROMPT, *stop: str, **parameters: Any) -> Client:
    encoded = text.encode() if isinstance(text, str) else text
    inputs = {"text_input": np.array([encoded], object)}
    if stop:
        inputs["stop"] = np.array([each.encode() for each in stop], object)
    return Client(runner, inputs=inputs, parameters=parameters)


def leaving_client(runner: Any, **parameters: Any) -> Client:
    """One that leaves with the first piece that it gets."""
    leaving = client(runner, **parameters)

    async def leave(response: InferResponse) -> None:
        leaving.responses.append(response)
        leaving.leave()

    leaving.send = leave  # type: ignore[method-assign]  # it is this one's only
    return leaving


def pieces(responses: list[InferResponse]) -> list[str]:
    return [response.outputs["text_output"][0].decode() for response in responses]


async def ask(runner: Any, text: str | bytes = PROMPT, *stop: str, **parameters: Any) -> tuple[str, str]:
    """The whole text, and why it ends there."""
    asking = client(runner, text, *stop, **parameters)
    last = await asking.ask()
    return "".join(pieces(asking.responses)), last.outputs["finish_reason"][0].decode()


def bare(directory: Path, text: str = PROMPT, *, seed: int = 0, **options: Any) -> str:
    """What the library alone gives."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    made = model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)
    return str(tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True))


@contextmanager
def hooked(module: Any, hook: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# ---- the text


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, {"do_sample": False}),
        ({"repetition_penalty": 1.3}, {"do_sample": False, "repetition_penalty": 1.3}),
        ({"temperature": 1.0}, {"do_sample": True}),
        (
            {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        ),
        ({"temperature": 1.5, "top_k": -1}, {"do_sample": True, "temperature": 1.5, "top_k": 0}),
    ],
)
async def test_the_pieces_are_the_text_of_the_bare_library(root: Path, asked: Any, options: Any) -> None:
    runner = await loaded(root)
    for seed in range(3):
        text, reason = await ask(runner, max_tokens=60, seed=seed, **asked)
        assert text == bare(root / "m" / "1", seed=seed, max_new_tokens=60, **options)
        assert reason in {"length", "stop"}
    await runner.unload()


async def test_each_piece_has_whole_characters_and_the_last_says_why_it_is_the_last(root: Path) -> None:
    runner = await loaded(root)
    asking = client(runner, "Grüße aus Köln, 東京 und ", max_tokens=40)
    await asking.ask()
    assert len(asking.responses) > 10
    assert [list(response.outputs) for response in asking.responses[:-1]] == [["text_output"]] * (
        len(asking.responses) - 1
    )
    assert asking.responses[-1].outputs["finish_reason"][0] == b"length"
    assert runner.collect(asking.responses).outputs == {
        "text_output": [b"".join(piece.encode() for piece in pieces(asking.responses))],
        "finish_reason": [b"length"],
    }
    await runner.unload()


async def test_one_seed_has_one_text_whatever_else_draws(root: Path) -> None:
    runner = await loaded(root)
    first = await ask(runner, max_tokens=30, **DRAWN)
    torch.rand(7)
    assert await ask(runner, max_tokens=30, **DRAWN) == first
    assert await ask(runner, max_tokens=30, **{**DRAWN, "seed": 6}) != first
    texts = {await ask(runner, max_tokens=30, temperature=1.0) for _ in range(3)}
    assert len(texts) == 3, "without a seed each text is another"
    await runner.unload()


async def test_what_generation_config_says_counts_where_the_request_says_nothing(tmp_path: Path) -> None:
    directory = make_text_model(
        tmp_path / "m" / "1", do_sample=True, temperature=0.6, top_k=5, max_new_tokens=12, repetition_penalty=1.2
    )
    runner = await loaded(tmp_path)
    assert (await ask(runner, seed=3))[0] == bare(directory, seed=3)
    greedy = bare(directory, do_sample=False, temperature=None, top_k=None, max_new_tokens=12)
    assert (await ask(runner, temperature=0))[0] == greedy
    await runner.unload()


async def test_an_answer_ends_at_the_model_s_end_token(root: Path, tmp_path: Path) -> None:
    directory = make_text_model(tmp_path / "m" / "1")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = bare(directory, max_new_tokens=10)
    ends = tokenizer(text)["input_ids"][3:5]
    edit_json(directory / "generation_config.json", eos_token_id=ends)
    runner = await loaded(tmp_path)
    short, reason = await ask(runner, max_tokens=10)
    assert reason == "stop"
    assert len(short) < len(text)
    assert text.startswith(short)
    await runner.unload()


async def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(root: Path) -> None:
    runner = await loaded(root)
    text, _ = await ask(runner, max_tokens=60)
    stop = text[20:23]
    calls: list[int] = []
    with hooked(network(runner), lambda *_: calls.append(1)):
        assert await ask(runner, PROMPT, "not in it", stop, max_tokens=60) == (text[: text.find(stop)], "stop")
    assert len(calls) < 40, "and no more tokens are made"
    await runner.unload()


async def test_what_else_the_library_knows_to_end_an_answer_ends_it(tmp_path: Path) -> None:
    text = bare(make_text_model(tmp_path / "m" / "1"), max_new_tokens=30)
    edit_json(tmp_path / "m" / "1" / "generation_config.json", stop_strings=[text[20:23]])
    runner = await loaded(tmp_path)
    assert await ask(runner, max_tokens=30) == (text[: text.find(text[20:23])], "stop")
    assert await ask(runner, PROMPT, "not in it", max_tokens=30) == (text, "length"), (
        "the request's count in their place"
    )
    await runner.unload()
    edit_json(tmp_path / "m" / "1" / "generation_config.json", stop_strings=None, max_time=1e-9)
    runner = await loaded(tmp_path)
    short, reason = await ask(runner, max_tokens=30)
    assert text.startswith(short)
    assert (len(short) < 10, reason) == (True, "length")
    await runner.unload()


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
        ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2}),  # there is no limit to what it can take
        ("Qwen2", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ],
)
async def test_models_of_any_kind_are_served(kind: str, context: Any, tmp_path: Path) -> None:
    directory = tmp_path / "m" / "1"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(2)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), initializer_range=0.3, **ends, **context)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    runner = await loaded(tmp_path)
    for seed in range(3):
        expected = bare(directory, seed=seed, max_new_tokens=20, do_sample=True)
        assert (await ask(runner, max_tokens=20, temperature=1, seed=seed))[0] == expected
    await runner.unload()


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "parameters", "words"),
    [
        ("", {}, "`text_input` must have from 1 to 255 tokens, to leave room for one of the answer, got 0"),
        ("left " * 255, {}, "`text_input` must have from 1 to 255 tokens, .*, got [0-9]{3,4}$"),
        ("x" * 1_000_000, {}, "`text_input` must have from 1 to 255 tokens, got 1000000 characters"),
        (b"\xff", {}, "`text_input` must be UTF-8"),
        ("x", {"temperature": -1}, "`temperature` must be 0, or a number from 0.01 to 100, got -1"),
        ("x", {"max_tokens": 257}, "`max_tokens` must be a whole number from 1 to 256, "),
    ],
)
async def test_a_request_that_cannot_be_answered_is_told_why(
    root: Path, text: Any, parameters: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await loaded(root)
    with pytest.raises(InferError, match=words) as caught:
        await ask(runner, text, **parameters)
    assert caught.value.status == 400
    assert (await ask(runner, max_tokens=1))[1] == "length"
    assert not caplog.records
    await runner.unload()


async def test_an_answer_is_no_longer_than_the_context(root: Path) -> None:
    runner = await loaded(root)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "m" / "1")
    prompt = "<" * 250
    assert len(tokenizer(prompt)["input_ids"]) == 250
    positions: list[int] = []
    with hooked(network(runner), lambda *_: positions.append(1)):
        for parameters in ({}, {"max_tokens": 256}):
            positions.clear()
            assert (await ask(runner, prompt, **parameters))[1] == "length"
            assert len(positions) == 6
    await runner.unload()


# ---- leaving


async def test_a_client_that_leaves_in_mid_answer_stops_it_at_a_token(root: Path) -> None:
    runner = await loaded(root)
    before = await ask(runner, max_tokens=20, **DRAWN)
    leaving = leaving_client(runner, max_tokens=200, **DRAWN)
    calls: list[int] = []
    with hooked(network(runner), lambda *_: calls.append(1)):
        await leaving.stay()
        with trio.fail_after(SOON):
            await leaving.idle.wait()
        assert len(leaving.responses) == 1
        # One token and those that fitted between the model and the client.
        assert len(calls) < 60
    assert await ask(runner, max_tokens=20, **DRAWN) == before
    await runner.unload()


async def test_a_client_that_leaves_during_its_prompt_stops_it_within_a_block(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await loaded(root)
    before = await ask(runner, max_tokens=20)
    first, second, *_ = network(runner).model.layers
    entered, gate = threading.Event(), threading.Event()
    calls: list[int] = []

    def wait(*_: Any) -> None:
        entered.set()
        assert gate.wait(SOON)

    leaving = client(runner, "left " * 50, max_tokens=20)
    with hooked(first.mlp, wait), hooked(second, lambda *_: calls.append(1)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaving.stay)
            await happens(entered)
            leaving.leave()
            with trio.fail_after(SOON):
                await leaving.gone.wait()
            assert not leaving.idle.is_set(), "the instance is taken as long as its thread computes"
            gate.set()
            with trio.fail_after(SOON):
                await leaving.idle.wait()
        assert not calls, "the prompt went no further"
    assert not leaving.responses
    assert await ask(runner, max_tokens=20) == before
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
    await runner.unload()


async def test_of_two_instances_one_is_left_and_the_other_goes_on(tmp_path: Path) -> None:
    make_text_model(tmp_path / "m" / "1")
    (tmp_path / "m" / "config.pbtxt").write_text("instance_group { count: 2 }")
    runner = await loaded(tmp_path)
    expected = await ask(runner, max_tokens=40, **DRAWN)
    leaving, staying = leaving_client(runner, max_tokens=200, **DRAWN), client(runner, max_tokens=40, **DRAWN)
    staying.instance.index = 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leaving.stay)
        last = await staying.ask()
    assert ("".join(pieces(staying.responses)), last.outputs["finish_reason"][0].decode()) == expected
    with trio.fail_after(SOON):
        await leaving.idle.wait()
    await runner.unload()


async def test_a_model_that_is_unloaded_has_no_hooks_any_more(root: Path) -> None:
    runner = await loaded(root)
    model = network(runner)
    assert all(module._forward_pre_hooks for module in model.modules())
    await runner.unload()
    assert not any(module._forward_pre_hooks for module in model.modules())


# ---- in a process


async def test_a_process_gives_the_same_text_and_stops_by_itself(tmp_path: Path) -> None:
    directory = make_text_model(tmp_path / "m" / "1", context=4096)
    (tmp_path / "m" / "config.pbtxt").write_text(PROCESS)
    runner = await loaded(tmp_path)
    assert runner.stops == "process"
    text = bare(directory, seed=5, max_new_tokens=20, do_sample=True, temperature=0.8)
    assert (await ask_slowly(runner, max_tokens=20, **DRAWN))[0] == text
    leaving = leaving_client(runner, max_tokens=4000)  # which takes far longer than the grace
    await leaving.stay()
    with trio.fail_after(SOON):
        await leaving.idle.wait()
    assert (await ask_slowly(runner, max_tokens=20, **DRAWN))[0] == text
    assert not runner.exits, "it stopped by itself: the process wasn't killed"
    with pytest.raises(InferError, match="`top_p` must be a number above 0, at most 1, got 2"):
        await ask_slowly(runner, top_p=2)
    await runner.unload()


async def ask_slowly(runner: Any, **parameters: Any) -> tuple[str, str]:
    asking = client(runner, **parameters)
    with trio.fail_after(SOON):
        await runner.run(asking.instance, asking.request, asking.send)
    return "".join(pieces(asking.responses)), asking.responses[-1].outputs["finish_reason"][0].decode()


# ---- over HTTP


async def test_generate_and_infer_give_one_answer_and_generate_stream_gives_the_pieces(root: Path) -> None:
    text = bare(root / "m" / "1", max_new_tokens=15, do_sample=False)
    async with serving(*find_models([root]), memory=True) as served:
        http = served.connect_in_memory()
        body = {"text_input": PROMPT, "max_tokens": 15}
        answer = (await http.ask(post("m", "generate", body))).json
        assert answer == {"model_name": "m", "model_version": "1", "text_output": text, "finish_reason": "length"}
        answer = (await http.ask(post("m", "generate", {"text_input": PROMPT, "parameters": {"max_tokens": 15}}))).json
        assert answer["text_output"] == text
        answer = (await http.ask(post("m", "generate", {**body, "stop": [text[5:7]]}))).json
        assert (answer["text_output"], answer["finish_reason"]) == (text[: text.find(text[5:7])], "stop")
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}
        answer = (await http.ask(post("m", "infer", {"inputs": [tensor], "parameters": {"max_tokens": 15}}))).json
        assert {output["name"]: output["data"] for output in answer["outputs"]} == {
            "text_output": [text],
            "finish_reason": ["length"],
        }
        events = (await http.ask(post("m", "generate_stream", body))).body.decode().split("\n\n")[:-1]
        assert len(events) > 5
        assert "".join(json.loads(event.removeprefix("data: "))["text_output"] for event in events) == text
        refused = await http.ask(post("m", "generate_stream", {**body, "temperature": "hot"}))
        assert (refused.status, refused.json["error"]) == (
            400,
            "`temperature` must be 0, or a number from 0.01 to 100, got 'hot'",
        )


async def test_a_client_that_leaves_its_stream_frees_the_instance(root: Path) -> None:
    runner = only_runner(root)
    async with serving(runner) as served:
        held, gate = threading.Event(), threading.Event()
        calls: list[int] = []

        def hold(*_: Any) -> None:  # else the stream might be over, and in a socket's buffer, before the client leaves
            calls.append(1)
            if len(calls) == 10:
                held.set()
                assert gate.wait(SOON)

        with trio.fail_after(SOON), hooked(network(runner), hold):
            http = await served.connect()
            await http.send(post("m", "generate_stream", {"text_input": PROMPT, "max_tokens": 230}))
            assert (await http.head()).status == 200
            assert await http.chunk()
            await happens(held)
            await http.close()
            await served.ended(1)
            assert served.cancelled() == {("client disconnected", "streaming"): 1}
            gate.set()
            other = await served.connect()
            answer = await other.ask(post("m", "generate", {"text_input": PROMPT, "max_tokens": 3}))
            assert answer.json["finish_reason"] == "length"
            assert len(calls) == 10 + 3, "no token was begun after the client had left"
            await other.close()


# ---- loading


async def test_nothing_is_downloaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, address: Any) -> None:
        raise AssertionError(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    runner = await loaded(root)
    assert (await ask(runner, max_tokens=1))[1] == "length"
    await runner.unload()


async def faulty(directory: Path) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        await loaded(directory.parent.parent)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert str(directory) in str(caught.value)
    return caught.value


async def test_a_directory_without_weights_is_refused(own: Path) -> None:
    (own / "model.safetensors").unlink()
    assert "model.safetensors" in (await faulty(own)).reason


async def test_pickled_weights_are_not_read(own: Path) -> None:
    (own / "model.safetensors").unlink()
    torch.save({}, own / "pytorch_model.bin")
    assert "model.safetensors" in (await faulty(own)).reason


async def test_a_directory_without_a_tokenizer_is_refused(own: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own / name).unlink()
    assert "transformers can't take it" in (await faulty(own)).reason


async def test_weights_that_are_not_the_model_s_are_refused(own: Path) -> None:
    edit_json(own / "config.json", num_hidden_layers=4)
    words = "its files lack 9 of the weights that a LlamaForCausalLM has, such as model.layers.3."
    assert words in (await faulty(own)).reason


async def test_code_that_lies_with_the_model_is_not_run(own: Path) -> None:
    edit_json(own / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    (own / "mine.py").write_text("raise SystemExit")
    assert "only transformers' own models are run" in (await faulty(own)).reason


async def test_a_model_with_an_encoder_is_refused(own: Path) -> None:
    transformers.T5Config().save_pretrained(own)
    assert "it has an encoder and a decoder" in (await faulty(own)).reason


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"num_beams": 4}, "it asks for beam_search, whose tokens aren't final when they are made"),
        ({"do_sample": True, "typical_p": 0.5}, "`typical_p` is not supported"),
        ({"do_sample": True, "num_return_sequences": 2}, "`num_return_sequences` must be 1, got 2"),
        ({"token_healing": True}, "transformers can't take it: ValueError: "),
    ],
)
async def test_a_generation_config_that_cannot_be_followed_is_refused(own: Path, generation: Any, words: str) -> None:
    edit_json(own / "generation_config.json", **generation)
    fault = await faulty(own)
    assert words in fault.reason
    assert "generation_config.json" in str(fault)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("max_batch_size: 4", "max_batch_size 4"),
        ("instance_group { kind: KIND_GPU }", "PyTorch sees 0 GPUs here"),
    ],
)
async def test_a_configuration_that_cannot_be_is_refused(own: Path, config: str, words: str) -> None:
    if torch.cuda.is_available() and "GPU" in config:
        pytest.skip("there is a GPU")
    (own.parent / "config.pbtxt").write_text(config)
    with pytest.raises(ModelLoadError, match=words):
        await loaded(own.parent.parent)


async def test_a_full_configuration_must_be_the_one_that_it_can_have(own: Path) -> None:
    (own.parent / "config.pbtxt").write_text(
        'input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }\n'
        'output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }'
    )
    runner = only_runner(own.parent.parent, auto_complete=False)
    with pytest.raises(ModelLoadError, match=r"must have the inputs .*'stop', 'text_input'"):
        await runner.load(NoHost())
