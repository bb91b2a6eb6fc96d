"""Loads a directory as `save_pretrained` writes it: the tokenizer, the weights, and how texts are made by default.

Nothing is downloaded (`local_files_only`), no Python code of the directory is run (`trust_remote_code` is off), and no
pickle is read (`use_safetensors`). Whatever can't be served is refused here, in one sentence, and at last by
making one token: transformers looks at much of a generation_config.json only when it is asked to generate.

This is the one file that imports transformers.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from trio_infer.errors import ModelLoadError
from trio_infer.models.backends.text_options import TextOptions
from trio_infer.models.backends.torch_hooks import torch
from trio_infer.models.triton_imports import ModelCode

__all__ = ["TextModel", "load_text_model", "transformers"]

transformers: Any = importlib.import_module("transformers")  # by name: type checkers read this where it isn't installed

LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}
DRAWING: Final = ("temperature", "top_k", "top_p", "min_p")
OTHER_DRAWING: Final = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "watermarking_config")
"""What a generation_config.json may say of drawing that isn't done here, so that it is refused."""


@attrs.frozen(eq=False)
class TextModel:
    """A model that goes on with a text.

    Args:
        network: the torch module.
        tokenizer: the library's.
        config: what the library's `generate` is told, but for what requests say.
        defaults: what is done here, and counts where a request says nothing.
        context: how many tokens it can take, prompt and answer; None if there is no limit.
        longest_token: characters that a token has at most.
    """

    network: Any
    tokenizer: Any
    config: Any
    defaults: TextOptions
    context: int | None
    longest_token: int

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ends = self.config.eos_token_id
        return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)


def load_text_model(code: ModelCode, device: str) -> TextModel:
    """Read a version directory.

    Args:
        code: the model's; its file is the directory's config.json.
        device: where the weights go, as PyTorch calls it.

    Raises:
        ModelLoadError: what is missing or wrong, or can't be served.
    """
    directory = code.version_directory
    with _faults(code):
        config = transformers.AutoConfig.from_pretrained(directory, **LOCAL)
    if config.is_encoder_decoder:
        reason = "it has an encoder and a decoder, and only models that go on with a text can be served"
        raise ModelLoadError(code.model, reason, where=code.file)
    with _faults(code):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **LOCAL)
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype="auto", use_safetensors=True, output_loading_info=True, **LOCAL
        )
    missing = sorted(report["missing_keys"])
    if missing:
        kind = type(network).__name__
        reason = f"its files lack {len(missing)} of the weights that a {kind} has, such as {missing[0]}"
        raise ModelLoadError(code.model, reason, where=code.file)
    generation, defaults = _generation(code, network.generation_config)
    network.generation_config = generation  # which the library takes for what it isn't told
    text = TextModel(
        network.to(device),
        tokenizer,
        generation,
        defaults,
        context=getattr(config.get_text_config(), "max_position_embeddings", None),
        longest_token=max(map(len, tokenizer.get_vocab()), default=1),
    )
    with _faults(code, "generation_config.json"):
        _try(text)
    return text


@contextmanager
def _faults(code: ModelCode, file: str = "config.json") -> Iterator[None]:
    """Make one sentence of what transformers raises, and keep its progress bars out of the server's log."""
    logs = transformers.utils.logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            reason = "it needs code of its own, which would have to be trusted; only transformers' own models are run"
        else:
            text = text if len(text) <= 300 else f"{text[:297]}..."
            reason = f"transformers can't take it: {type(error).__name__}: {text}"
        raise ModelLoadError(code.model, reason, where=_place(code, file)) from error
    finally:
        if shown:
            logs.enable_progress_bar()


def _place(code: ModelCode, file: str) -> Path:
    return code.version_directory / file


def _generation(code: ModelCode, given: Any) -> tuple[Any, TextOptions]:
    """What generation_config.json says: the part that the library is to do, and the part that is done here.

    Raises:
        ModelLoadError: it wants something that can't be streamed, or isn't done here.
    """

    def refuse(reason: str) -> ModelLoadError:
        return ModelLoadError(code.model, reason, where=_place(code, "generation_config.json"))

    mode = str(given.get_generation_mode().value)
    if mode not in {"greedy_search", "sample"}:
        raise refuse(f"it asks for {mode}, whose tokens aren't final when they are made")
    if _or(given.num_return_sequences, 1) != 1:
        raise refuse(f"`num_return_sequences` must be 1, got {given.num_return_sequences}")
    for name in OTHER_DRAWING:
        if given.do_sample and getattr(given, name, None) not in (None, 0.0, 1.0):
            raise refuse(f"`{name}` is not supported; of drawing these are: {', '.join(DRAWING)}")
    stops = _or(given.stop_strings, ())
    defaults = TextOptions(
        max_tokens=given.max_new_tokens,
        temperature=_or(given.temperature, 1.0) if given.do_sample else 0.0,
        top_k=_or(given.top_k, 50),  # as in the library
        top_p=_or(given.top_p, 1.0),
        min_p=_or(given.min_p, 0.0),
        repetition_penalty=_or(given.repetition_penalty, 1.0),
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
    )
    config = copy.deepcopy(given)
    config.update(do_sample=False, max_length=None, stop_strings=None, return_dict_in_generate=False)
    config.update(disable_compile=True, **dict.fromkeys((*DRAWING, *OTHER_DRAWING)))
    if config.pad_token_id is None:
        config.pad_token_id = 0  # which nothing of a single answer has, but the library warns if there is none
    return config, defaults


def _try(text: TextModel) -> None:
    config = copy.deepcopy(text.config)
    config.update(max_new_tokens=1)
    token = torch.tensor([[next(iter(text.ends), 0)]], device=text.network.device)
    text.network.generate(token, attention_mask=torch.ones_like(token), generation_config=config)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
