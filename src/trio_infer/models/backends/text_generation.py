"""Text generation with Hugging Face transformers: a prompt in, its continuation out token by token, until nobody reads.

A version directory is a model directory as `save_pretrained` writes it. Nothing is downloaded, and no code that lies in
it is run: what needs either is refused when it loads.

How a generation stops. transformers asks its stopping criteria after each token; ours passes the token's text on, and
says that it was the last when the answer is complete, or when nobody wants it. That alone would let a prompt of 1,800
tokens go through the model to its end, as the first token comes after it; so the model has hooks, too (`torch_hooks`),
which leave the run between two modules, in the prompt or in a token. Measured with such a prompt and 8 layers of width
512 (a prompt takes 550 ms, a token 7): without hooks the work goes on for 347 ms at the median, with them for 4.2 ms.

How tokens are drawn. transformers draws from torch's random numbers, which all threads of a process share: with two
generations at a time, or one that was cancelled before, a seed would mean nothing. So it is told to take the likeliest
token, and the last of its logits processors leaves only one: the one drawn by the request's own generator, from the
same probabilities and in the same way. With the same seed that is, token by token, what `generate` draws by itself.

What this doesn't do: several prompts in one forward pass. Generations end at different times, and a batch that is made
when they begin holds the short ones' places to the end of the longest; a token loop (`token_model`) is what that needs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from trio_infer.errors import InferError, ModelLoadError, RunCancelled
from trio_infer.models.backends import BackendModel
from trio_infer.models.backends.text_loading import TextModel, load_text_model, transformers
from trio_infer.models.backends.text_options import TextOptions, read_options
from trio_infer.models.backends.text_pieces import TextPieces
from trio_infer.models.backends.torch_hooks import StopHooks, asking, stop_points, torch
from trio_infer.models.triton_autocomplete import AutoCompleteConfig
from trio_infer.models.triton_messages import FINAL, InferenceRequest, InferenceResponse, InferenceResponseSender
from trio_infer.models.triton_tensors import Tensor, TritonError

__all__ = ["Model"]

INPUTS: Final = (
    {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "stop", "data_type": "TYPE_STRING", "dims": [-1], "optional": True},
)
OUTPUTS: Final = (
    {"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": [1]},
)
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
        self._text: TextModel = load_text_model(self.code, device)
        # A GPU runs behind Python, which is what takes the time there; a hook stops no more than what is queued next.
        self._hooks = StopHooks(stop_points(self._text.network, "all" if device == "cpu" else "parts"))

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
        del self._text

    def _fault(self, reason: str) -> ModelLoadError:
        return ModelLoadError(self.code.model, reason, where=self.code.file)

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

    def _answer(self, request: InferenceRequest, sender: InferenceResponseSender) -> None:
        text = self._text
        options, tokens = self._read(request)
        room = options.max_tokens or DEFAULT_TOKENS
        if text.context is not None:
            room = min(room, text.context - tokens.shape[1])
        config = copy.deepcopy(text.config)
        config.update(max_new_tokens=room, repetition_penalty=options.repetition_penalty)
        decode = partial(text.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answer = _Answer(
            TextPieces(decode, tokens[0].tolist(), options.stop),
            ends=text.ends,
            send=lambda piece: sender.send(_response(piece)),
            is_cancelled=request.is_cancelled,
        )
        device = text.network.device
        with asking(request.is_cancelled):
            text.network.generate(
                tokens.to(device),
                attention_mask=torch.ones_like(tokens, device=device),
                generation_config=config,
                logits_processor=[_Draw(options, device)] if options.temperature else [],
                stopping_criteria=[answer],
            )
        if request.is_cancelled():
            raise RunCancelled
        sender.send(_response(*answer.last()), FINAL)

    def _read(self, request: InferenceRequest) -> tuple[TextOptions, Any]:
        """What a request asks for, and the tokens of its prompt [1, n].

        Raises:
            InferError: its text is no text, or too long; or as `read_options`.
        """
        text = self._text
        inputs = {tensor.name(): tensor.as_numpy().ravel() for tensor in request.inputs()}
        stops = [*inputs.get("stop", ())]
        options = read_options(json.loads(request.parameters()), stops, text.defaults, text.context)
        try:
            prompt = inputs["text_input"][0].decode()
        except UnicodeDecodeError as error:
            raise InferError(f"`text_input` must be UTF-8: {error}") from None
        most = None if text.context is None else text.context - 1
        if most is not None and len(prompt) > most * text.longest_token:  # it needn't be read to tell
            raise InferError(f"`text_input` must have from 1 to {most} tokens, got {len(prompt)} characters")
        tokens = text.tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
        count = tokens.shape[1]
        if not count or (most is not None and count > most):
            limit = "1 or more tokens" if most is None else f"from 1 to {most} tokens"
            raise InferError(f"`text_input` must have {limit}, to leave room for one of the answer, got {count}")
        return options, tokens.long()


class _Answer:
    """A stopping criterion: called after each token, it passes the text on and says whether that was all.

    It is one of several: the library has its own for the number of tokens, and for what else a generation_config.json
    says.
    """

    def __init__(
        self,
        pieces: TextPieces,
        *,
        ends: frozenset[int],
        send: Callable[[str], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._pieces = pieces
        self._ends = ends
        self._send = send
        self._is_cancelled = is_cancelled
        self._waiting = ""  # the newest piece, which goes out with the reason if it is the last
        self._over = False

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if not self._over:  # on a GPU, it may be asked once more
            self._take(int(input_ids[0, -1]))
        over = self._over or self._is_cancelled()
        return torch.full((input_ids.shape[0],), over, dtype=torch.bool, device=input_ids.device)

    def _take(self, token: int) -> None:
        text = self._pieces.add(token)
        self._over = self._pieces.stopped or token in self._ends
        if text and not self._over:
            self._send(text)
        else:
            self._waiting = text

    def last(self) -> tuple[str, str]:
        """The last piece, and why it is the last."""
        text = self._waiting + self._pieces.rest()
        return text, "stop" if self._over or self._pieces.stopped else "length"


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
