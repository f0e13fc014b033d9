"""Continue a prompt with a trained model, on one process, from the checkpoint of any mesh."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafour.model.build import Pass
from megafour.model.stage import Stage


@torch.no_grad()
def next_token_logits(stage: Stage, tokens: Tensor) -> Tensor:
    """Logits `[vocab]` of the token after `tokens` `[n]`, n at most the model's sequence length."""
    n = len(tokens)
    cos = None if stage.cos is None else stage.cos[:n]
    sin = None if stage.sin is None else stage.sin[:n]
    assert stage.decoder.head is not None
    hidden = stage.decoder.hidden(tokens[None, :], Pass(cos=cos, sin=sin), stage.positions[:n, None])
    return stage.decoder.head.logits(hidden[-1:])[0, 0, : stage.build.vocab_size]


def generate(stage: Stage, prompt: list[int], max_tokens: int, *, temperature: float = 1.0, top_k: int = 0,
             seed: int = 0, stop: int | None = None) -> Iterator[int]:
    """Yield up to `max_tokens` token ids after a prompt of at least one.

    `temperature` 0 takes the likeliest token; `top_k` > 0 samples among that many; `stop` ends the text. The context is
    the last `seq_length` tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(prompt, dtype=torch.int64)
    limit = len(stage.build.positions)
    for _ in range(max_tokens):
        logits = next_token_logits(stage, tokens[-limit:]).float()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            if top_k > 0:
                floor = logits.topk(min(top_k, len(logits))).values[-1]
                logits = logits.masked_fill(logits < floor, float("-inf"))
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token == stop:
            return
        yield token
        tokens = torch.cat([tokens, torch.tensor([token])])
