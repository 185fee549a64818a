"""Decoder-only Transformer model: token ids in, loss or logits out.

Build it without memory, then give it some:

    with torch.device("meta"):
        model = Transformer(config)
    model.to(torch.bfloat16).to_empty(device="cuda")
    model.init_weights(1234)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8cfg.models.attention import (
    CoreAttention,
    SelfAttention,
    additive,
    hidden_from,
    rotary_tables,
)
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.cross_entropy import VocabularyPart, cross_entropy
from fp8cfg.models.norms import RMSNorm, norm
from fp8cfg.models.recompute import discarded, keep_products, recomputed
from fp8cfg.models.weight_init import TensorShard, fill_first, local_parts


class MLP(nn.Module):
    """`linear_fc2` of the activation of `linear_fc1`, which under swiglu and geglu holds the gate's rows and then the up
    projection's. GELU is the tanh approximation, as in Gemma, GPT-2 and Transformer Engine's kernels. Unless `recompute` is
    "full" nothing is kept between the activation's input and output, as in Megatron's fused kernels."""

    def __init__(self, config: TransformerConfig, recompute: str = "none") -> None:
        super().__init__()
        self.activation, self.recompute = config.activation, recompute
        self.linear_fc1 = nn.Linear(
            config.hidden_size, config.fc1_size, bias=config.add_bias_linear
        )
        self.linear_fc2 = nn.Linear(
            config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear
        )

    def forward(self, x: Tensor) -> Tensor:
        up = self.linear_fc1(x)
        if self.recompute == "full":
            activated = self._activated(up)
        else:
            activated = recomputed(self._activated, None, up)
        with discarded(activated) if self.recompute == "selective" else nullcontext():
            down: Tensor = self.linear_fc2(activated)
        return down

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "squared_relu":
            return F.relu(x).square()
        if self.activation == "gelu":
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, dim=-1)
        return (
            F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate="tanh")
        ) * up


class TransformerLayer(nn.Module):
    """Attention and MLP, each between norms and added to the residual stream: [B, T, D] -> [B, T, D]. `layer` is its number from 0.

    A norm stands before each (pre), after each (post, OLMo 2) or both (Gemma 2). `mask` is that of CoreAttention, or nothing;
    `packed` says that it may keep documents apart, and that positions may differ between samples; `recompute` is the model's. Norms
    keep their input alone, unless the whole layer is computed again. `enter`, where tensor parallelism sets it,
    makes the input of attention and MLP of what stands before them."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int = 0,
        packed: bool = False,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        self.config, self.placement, self.packed, self.recompute = (
            config,
            config.layernorm_placement,
            packed,
            recompute,
        )
        self.selective = recompute == "selective"
        self.enter: Callable[[Tensor], Tensor] | None = None
        before, after = self.placement != "post", self.placement != "pre"
        if before:
            self.input_layernorm = norm(config)
        self.self_attention = SelfAttention(config, layer, self.selective)
        if after:
            self.post_self_attn_layernorm = norm(config)
        if before:
            self.pre_mlp_layernorm = norm(config)
        self.mlp = MLP(config, recompute)
        if after:
            self.post_mlp_layernorm = norm(config)
        attention, mlp = self.self_attention, self.mlp
        for linear in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
            # Instead of a quantized copy: inputs are made again, or are kept as attention's output.
            linear.keeps_input = self.selective  # type: ignore[assignment]

    @property
    def takes_mask(self) -> bool:
        """Whether a call may bring a mask: attention that stands in the place of CoreAttention takes none."""
        return type(self.self_attention.core_attention) is CoreAttention

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor) -> Tensor:
        if self.selective and torch.compiler.is_compiling() and torch.is_grad_enabled():
            y: Tensor = checkpoint(
                self._residual_stream,
                x,
                cos,
                sin,
                *mask,
                use_reentrant=False,
                context_fn=keep_products,
            )
            return y
        return self._residual_stream(x, cos, sin, *mask)

    def _residual_stream(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor
    ) -> Tensor:
        before, after = self.placement != "post", self.placement != "pre"
        y = self._computed(
            self.self_attention, self.input_layernorm if before else None, x, cos, sin, *mask
        )
        x = x + (self._normed(self.post_self_attn_layernorm, y) if after else y)
        y = self._computed(self.mlp, self.pre_mlp_layernorm if before else None, x)
        x = x + (self._normed(self.post_mlp_layernorm, y) if after else y)
        return x

    def _computed(
        self, module: nn.Module, norm: nn.Module | None, x: Tensor, *more: Tensor | None
    ) -> Tensor:
        """`module` of the residual stream, which goes through `norm` before."""
        y = x if norm is None else self._normed(norm, x)
        read = y if self.enter is None else self.enter(y)
        if not self.selective:
            return module(read, *more)  # type: ignore[no-any-return]
        with discarded(y, self.enter, read):
            return module(read, *more)  # type: ignore[no-any-return]

    def _normed(self, norm: nn.Module, y: Tensor) -> Tensor:
        # A norm of another library keeps no more than its input by itself.
        keeps_more = self.recompute == "none" and isinstance(norm, RMSNorm)
        if self.selective or keeps_more:
            return recomputed(norm, norm, y)
        return norm(y)  # type: ignore[no-any-return]


def positions_within(documents: Tensor) -> Tensor:
    """The places, int64 [B, T], of tokens in their documents, of which `documents` [B, T] are the numbers. The first of a sample is
    at 0, also where its document began before (Megatron's `_get_ltor_masks_and_position_ids`)."""
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.where(documents[:, 1:] != documents[:, :-1], places[1:], 0)
    return places - F.pad(begins, (1, 0)).cummax(1).values


class Transformer(nn.Module):
    """A decoder-only language model, of the family that `config` describes.

    `recompute` is Megatron's `recompute_granularity`: under "full" each layer keeps only its input, and its forward pass is
    computed again in the backward pass; "selective" keeps no input of a product that norms and activation functions give, and no
    matrix of scores (recompute.py). Norms and activation functions keep nothing but their input under "none" too.

    `reset_attention_mask` and `reset_position_ids` are Megatron's: attention stays inside of each document of a sample, and
    positions begin anew with each.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        recompute: str = "none",
        reset_attention_mask: bool = False,
        reset_position_ids: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.reset_attention_mask, self.reset_position_ids = (
            reset_attention_mask,
            reset_position_ids,
        )
        self.recompute, self.draws = recompute, False
        # this rank's place among those that share each matrix, a parallel.tensor.TensorRank
        self.tensor_parallel: Any = None
        self.vocabulary_part: VocabularyPart | None = (
            None  # of which the output layer makes logits, where that is split
        )
        self.shards: dict[str, TensorShard] = {}  # what it has of the parameters that are split
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.position_embedding = nn.Embedding(config.learned_positions, config.hidden_size)
        packed = reset_attention_mask or reset_position_ids
        self.layers = nn.ModuleList(
            TransformerLayer(config, layer, packed, recompute) for layer in range(config.num_layers)
        )
        self.final_layernorm = norm(config)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output_layer.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Mean cross entropy of `targets` (float32, 0-d), or logits [B, T, vocab_size] where there are none.

        `tokens` and `targets` are int64 [B, T]; `targets[b, t]` is the token that follows `tokens[b, t]`, and a target
        of -100 is left out of the mean, which is 0 where all of them are. `documents`, integers [B, T], number the document
        that each token is of, never less than the one before in its sample; without them a sample is one document.
        `positions`, int64 [T], are the tokens' places in their sequence, by default 0 to T - 1. The logits have the dtype of the
        output layer; the loss upcasts them, many tokens by chunks (cross_entropy.py).
        """
        positions = (
            torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        )
        if (
            documents is None
            and targets is not None
            and (self.reset_attention_mask or self.reset_position_ids)
        ):
            raise ValueError(
                "the model tells documents apart: call model(tokens, targets, documents), the"
                " tensors of a batch"
            )
        positions = self.places(positions, documents)
        return self.head(
            self.run_layers(
                self.embed(tokens, positions), positions, documents, [*enumerate(self.layers)]
            ),
            targets,
        )

    def places(self, positions: Tensor, documents: Tensor | None) -> Tensor:
        """Positions of tokens in their sequence, or, where these begin anew with each of `documents`, in their document [B, T]."""
        return (
            positions_within(documents)
            if documents is not None and self.reset_position_ids
            else positions
        )

    def run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        layers: Sequence[tuple[int, nn.Module]],
    ) -> Tensor:
        """The residual stream [B, T, D] after `layers`, each with its number in the model."""
        tables = self._tables(positions)
        masks = self._masks(
            layers, positions.shape[-1], x, documents if self.reset_attention_mask else None
        )
        for (number, layer), mask in zip(layers, masks, strict=True):
            # No bool for an index: Dynamo of torch 2.11 takes none (TypeError), that of 2.13 does.
            cos, sin = tables[0 if self.config.window(number) is None else 1]
            if self.recompute == "full" and torch.is_grad_enabled():
                # The second forward draws again what adapters with dropout drew; others draw nothing.
                x = checkpoint(
                    layer, x, cos, sin, *mask, use_reentrant=False, preserve_rng_state=self.draws
                )
            else:
                x = layer(x, cos, sin, *mask)
        return x

    def head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """As `forward`, of the residual stream after the last layer."""
        logits: Tensor = self.output_layer(self.final_layernorm(x))
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = (logits / cap).tanh() * cap
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), self.vocabulary_part)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The residual stream [B, T, D] before the first layer."""
        x: Tensor = self.embedding(tokens)
        if (
            self.config.scale_embeddings
        ):  # by a factor that is rounded to the dtype of `x`, as Gemma was trained
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

    def _masks(
        self,
        layers: Sequence[tuple[int, nn.Module]],
        length: int,
        x: Tensor,
        documents: Tensor | None,
    ) -> list[tuple[Tensor, ...]]:
        """The mask of attention of each of `layers` over the residual stream `x`, made once for all layers whose mask it is; none
        where attention does without."""
        apart = (
            None
            if documents is None
            else documents[:, None, :, None] != documents[:, None, None, :]
        )
        made: dict[int | None, tuple[Tensor, ...]] = {}
        if apart is None and self.config.attn_logit_softcapping is None:
            made[None] = ()  # causal
        for number, layer in layers:
            if layer.takes_mask and (window := self._window(number, length)) not in made:
                hidden = hidden_from(length, length, window, x.device)
                made[window] = (additive(hidden if apart is None else hidden | apart, x.dtype),)
        return [
            made[self._window(number, length)] if layer.takes_mask else ()
            for number, layer in layers
        ]

    def _window(self, layer: int, length: int) -> int | None:
        """The sliding window of a layer, None where a sequence is not longer."""
        window = self.config.window(layer)
        return window if window is not None and window < length else None

    @torch.no_grad()
    def init_weights(self, seed: int, device: str = "cpu") -> None:
        """Fill every parameter, or this rank's part of it, as `weight_init.fill_first` says. Values are drawn in float32 on
        `device` from the seed, the parameter's name and the place in it: one seed gives one model, whatever device and dtype
        the parameters have and however they are split over ranks."""
        for name, parameter in self.named_parameters():
            shard = self.shards.get(name)
            columns = parameter.shape[-1] * (shard.ranks if shard and shard.dim == 1 else 1)
            for part, first in local_parts(parameter, shard):
                fill_first(part, name, self.config, seed, columns, first, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Leaving the meta device makes new Parameters, one per module: a tied weight would come back as two.
        # A pipeline stage has one of the two, or none, where it does not have both.
        both = self.output_layer is not None and self.embedding is not None
        tied = both and self.output_layer.weight is self.embedding.weight
        super()._apply(fn, recurse)
        if tied:
            self.output_layer.weight = self.embedding.weight
        return self
