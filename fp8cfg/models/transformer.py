"""Decoder-only Transformer model: token ids in, loss or logits out.

Build it on the meta device, then allocate memory and initialize the weights:

    with torch.device("meta"):
        model = Transformer(config)
    model.to(torch.bfloat16).to_empty(device="cuda")
    model.init_weights(1234)

Shape letters: B batch, T tokens, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8cfg.models.attention import (
    CoreAttention,
    SelfAttention,
    additive_mask,
    causal_mask,
    rotary_tables,
)
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.cross_entropy import VocabularyPart, cross_entropy
from fp8cfg.models.norms import RMSNorm, build_norm
from fp8cfg.models.recompute import discard_output, keep_gemm_outputs, recompute_in_backward
from fp8cfg.models.weight_init import TensorShard, init_parameter, local_parts


class Transformer(nn.Module):
    """Decoder-only language model. `config` selects the family.

    Attributes:
        tensor_parallel: This rank's place among the tensor-parallel ranks, a
            parallel.tensor.TensorRank, or None.
        vocabulary_part: This rank's part of the vocabulary if the output layer is split, or None.
        shards: This rank's part of each parameter that is split, by name.
        draws: Whether layers draw random numbers (dropout of adapters).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        recompute: str = "none",
        reset_attention_mask: bool = False,
        reset_position_ids: bool = False,
    ) -> None:
        """Builds the model with uninitialized weights.

        Args:
            config: The shapes.
            recompute: Megatron's recompute_granularity. "full" keeps only the input of each layer
                and repeats its forward pass in the backward pass. "selective" keeps no outputs of
                norms and activation functions, and no attention scores (recompute.py). "none" keeps
                the inputs of GEMMs.
            reset_attention_mask: Whether attention stays inside each document of a sample.
            reset_position_ids: Whether positions restart at 0 with each document.
        """
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.reset_attention_mask = reset_attention_mask
        self.reset_position_ids = reset_position_ids
        self.draws = False
        self.tensor_parallel: Any = None
        self.vocabulary_part: VocabularyPart | None = None
        self.shards: dict[str, TensorShard] = {}

        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.position_embedding = nn.Embedding(config.learned_positions, config.hidden_size)
        packed = reset_attention_mask or reset_position_ids
        self.layers = nn.ModuleList(
            TransformerLayer(config, layer, packed, recompute) for layer in range(config.num_layers)
        )
        self.final_layernorm = build_norm(config)
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
        """Computes the loss, or the logits if there are no targets.

        Args:
            tokens: Token ids, int64 [B, T].
            targets: The token after each token, int64 [B, T]. Targets of -100 are ignored.
            documents: Number of the document of each token, integers [B, T], ascending in a sample.
                By default a sample is one document.
            positions: Positions of the tokens in the sequence, int64 [T]. Default 0 to T - 1.

        Returns:
            Mean cross entropy, float32 [], 0 if all targets are ignored. Without targets logits
            [B, T, vocab_size] in the dtype of the output layer.

        Raises:
            ValueError: The model separates documents, but `documents` is None.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        separates_documents = self.reset_attention_mask or self.reset_position_ids
        if separates_documents and targets is not None and documents is None:
            raise ValueError(
                "documents=None: the model separates documents; call model(tokens, targets,"
                " documents) with the tensors of a batch"
            )
        positions = self.token_positions(positions, documents)
        x = self.embed(tokens, positions)
        x = self.run_layers(x, positions, documents, list(enumerate(self.layers)))
        return self.head(x, targets)

    def token_positions(self, positions: Tensor, documents: Tensor | None) -> Tensor:
        """Returns the positions for embeddings and rotary tables.

        Args:
            positions: Positions in the sequence, int64 [T].
            documents: See `forward`.

        Returns:
            `positions`, or positions in each document, int64 [B, T], if these restart.
        """
        if documents is not None and self.reset_position_ids:
            return positions_in_documents(documents)
        return positions

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the residual stream before the first layer, [B, T, D].

        Args:
            tokens: Token ids, int64 [B, T].
            positions: From `token_positions`.
        """
        x: Tensor = self.embedding(tokens)
        if self.config.scale_embeddings:
            # Gemma was trained with a factor rounded to the dtype of the embedding.
            factor = self.config.hidden_size**0.5
            x = x * torch.full((), factor, dtype=x.dtype, device=x.device)
        if self.config.learned_positions:
            x = x + self.position_embedding(positions)
        return x

    def run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        layers: Sequence[tuple[int, nn.Module]],
    ) -> Tensor:
        """Runs the layers of the model or of a pipeline stage.

        Args:
            x: The residual stream, [B, T, D].
            positions: From `token_positions`.
            documents: See `forward`.
            layers: Each layer with its number in the model.

        Returns:
            The residual stream after the layers, [B, T, D].
        """
        tables = self._rotary_tables(positions)
        if not self.reset_attention_mask:
            documents = None
        masks = self._attention_masks(layers, positions.shape[-1], x, documents)
        for (number, layer), mask in zip(layers, masks, strict=True):
            # An int as the index: Dynamo of torch 2.11 raises TypeError for a bool, 2.13 does not.
            is_windowed = 0 if self.config.window(number) is None else 1
            cos, sin = tables[is_windowed]
            if self.recompute == "full" and torch.is_grad_enabled():
                # Only dropout of adapters draws random numbers, which the second forward pass must
                # draw again.
                x = checkpoint(
                    layer, x, cos, sin, *mask, use_reentrant=False, preserve_rng_state=self.draws
                )
            else:
                x = layer(x, cos, sin, *mask)
        return x

    def head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Computes the loss or the logits from the residual stream after the last layer.

        Args:
            x: The residual stream, [B, T, D].
            targets: See `forward`.

        Returns:
            See `forward`.
        """
        logits: Tensor = self.output_layer(self.final_layernorm(x))
        softcap = self.config.final_logit_softcapping
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), self.vocabulary_part)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initializes every parameter, or this rank's part of it. See `weight_init.init_parameter`.

        One seed gives one model. The values depend neither on the device and dtype of the
        parameters nor on how they are split over ranks.

        Args:
            seed: Seed of the random numbers.
        """
        for name, parameter in self.named_parameters():
            shard = self.shards.get(name)
            columns = parameter.shape[-1]
            if shard is not None and shard.dim == 1:
                columns *= shard.ranks
            for part, offset in local_parts(parameter, shard):
                init_parameter(part, name, self.config, seed, columns, offset)

    def _rotary_tables(
        self, positions: Tensor
    ) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
        """Returns cosines and sines for layers with full attention, and for windowed layers."""
        if self.config.position_embedding_type != "rope":
            return (None, None), (None, None)
        full = rotary_tables(self.config, positions)
        if self.config.rotary_base_local is None:
            return full, full
        return full, rotary_tables(self.config, positions, local=True)

    def _attention_masks(
        self,
        layers: Sequence[tuple[int, nn.Module]],
        length: int,
        x: Tensor,
        documents: Tensor | None,
    ) -> list[tuple[Tensor, ...]]:
        """Returns the attention mask of each layer, in a tuple.

        A mask is [T, T], or [B, 1, T, T] if it separates documents. Layers with the same window
        share one mask. The tuple is empty if the layer needs no mask.
        """
        different_documents = None
        if documents is not None:
            different_documents = documents[:, None, :, None] != documents[:, None, None, :]
        masks_by_window: dict[int | None, tuple[Tensor, ...]] = {}
        if different_documents is None and self.config.attn_logit_softcapping is None:
            masks_by_window[None] = ()  # the causal flag of torch's attention is enough
        masks: list[tuple[Tensor, ...]] = []
        for number, layer in layers:
            if not layer.takes_mask:
                masks.append(())
                continue
            window = self.config.window(number)
            if window is not None and window >= length:
                window = None
            if window not in masks_by_window:
                is_hidden = causal_mask(length, length, window, x.device)
                if different_documents is not None:
                    is_hidden = is_hidden | different_documents
                masks_by_window[window] = (additive_mask(is_hidden, x.dtype),)
            masks.append(masks_by_window[window])
        return masks

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Leaving the meta device creates new Parameters, one per module, which would untie a tied
        # weight. A pipeline stage may lack the embedding or the output layer.
        has_both = self.output_layer is not None and self.embedding is not None
        is_tied = has_both and self.output_layer.weight is self.embedding.weight
        super()._apply(fn, recurse)
        if is_tied:
            self.output_layer.weight = self.embedding.weight
        return self


def positions_in_documents(documents: Tensor) -> Tensor:
    """Returns the position of each token in its document.

    A sample starts at 0, even in the middle of a document. Source: Megatron's
    `_get_ltor_masks_and_position_ids`.

    Args:
        documents: Number of the document of each token, integers [B, T].

    Returns:
        int64 [B, T].
    """
    positions = torch.arange(documents.shape[1], device=documents.device)
    is_start = documents[:, 1:] != documents[:, :-1]
    starts = F.pad(torch.where(is_start, positions[1:], 0), (1, 0))
    return positions - starts.cummax(1).values


class TransformerLayer(nn.Module):
    """One layer, [B, T, D] to [B, T, D]: attention and MLP, each added to the residual stream.

    `layernorm_placement` puts norms before attention and MLP (pre), after them (post, OLMo 2), or
    both (Gemma 2).

    Attributes:
        enter: Applied to the inputs of attention and MLP. Tensor parallelism sets it to gather the
            tokens of all ranks. None otherwise.
        packed: Whether the mask may separate documents, and positions may differ between samples.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int = 0,
        packed: bool = False,
        recompute: str = "none",
    ) -> None:
        """Builds layer number `layer`, from 0. For the other arguments see Transformer."""
        super().__init__()
        self.config = config
        self.placement = config.layernorm_placement
        self.packed = packed
        self.recompute = recompute
        self.selective = recompute == "selective"
        self.enter: Callable[[Tensor], Tensor] | None = None
        # Modules are created in the order of the forward pass, which is the order of parameters.
        if self._has_pre_norms:
            self.input_layernorm = build_norm(config)
        self.self_attention = SelfAttention(config, layer, self.selective)
        if self._has_post_norms:
            self.post_self_attn_layernorm = build_norm(config)
        if self._has_pre_norms:
            self.pre_mlp_layernorm = build_norm(config)
        self.mlp = MLP(config, recompute)
        if self._has_post_norms:
            self.post_mlp_layernorm = build_norm(config)
        attention, mlp = self.self_attention, self.mlp
        for linear in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
            # FP8 layers then save their input instead of a quantized copy. It costs nothing: the
            # input is recomputed, or it is the output of attention and saved already.
            linear.keeps_input = self.selective  # type: ignore[assignment]

    @property
    def _has_pre_norms(self) -> bool:
        return self.placement != "post"

    @property
    def _has_post_norms(self) -> bool:
        return self.placement != "pre"

    @property
    def takes_mask(self) -> bool:
        """Whether a call may pass a mask. Other attention than CoreAttention has none."""
        return type(self.self_attention.core_attention) is CoreAttention

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor) -> Tensor:
        """Computes the layer.

        Args:
            x: The residual stream, [B, T, D].
            cos: Cosines from `rotary_tables`, or None without rotary positions.
            sin: Sines from `rotary_tables`, or None without rotary positions.
            *mask: The mask of CoreAttention, or nothing.
        """
        if self.selective and torch.compiler.is_compiling() and torch.is_grad_enabled():
            # The hooks of `discard_output` don't work in compiled code.
            y: Tensor = checkpoint(
                self._forward,
                x,
                cos,
                sin,
                *mask,
                use_reentrant=False,
                context_fn=keep_gemm_outputs,
            )
            return y
        return self._forward(x, cos, sin, *mask)

    def _forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor) -> Tensor:
        input_norm = self.input_layernorm if self._has_pre_norms else None
        y = self._run_block(self.self_attention, input_norm, x, cos, sin, *mask)
        if self._has_post_norms:
            y = self._run_norm(self.post_self_attn_layernorm, y)
        x = x + y

        mlp_norm = self.pre_mlp_layernorm if self._has_pre_norms else None
        y = self._run_block(self.mlp, mlp_norm, x)
        if self._has_post_norms:
            y = self._run_norm(self.post_mlp_layernorm, y)
        return x + y

    def _run_block(
        self, block: nn.Module, norm: nn.Module | None, x: Tensor, *args: Tensor | None
    ) -> Tensor:
        """Runs attention or MLP on the residual stream, with the norm before it, if any."""
        normed = x
        if norm is not None:
            normed = self._run_norm(norm, x)
        block_input = normed
        if self.enter is not None:
            block_input = self.enter(normed)
        if not self.selective:
            return block(block_input, *args)  # type: ignore[no-any-return]
        with discard_output(normed, self.enter, block_input):
            return block(block_input, *args)  # type: ignore[no-any-return]

    def _run_norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        # Our norms upcast their input, and autograd would save the float32 copy. Norms of another
        # library save only their input. Full recomputation saves nothing inside a layer anyway.
        saves_copies = self.recompute == "none" and isinstance(norm, RMSNorm)
        if self.selective or saves_copies:
            return recompute_in_backward(norm, norm, x)
        return norm(x)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """MLP of one layer, [B, T, D] to [B, T, D]: linear_fc2(activation(linear_fc1(x))).

    With swiglu and geglu, the first half of the rows of `linear_fc1` is the gate and the second
    half the up projection. GELU is the tanh approximation, as in Gemma, GPT-2 and Transformer
    Engine's kernels.
    """

    def __init__(self, config: TransformerConfig, recompute: str = "none") -> None:
        """Builds the MLP. See Transformer for `recompute`."""
        super().__init__()
        self.activation = config.activation
        self.recompute = recompute
        self.linear_fc1 = nn.Linear(
            config.hidden_size, config.fc1_size, bias=config.add_bias_linear
        )
        self.linear_fc2 = nn.Linear(
            config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear
        )

    def forward(self, x: Tensor) -> Tensor:
        fc1_output = self.linear_fc1(x)
        if self.recompute == "full":
            activated = self._activate(fc1_output)
        else:
            # The backward pass saves only the activation's input, as Megatron's fused kernels do.
            activated = recompute_in_backward(self._activate, None, fc1_output)
        if self.recompute == "selective":
            with discard_output(activated):
                return self.linear_fc2(activated)  # type: ignore[no-any-return]
        return self.linear_fc2(activated)  # type: ignore[no-any-return]

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "squared_relu":
            return F.relu(x).square()
        if self.activation == "gelu":
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, dim=-1)
        if self.activation == "swiglu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh") * up
