"""Text generation with Hugging Face transformers: a prompt in, its continuation out token by token, until nobody reads.

A version directory is a model directory as `save_pretrained` writes it. Nothing is downloaded, and no code that lies in
it is run: what needs either is refused when it loads.

How a generation stops. transformers asks its stopping criteria after each token; ours passes the token's text on, and
says that it was the last when the answer is complete, or when nobody wants it. That alone would let a prompt of 1,800
tokens go through the model to its end, as the first token comes after it; so the model has hooks, too (`torch_hooks`),
which leave the run between two modules, in the prompt or in a token. Measured with such a prompt and 8 layers of width
512 (a prompt takes 610 ms, a token 8): without hooks the work goes on for 499 ms at the median, with them for 5.4 ms.

How tokens are drawn. transformers draws from torch's random numbers, which all threads of a process share: with two
generations at a time, or one that was cancelled before, a seed would mean nothing. So it is told to take the likeliest
token, and the last of its logits processors leaves only one: the one drawn by the request's own generator, from the
same probabilities and in the same way. With the same seed that is, token by token, what `generate` draws by itself.

What this doesn't do: several prompts in one forward pass. Generations end at different times, and a batch that is made
when they begin holds the short ones' places to the end of the longest; a token loop (`token_model`) is what that needs.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from trio_infer.errors import InferError, ModelLoadError, RunCancelled
from trio_infer.models.backends import BackendModel
from trio_infer.models.backends.text_options import TextOptions, read_options
from trio_infer.models.backends.text_pieces import TextPieces
from trio_infer.models.backends.torch_hooks import StopHooks, asking, stop_points, torch
from trio_infer.models.triton_autocomplete import AutoCompleteConfig
from trio_infer.models.triton_messages import FINAL, InferenceRequest, InferenceResponse, InferenceResponseSender
from trio_infer.models.triton_tensors import Tensor, TritonError

__all__ = ["Model"]

transformers: Any = importlib.import_module("transformers")  # by name: type checkers read this where it isn't installed

INPUTS: Final = (
    {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "stop", "data_type": "TYPE_STRING", "dims": [-1], "optional": True},
)
OUTPUTS: Final = (
    {"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": [1]},
)
DRAWING: Final = ("temperature", "top_k", "top_p", "min_p")
OTHER_DRAWING: Final = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "watermarking_config")
"""What a generation_config.json may say of drawing that isn't done here, so that it is refused."""

LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}
DEFAULT_TOKENS: Final = 1024
"""`max_tokens` where neither the request nor the model says it: contexts have room for hours."""


class Model(BackendModel):
    """Goes on with a text."""

    @staticmethod
    def auto_complete_config(config: AutoCompleteConfig) -> AutoCompleteConfig:
        """Say what it takes and gives: a text, strings that end the answer, and any number of pieces of text."""
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        for each in INPUTS:
            config.add_input(each)
        for each in OUTPUTS:
            config.add_output(each)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer and the weights.

        Raises:
            ModelLoadError: what is missing or wrong in the directory, or can't be done.
        """
        self._check_config(json.loads(args["model_config"]))
        device = self._device(args["model_instance_kind"], args["model_instance_device_id"])
        with self._faults():
            config = transformers.AutoConfig.from_pretrained(self._directory, **LOCAL)
        if config.is_encoder_decoder:
            raise self._fault("it has an encoder and a decoder, and only models that go on with a text can be served")
        with self._faults():
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self._directory, **LOCAL)
        self._model: Any = self._load_weights(config).to(device)
        self._context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        self._longest_token: int = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._config, self._defaults = self._take_defaults()
        # A GPU runs behind Python, which is what takes the time there; a hook stops no more than what is queued next.
        self._hooks = StopHooks(stop_points(self._model, "all" if device == "cpu" else "parts"))

    def execute(self, requests: Sequence[InferenceRequest]) -> None:
        """Answer a request, piece by piece.

        Raises:
            RunCancelled: its client left.
        """
        (request,) = requests
        sender = request.get_response_sender()
        try:
            self._answer(request, sender)
        except InferError as error:
            sender.send(InferenceResponse(error=TritonError(error.message, error.code)), FINAL)

    def finalize(self) -> None:
        """Let go of the weights."""
        self._hooks.remove()
        del self._model

    # ---- loading

    @property
    def _directory(self) -> Path:
        return self.code.version_directory

    def _fault(self, reason: str, file: str = "") -> ModelLoadError:
        return ModelLoadError(self.code.model, reason, where=self._directory / (file or self.code.file.name))

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Make one sentence of what transformers raises, and keep its progress bars out of the server's log."""
        logs = transformers.utils.logging
        shown = logs.is_progress_bar_enabled()
        logs.disable_progress_bar()
        try:
            yield
        except Exception as error:
            text = " ".join(str(error).split())
            if "trust_remote_code" in text:
                text = "it needs code of its own, which would have to be trusted; only transformers' own models are run"
            elif len(text) > 300:
                text = f"{text[:297]}..."
            raise self._fault(f"transformers can't load it: {type(error).__name__}: {text}") from error
        finally:
            if shown:
                logs.enable_progress_bar()

    def _check_config(self, config: dict[str, Any]) -> None:
        """Whether a configuration that was written in full is the one that it must be.

        Raises:
            ModelLoadError: it isn't.
        """
        decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        for kind, must in (("input", INPUTS), ("output", OUTPUTS)):
            names, needed = {each["name"] for each in config[kind]}, {str(each["name"]) for each in must}
            if names != needed:
                raise self._fault(f"its configuration must have the {kind}s {sorted(needed)}, got {sorted(names)}")
        if not decoupled or config["max_batch_size"]:
            raise self._fault("its configuration must have max_batch_size 0 and a `decoupled` transaction policy")

    def _device(self, kind: str, number: str) -> str:
        if kind != "GPU":
            return "cpu"
        count = torch.cuda.device_count()
        if int(number) >= count:
            raise self._fault(f"its instance is to run on GPU {number}, but PyTorch sees {count} GPUs here")
        return f"cuda:{number}"

    def _load_weights(self, config: Any) -> Any:
        load = transformers.AutoModelForCausalLM.from_pretrained
        with self._faults():
            model, report = load(
                self._directory, config=config, dtype="auto", use_safetensors=True, output_loading_info=True, **LOCAL
            )
        missing = sorted(report["missing_keys"])
        if missing:
            raise self._fault(
                f"its files lack {len(missing)} of the weights that a {type(model).__name__} has, such as {missing[0]}"
            )
        return model

    def _take_defaults(self) -> tuple[Any, TextOptions]:
        """What generation_config.json says: the part that `generate` is to do, and the part that is done here.

        Raises:
            ModelLoadError: it wants something that can't be streamed, or isn't done here.
        """
        given = self._model.generation_config
        file = "generation_config.json"
        mode = str(given.get_generation_mode().value)
        if mode not in {"greedy_search", "sample"}:
            raise self._fault(f"it asks for {mode}, whose tokens aren't final when they are made", file)
        for name in OTHER_DRAWING:
            if given.do_sample and getattr(given, name, None) not in (None, 0.0, 1.0):
                raise self._fault(f"`{name}` is not supported; of drawing these are: {', '.join(DRAWING)}", file)
        config = copy.deepcopy(given)
        defaults = TextOptions(
            max_tokens=given.max_new_tokens,
            temperature=_or(given.temperature, 1.0) if given.do_sample else 0.0,
            top_k=_or(given.top_k, 50),  # as in the library
            top_p=_or(given.top_p, 1.0),
            min_p=_or(getattr(given, "min_p", None), 0.0),
            repetition_penalty=_or(given.repetition_penalty, 1.0),
        )
        config.update(do_sample=False, max_length=None, return_dict_in_generate=False, disable_compile=True)
        config.update(**dict.fromkeys((*DRAWING, *OTHER_DRAWING)))
        if config.pad_token_id is None:
            config.pad_token_id = next(iter(_end_tokens(config)), 0)
        self._model.generation_config = config  # which `generate` takes for what isn't given
        return config, defaults

    # ---- answering

    def _answer(self, request: InferenceRequest, sender: InferenceResponseSender) -> None:
        options, tokens = self._read(request)
        room = options.max_tokens or DEFAULT_TOKENS
        if self._context is not None:
            room = min(room, self._context - tokens.shape[1])
        config = copy.deepcopy(self._config)
        config.update(max_new_tokens=room, repetition_penalty=options.repetition_penalty)
        decode = partial(self._tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answer = _Answer(
            TextPieces(decode, tokens[0].tolist(), options.stop),
            ends=_end_tokens(config),
            room=room,
            send=lambda text: sender.send(_response(text)),
            is_cancelled=request.is_cancelled,
        )
        with asking(request.is_cancelled):
            self._model.generate(
                tokens.to(self._model.device),
                attention_mask=torch.ones_like(tokens, device=self._model.device),
                generation_config=config,
                logits_processor=[_Draw(options, self._model.device)] if options.temperature else [],
                stopping_criteria=[answer],
            )
        if request.is_cancelled():
            raise RunCancelled
        sender.send(_response(answer.last, answer.reason), FINAL)

    def _read(self, request: InferenceRequest) -> tuple[TextOptions, Any]:
        """What a request asks for, and the tokens of its prompt [1, n].

        Raises:
            InferError: its text is no text, or too long; or as `read_options`.
        """
        inputs = {tensor.name(): tensor.as_numpy().ravel() for tensor in request.inputs()}
        stops = [*inputs.get("stop", ())]
        options = read_options(json.loads(request.parameters()), stops, self._defaults, self._context)
        try:
            text = inputs["text_input"][0].decode()
        except UnicodeDecodeError as error:
            raise InferError(f"`text_input` must be UTF-8: {error}") from None
        most = None if self._context is None else self._context - 1
        if most is not None and len(text) > most * self._longest_token:  # it needn't be read to tell
            raise InferError(f"`text_input` must have from 1 to {most} tokens, got {len(text)} characters")
        tokens = self._tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
        count = tokens.shape[1]
        if not count or (most is not None and count > most):
            limit = "1 or more tokens" if most is None else f"from 1 to {most} tokens"
            raise InferError(f"`text_input` must have {limit}, to leave room for one of the answer, got {count}")
        return options, tokens.long()


class _Answer:
    """A stopping criterion: called after each token, it passes the text on and says whether it was the last.

    Attributes:
        reason: why it was; "" as long as more are to come.
        last: text that goes with the reason.
    """

    def __init__(
        self,
        pieces: TextPieces,
        *,
        ends: frozenset[int],
        room: int,
        send: Callable[[str], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._pieces = pieces
        self._ends = ends
        self._room = room
        self._send = send
        self._is_cancelled = is_cancelled
        self.reason: str = ""
        self.last: str = ""

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if not self.reason:  # on a GPU, it may be asked once more
            self._take(int(input_ids[0, -1]))
        over = bool(self.reason) or self._is_cancelled()
        return torch.full((input_ids.shape[0],), over, dtype=torch.bool, device=input_ids.device)

    def _take(self, token: int) -> None:
        self._room -= 1
        text = self._pieces.add(token)
        if self._pieces.stopped or token in self._ends:
            self.reason = "stop"
        elif not self._room:
            self.reason = "length"
        if self.reason:
            self.last = text + self._pieces.rest()
            if self._pieces.stopped:  # by the text that was held back
                self.reason = "stop"
        elif text:
            self._send(text)


class _Draw:
    """The last logits processor: leaves only the token that it draws.

    Args:
        options: how.
        device: the model's.
    """

    def __init__(self, options: TextOptions, device: Any) -> None:
        self._random = torch.Generator(device)
        if options.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(options.seed)
        self._warpers: list[Any] = []
        if options.temperature != 1:
            self._warpers.append(transformers.TemperatureLogitsWarper(options.temperature))
        if options.top_k:
            self._warpers.append(transformers.TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            self._warpers.append(transformers.TopPLogitsWarper(options.top_p))
        if options.min_p:
            self._warpers.append(transformers.MinPLogitsWarper(options.min_p))

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        token = torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._random)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def _response(text: str, reason: str = "") -> InferenceResponse:
    outputs = {"text_output": text} | ({"finish_reason": reason} if reason else {})
    return InferenceResponse([Tensor(name, np.array([value.encode()], object)) for name, value in outputs.items()])


def _end_tokens(config: Any) -> frozenset[int]:
    ends = config.eos_token_id
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)


def _or(value: Any, default: float) -> Any:
    return default if value is None else value
