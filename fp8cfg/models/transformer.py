"""Decoder-only Transformer model: token ids in, loss or logits out.

Build it without memory, then give it some:

    with torch.device("meta"):
        model = Transformer(config)
    model.to(torch.bfloat16).to_empty(device="cuda")
    model.init_weights(1234)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.layers import TransformerLayer
from fp8cfg.models.norms import norm
from fp8cfg.models.rotary import rotary_tables
from fp8cfg.models.tensor_shard import TensorShard
from fp8cfg.models.weight_init import draw_normal, local_parts

RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


class Transformer(nn.Module):
    """A decoder-only language model, of the family that `config` describes.

    `recompute` is Megatron's `recompute_granularity=full`: each layer keeps only its input, and its forward pass is
    computed again in the backward pass.
    """

    def __init__(self, config: TransformerConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.recompute, self.draws = recompute, False
        self.tensor_parallel: Any = None  # this rank's place among those that share each matrix, a parallel.tensor.TensorRank
        self.shards: dict[str, TensorShard] = {}  # what it has of the parameters that are split
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.position_embedding = nn.Embedding(config.learned_positions, config.hidden_size)
        self.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in range(config.num_layers))
        self.final_layernorm = norm(config)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output_layer.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Mean cross entropy of `targets` (float32, 0-d), or logits [B, T, vocab_size] where there are none.

        `tokens` and `targets` are int64 [B, T]; `targets[b, t]` is the token that follows `tokens[b, t]`, and a target
        of -100 is left out of the mean, which is 0 where all of them are. `positions`, int64 [T], are the tokens' places in their
        sequence, by default 0 to T - 1. The logits have the dtype of the output layer; the loss upcasts them.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self._embedded(tokens, positions)
        tables = self._tables(positions)
        for number, layer in enumerate(self.layers):
            # No bool for an index: Dynamo of torch 2.11 takes none (TypeError), that of 2.13 does.
            cos, sin = tables[0 if self.config.window(number) is None else 1]
            if self.recompute and torch.is_grad_enabled():
                # The second forward draws again what adapters with dropout drew; others draw nothing.
                x = checkpoint(layer, x, cos, sin, use_reentrant=False, preserve_rng_state=self.draws)
            else:
                x = layer(x, cos, sin)
        logits: Tensor = self.output_layer(self.final_layernorm(x))
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = (logits / cap).tanh() * cap
        if targets is None:
            return logits
        return self.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over `targets` [tokens], those that are -100 left out, of float32 `logits` [tokens, vocab_size]; 0 where all
        are. Tensor parallelism has another for parts of the vocabulary."""
        return F.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum().clamp(min=1)

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.config.scale_embeddings:  # by a factor that is rounded to the dtype of `x`, as Gemma was trained
            x = x * torch.full((), self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)
        if self.config.learned_positions:
            x = x + self.position_embedding(positions)
        return x

    def _tables(self, positions: Tensor) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
        """The rotary tables of layers with full attention, and of those with a sliding window."""
        if self.config.position_embedding_type != "rope":
            return (None, None), (None, None)
        full = rotary_tables(self.config, positions)
        if self.config.rotary_base_local is None:
            return full, full
        return full, rotary_tables(self.config, positions, local=True)

    @torch.no_grad()
    def init_weights(self, seed: int, device: str = "cpu") -> None:
        """Fill every parameter, or this rank's part of it: norms so that they multiply by 1, biases with 0, weights from normal(0,
        init_std), as Megatron.

        Layers that write into the residual stream are scaled by 1 / sqrt(2 * num_layers), so that its variance does not grow with
        depth. Values are drawn in float32 on `device` from the seed, the parameter's name and the place in it (weight_init.py): one
        seed gives one model, whatever device and dtype the parameters have and however they are split over ranks.
        """
        for name, parameter in self.named_parameters():
            shard = self.shards.get(name)
            columns = parameter.shape[-1] * (shard.ranks if shard and shard.dim == 1 else 1)
            for part, first in local_parts(parameter, shard):
                if part.dim() == 1:
                    part.fill_(0.0 if name.endswith(".bias") or self.config.layernorm_zero_centered_gamma else 1.0)
                else:
                    draw_normal(part, self._init_std(name), seed, name, columns, (first[0], first[1]), device)

    def _init_std(self, name: str) -> float:
        if name.endswith(RESIDUAL_OUTPUTS):
            return self.config.init_std / math.sqrt(2 * self.config.num_layers)
        return self.config.init_std

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Leaving the meta device makes new Parameters, one per module: a tied weight would come back as two.
        tied = self.output_layer.weight is self.embedding.weight
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tied:
            self.output_layer.weight = self.embedding.weight
        return self
