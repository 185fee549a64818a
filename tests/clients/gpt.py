"""A small GPT in the shape of nanoGPT's, and what differs in the others: the class of its linear layers, the name of its head, ties."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg import data

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH, STEPS = 128, 32, 2, 2, 32, 8, 30


class CastingLinear(nn.Linear):
    """nanochat's: master weights in float32, cast to the activations' dtype in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            x,
            self.weight.to(dtype=x.dtype),
            self.bias.to(dtype=x.dtype) if self.bias is not None else None,
        )


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            y.view(b, t, HEADS, -1).transpose(1, 2)
            for y in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        )
        x = x + self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(b, t, WIDTH)
        )
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """Logits and loss, as nanoGPT's and minGPT's forward returns them."""

    def __init__(
        self, linear: type[nn.Linear] = nn.Linear, head: str = "lm_head", tied: bool = True
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(linear) for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), head
        setattr(self, head, linear(WIDTH, VOCABULARY, bias=False))
        self.apply(self._init)
        if tied:
            getattr(self, head).weight = self.wte.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = getattr(self, self.head)(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


@functools.cache
def _text() -> Tensor:
    return torch.tensor(
        [min(b, VOCABULARY - 1) for b in (Path(data.__file__).parent / "tiny.txt").read_bytes()]
    )


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, or a rank's share of them."""
    starts = torch.randint(
        len(_text()) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step)
    )
    rows = torch.stack([_text()[s : s + LENGTH + 1] for s in starts])[rank::ranks]
    return rows[:, :-1], rows[:, 1:]
