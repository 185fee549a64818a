"""Sampling: text from a trained model, token by token.

Each token is drawn after a forward pass over the whole text so far, or over its last seq_length tokens, the context that the model
was trained with: no cache of keys and values, whose FP8 scales would be those of one token and not of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fp8cfg.training.checkpoint.saver import Diverged
from fp8cfg.training.run_model import RunModel


@torch.no_grad()
def sample(
    run: RunModel,
    prompt: Sequence[int],
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """`tokens` tokens that follow `prompt`, which has at least one, in the precision of `run`.

    A token is drawn from softmax(logits / temperature), of the `top_k` likeliest alone where that is given; a temperature of 0
    takes the likeliest. Tokens from `vocabulary` on, rows that pad the embedding, are never drawn. One seed gives one text, on one
    machine. FP8 state does not move: delayed scaling multiplies by the scales that training left. Raises Diverged for logits that
    are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(run.model.parameters()).device
    text, longest = list(prompt), run.recipe.model.seq_length
    with run.autocast():
        for _ in range(tokens):
            seen = torch.tensor([text[-longest:]], dtype=torch.int64, device=device)
            logits = run.model(seen)[0, -1].float().cpu()[:vocabulary]
            _refuse_not_finite(logits, run.step)
            text.append(_drawn(logits, temperature, top_k, generator))
            yield text[-1]


def _refuse_not_finite(logits: Tensor, step: int) -> None:
    if bad := int((~logits.isfinite()).sum()):
        raise Diverged(
            f"step {step}: {bad} of {len(logits)} logits of the next token are not finite; sample"
            " an earlier checkpoint with --step"
        )


def _drawn(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    chances = ((logits - logits.max()) / temperature).softmax(-1)
    return int(torch.multinomial(chances, 1, generator=generator))
