"""Models that are not ours, for tests of their conversion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.backends import registry
from fp8cfg.schema.recipe import Recipe

BACKENDS = [
    "native",
    pytest.param(
        "torchao",
        marks=pytest.mark.skipif(
            bool(registry.rules("torchao").unavailable()), reason="torchao is not installed"
        ),
    ),
]
WORDS = (
    "precision=bf16_fp8_current",
    "fp8.params=false",
    "fp8.high_precision_at_start=0",
    "fp8.high_precision_at_end=0",
    "trainer.accelerator=cpu",
)
DELAYED = ("precision=bf16_fp8", "fp8.params=false", "fp8.amax_history_len=4")
FP8 = {"e4m3xe4m3", "e5m2xe4m3"}


def recipe(*words: str, backend: str = "native") -> Recipe:
    return fp8cfg.compose([*WORDS, f"backend={backend}", *words])


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A tied, partly frozen model whose first linear layer is an odd one."""

    def __init__(self, name: str = "h") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.name = nn.Linear(64, 10), name
        self.embedding = nn.Embedding(48, 64)
        self.add_module(name, nn.ModuleList(Block() for _ in range(4)))
        self.own, self.norm = Doubled(64, 64), nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, add_zero_attn=True)
        self.lm_head = nn.Linear(64, 48, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.stack()[1].requires_grad_(False)
        self.stack()[2].eval()

    def stack(self) -> Any:
        return getattr(self, self.name)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.stack():
            x = block(x)
        x = self.own(self.norm(x + self.attention(x, x, x)[0]))
        x = x + self.gate(x).mean()
        logits = self.lm_head(x)
        return (
            logits
            if targets is None
            else nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        )


TOKENS = torch.arange(64).reshape(2, 32) % 48


def loss_of(model: nn.Module) -> Tensor:
    return model(TOKENS, TOKENS)


REASONS = {
    "gate": "out_features=10 is not a multiple of 16",
    "own": "Doubled has its own forward",
    "lm_head": "fp8.output_layer=false",
    "attention.out_proj": "nn.MultiheadAttention multiplies its weight itself",
}


def transformers_lm(name: str, **shape: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")

    class LM(nn.Module):
        """Of transformers, with a linear layer more."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lm = getattr(
                transformers, f"{name}ForCausalLM" if name == "Llama" else f"{name}LMHeadModel"
            )(
                getattr(transformers, f"{name}Config")(
                    vocab_size=64, bos_token_id=0, eos_token_id=0, **shape
                )
            )
            self.extra = nn.Linear(64, 64)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            x = self.lm.base_model(tokens).last_hidden_state
            return nn.functional.cross_entropy(
                self.lm.lm_head(x + self.extra(x)).float().flatten(0, 1), targets.flatten()
            )

    return LM()
