"""A backend whose models answer in pieces: clients that want one response get them joined."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from support import post, serving
from trio_infer.models.backends import BACKENDS, Backend, BackendModel
from trio_infer.models.repository import find_models
from trio_infer.models.triton_messages import FINAL, InferenceResponse
from trio_infer.models.triton_tensors import Tensor

CONFIG = """
backend: "speller"
input { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "LETTERS" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "SO_FAR" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
REQUEST = {"inputs": [{"name": "WORD", "datatype": "BYTES", "shape": [1], "data": ["left"]}]}


class Speller(BackendModel):
    """Spells a word, and counts; a digit has no letter."""

    def execute(self, requests: Any) -> None:
        (request,) = requests
        sender = request.get_response_sender()
        for number, letter in enumerate(request.inputs()[0].as_numpy()[0].decode()):
            tensors = [Tensor("SO_FAR", np.array([number + 1], np.int32))]
            if letter.isalpha():
                tensors.append(Tensor("LETTERS", np.array([letter.encode()], object)))
            sender.send(InferenceResponse(tensors))
        sender.send(flags=FINAL)


@pytest.fixture
def repository(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a model of a backend that says that its letters are pieces, or says nothing."""
    module = ModuleType("speller")
    module.Model = Speller  # type: ignore[attr-defined]  # as a backend's module has it
    monkeypatch.setitem(sys.modules, "speller", module)
    backend = Backend(
        "speller", home="speller", files=("word.list",), package="numpy", extra="none", pieces=request.param
    )
    monkeypatch.setitem(BACKENDS, "speller", backend)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "m" / "1" / "word.list").write_text("")
    return tmp_path


@pytest.mark.parametrize("repository", [("LETTERS",)], indirect=True)
async def test_one_response_has_the_pieces_joined_and_of_the_rest_what_came_last(repository: Path) -> None:
    async with serving(*find_models([repository]), memory=True) as served:
        client = served.connect_in_memory()
        answer = (await client.ask(post("m", "infer", REQUEST))).json
        assert {output["name"]: output["data"] for output in answer["outputs"]} == {"LETTERS": ["left"], "SO_FAR": [4]}
        answer = (await client.ask(post("m", "generate", {"WORD": "l3ft4"}))).json
        assert (answer["LETTERS"], answer["SO_FAR"]) == ("lft", 5)
        answer = (await client.ask(post("m", "generate", {"WORD": "42"}))).json
        assert (answer.get("LETTERS"), answer["SO_FAR"]) == (None, 2)
        events = (await client.ask(post("m", "generate_stream", {"WORD": "left"}))).body.count(b"data: ")
        assert events == 4


@pytest.mark.parametrize("repository", [()], indirect=True)
async def test_without_pieces_there_is_no_one_response(repository: Path) -> None:
    async with serving(*find_models([repository]), memory=True) as served:
        client = served.connect_in_memory()
        assert "decoupled" in (await client.ask(post("m", "infer", REQUEST))).json["error"]
        answer = (await client.ask(post("m", "generate", {"WORD": "left"}))).json
        assert "exactly 1 response" in answer["error"]
