"""Trains the weights of the packaged language model, `scribe`: some twenty minutes on two cores.

    apt-get install bible-kjv && pip install torch numpy
    PYTHONPATH=src python bench/language_model/train.py src/trio_infer/models/packaged/scribe/weights.npz

The text is the Bible in the translation of 1611, whose copyright has expired: 4.2 MB of English, from Debian's package
`bible-kjv`. The last tenth is kept back to validate on. Prints the loss in bits a byte, which can be compared between
vocabularies; the same seed gives the same weights on the same machine and torch.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trio_infer.models.packaged.scribe.tokens import Vocabulary, words

MERGES = 768
WIDTH = 160
LAYERS = 4
HEADS = 4
CONTEXT = 256


def text() -> bytes:
    """The text without its verse numbers, a paragraph for each chapter."""
    printed = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], check=True, capture_output=True, text=True).stdout
    chapters: dict[str, list[str]] = {}
    for line in printed.splitlines():
        place, _, verse = line.partition(" ")
        chapters.setdefault(place.partition(":")[0], []).append(re.sub(r"[{}]", "", verse).strip())
    return "\n".join(" ".join(verses) for verses in chapters.values()).encode()


def learn_merges(source: bytes, count: int) -> list[tuple[int, int]]:
    """Byte pairs by how often they come, each in the text that the merges before it have left."""
    counted = Counter(words(source))
    spelled = [(list(word), number) for word, number in counted.items()]
    merges: list[tuple[int, int]] = []
    for _ in range(count):
        pairs: Counter[tuple[int, int]] = Counter()
        for tokens, number in spelled:
            for pair in pairwise(tokens):
                pairs[pair] += number
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        new = 256 + len(merges)
        merges.append(best)
        for tokens, _ in spelled:
            at = 0
            while at < len(tokens) - 1:
                if (tokens[at], tokens[at + 1]) == best:
                    tokens[at : at + 2] = [new]
                at += 1
    return merges


class Block(nn.Module):
    """Attention over what came before, then a hidden layer of four times the width; no biases anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm1 = nn.Parameter(torch.ones(WIDTH))
        self.norm2 = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(norm(x) * self.norm1).split(WIDTH, 2)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.relu(self.up(norm(x) * self.norm2)).square())


def norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (WIDTH,), eps=1e-5)


class Transformer(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.Parameter(torch.ones(WIDTH))
        for name, weights in self.named_parameters():
            if weights.ndim == 2:
                depth = math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(weights, std=0.02 / depth)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return (norm(x) * self.last) @ self.tokens.weight.T


def validate(model: Transformer, held: torch.Tensor) -> float:
    """Nats a token."""
    with torch.no_grad():
        rows = held[: len(held) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        losses = [
            functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            for part in rows.split(32)
        ]
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="the file to write")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=25.0, help="stop after so long; the rate falls accordingly")
    args = parser.parse_args()
    torch.manual_seed(0)
    source = text()
    merges = learn_merges(source, MERGES)
    vocabulary = Vocabulary(merges)
    tokens = torch.tensor(vocabulary.encode(source))
    split = len(tokens) * 9 // 10
    train, held = tokens[:split], tokens[split:]
    bytes_a_token = len(source) / len(tokens)
    model = Transformer(len(vocabulary.pieces))
    size = sum(weights.numel() for weights in model.parameters())
    print(f"{len(source):,} bytes, {len(tokens):,} tokens, {size:,} weights", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    began = time.monotonic()
    step, progress = 0, 0.0
    while progress < 1:
        progress = max(step / args.steps, (time.monotonic() - began) / 60 / args.minutes)
        rate = min(step / 50, 1.0) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate
        starts = torch.randint(len(train) - CONTEXT - 1, (16,))
        batch = torch.stack([train[start : start + CONTEXT + 1] for start in starts.tolist()])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or progress >= 1:
            bits = validate(model, held) / math.log(2) / bytes_a_token
            print(
                f"step {step}: {float(loss):.3f} nats, {bits:.3f} bits a byte, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            save(args.weights, model, merges)
        step += 1


def save(path: str, model: Transformer, merges: list[tuple[int, int]]) -> None:
    arrays = {name.replace(".weight", ""): weights.detach().numpy() for name, weights in model.named_parameters()}
    halves = {name: array.astype(np.float16) for name, array in arrays.items()}
    np.savez_compressed(path, merges=np.array(merges, np.uint16), heads=np.uint8(HEADS), **halves)


if __name__ == "__main__":
    main()
