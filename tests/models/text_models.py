"""A small language model with random weights, and a tokenizer for it, as files of a model repository."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SENTENCES = (
    "The client left, and the work stopped at once.",
    "Whoever waits for a token waits no longer than a token takes.",
    "Grüße aus Köln, 東京 und 🍵 in Kraków: naïve café — ça va?",
    "def stop(): return is_cancelled()",
)


def make_text_model(
    directory: Path, *, context: int = 256, width: int = 64, layers: int = 3, **generation: Any
) -> Path:
    """Write a version directory.

    Args:
        directory: to make.
        context: in tokens.
        width, layers: the model's size.
        generation: what its generation_config.json says.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, **generation)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@cache
def make_tokenizer() -> Any:
    """Byte-level pairs, of which some characters have several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    text = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in text.items() if value is not None}))
