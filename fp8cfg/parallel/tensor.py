"""Tensor parallelism (Megatron-LM, arXiv 1909.08053) and sequence parallelism (arXiv 2205.05198).

Tensor-parallel ranks compute on the same tokens and split every matrix of the Transformer:

    embedding                    rows: each rank has a part of the vocabulary
    linear_qkv, linear_fc1       column-parallel: rows, by head groups, gate and up separately
    attention, activation        the rank's own heads and channels
    linear_proj, linear_fc2      row-parallel: columns; outputs are summed, then biases are added
    output_layer                 rows: logits stay split, and so does the loss
    norms, learned positions     replicated

Between these pairs of layers each rank has all tokens. Under sequence parallelism it has a shard
of each sequence there. Sums become reduce-scatters, and inputs are all-gathered along the sequence.
Each rank computes and keeps norms and the residual stream of its tokens only.

Parameters are plain tensors with this rank's shard. `Transformer.shards` has their places. Layers
only know the group that reduces the amaxes of split tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp8cfg.models.cross_entropy import VocabularyPart
from fp8cfg.models.norms import LayerNorm, RMSNorm
from fp8cfg.models.transformer import Transformer, TransformerLayer
from fp8cfg.models.weight_init import TensorShard
from fp8cfg.numerics.amax import AmaxGroup, all_reduce_max
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from fp8cfg.numerics.token_shard import TokenShard
from fp8cfg.parallel import tensor_collectives
from fp8cfg.parallel.tensor_collectives import all_reduce, all_reduce_both

COLUMN_PARALLEL_AMAXES = ((WEIGHT, 0), (GRAD_OUTPUT, 1))
ROW_PARALLEL_AMAXES = ((INPUT, 1), (WEIGHT, 1))
"""Split tensors of a layer, each with its split dimension. Their amaxes are reduced over ranks."""


@dataclass(frozen=True)
class TensorRank:
    """One of the ranks that share each matrix.

    Attributes:
        mesh: The mesh, with an axis `tp`.
        sequence: Whether sequence parallelism is on.
    """

    mesh: DeviceMesh
    sequence: bool = False

    @cached_property
    def rank(self) -> int:
        """The number of this rank."""
        return self.mesh.get_local_rank("tp")

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh["tp"].size()

    @cached_property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        return self.mesh.get_group("tp")

    @cached_property
    def group(self) -> str:
        """The name of the process group."""
        return cast(str, self.process_group.group_name)

    def gather_input(self, x: Tensor) -> Tensor:
        """Returns the input of a column-parallel layer: all tokens."""
        if self.sequence:
            return tensor_collectives.gather_from_sequence_parallel(x, self.group)
        return tensor_collectives.copy_to_tensor_parallel(x, self.group)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Returns the sum of the outputs of a row-parallel layer, for this rank's tokens."""
        if self.sequence:
            return tensor_collectives.reduce_scatter_to_sequence_parallel(x, self.group)
        return tensor_collectives.reduce_from_tensor_parallel(x, self.group)

    def slice_tokens(self, values: Tensor) -> Tensor:
        """Returns the values, [..., T], of the tokens that this rank has between layers."""
        if self.sequence:
            return values.chunk(self.size, dim=-1)[self.rank]
        return values

    @property
    def token_shard(self) -> TokenShard | None:
        """This rank's tokens in a gathered input, None if every rank has all tokens."""
        if self.sequence:
            return TokenShard(self.rank, self.size, self.group)
        return None


def split_model(model: Transformer, place: TensorRank) -> None:
    """Makes a Transformer keep this rank's parts of its parameters, in place.

    It computes the same function as the full model. With targets it returns the same loss on every
    rank, without targets the logits of the full vocabulary.

    The linear layers may be replaced by FP8 layers afterwards. Then call `finish_layers`.

    Args:
        model: With full parameters, possibly on the meta device.
        place: This rank's place.
    """
    config = model.config
    for layer in cast("list[TransformerLayer]", list(model.layers)):
        layer.enter = place.gather_input
        attention = layer.self_attention
        _split_column_parallel(attention.linear_qkv, place)
        _split_row_parallel(attention.linear_proj, place)
        attention.num_query_groups //= place.size
        if attention.qk_layernorm == "hidden":  # norms over all heads together
            for norm in (attention.q_layernorm, attention.k_layernorm):
                for name, _ in list(norm.named_parameters()):
                    _keep_part(norm, name, TensorShard(place.rank, place.size))
                split_norm(norm, place.size, place.group)

        mlp = layer.mlp
        # Gate and up projection are two matrices in one.
        _split_column_parallel(
            mlp.linear_fc1, place, pieces=config.fc1_size // config.ffn_hidden_size
        )
        _split_row_parallel(mlp.linear_fc2, place)

        # The bias is added once, after the sum.
        attention.register_forward_hook(partial(_reduce_and_add_bias, place, "linear_proj"))
        attention.linear_proj.adds_bias = False  # type: ignore[assignment]
        mlp.register_forward_hook(partial(_reduce_and_add_bias, place, "linear_fc2"))
        mlp.linear_fc2.adds_bias = False  # type: ignore[assignment]
    _split_vocabulary(model, place)
    if model.recompute != "full":
        _keep_token_shards(model, place)
    model.shards = {
        name: parameter.shard
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if hasattr(parameter, "shard")
    }
    model.tensor_parallel = place


def finish_layers(model: Transformer) -> None:
    """Makes row-parallel layers that stayed nn.Linear leave out their bias, as FP8 layers do."""
    for layer in cast("list[TransformerLayer]", list(model.layers)):
        for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            if type(linear) is nn.Linear and linear.bias is not None:
                linear.forward = partial(_forward_without_bias, linear)  # type: ignore[method-assign]


def partial_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Returns the replicated parameters whose gradients are summed over tensor-parallel ranks.

    Each rank has used them on its heads or on its tokens only. With adapters, the unsplit matrix of
    an adapter is one of them too.
    """
    place: TensorRank = model.tensor_parallel  # type: ignore[assignment]
    shards = cast(dict[str, TensorShard], model.shards)
    parameters = []
    for name, parameter in model.named_parameters():
        if name in shards:
            continue
        # Each rank normalizes only its own heads.
        is_head_norm = name.rpartition(".")[0].endswith(("q_layernorm", "k_layernorm"))
        if place.sequence or is_head_norm or ".lora." in name:
            parameters.append(parameter)
    return parameters


def _split_column_parallel(linear: nn.Linear, place: TensorRank, pieces: int = 1) -> None:
    """Keeps this rank's rows of a weight, [out, in], and its part of the bias.

    Args:
        linear: The layer, changed in place.
        place: This rank's place.
        pieces: Number of concatenated matrices in the weight. Each is split separately.
    """
    shard = TensorShard(place.rank, place.size, 0, pieces)
    _keep_part(linear, "weight", shard)
    if linear.bias is not None:
        _keep_part(linear, "bias", shard)
    linear.out_features //= place.size
    linear.amax_group = AmaxGroup(COLUMN_PARALLEL_AMAXES, place.group)  # type: ignore[assignment]


def _split_row_parallel(linear: nn.Linear, place: TensorRank) -> None:
    """Keeps this rank's columns of a weight, [out, in], in place."""
    # The bias stays in full: it is added once, after the sum over ranks.
    _keep_part(linear, "weight", TensorShard(place.rank, place.size, 1))
    linear.in_features //= place.size
    linear.amax_group = AmaxGroup(ROW_PARALLEL_AMAXES, place.group)  # type: ignore[assignment]


def _keep_part(module: nn.Module, name: str, shard: TensorShard) -> None:
    """Replaces a parameter by this rank's part. Its place goes into `Transformer.shards`."""
    full: nn.Parameter = getattr(module, name)
    # A clone: a view would keep the memory of the full parameter.
    data = shard.part(full.detach()).clone()
    part = nn.Parameter(data, requires_grad=full.requires_grad)
    part.shard = shard  # type: ignore[attr-defined]
    setattr(module, name, part)


def _keep_token_shards(model: Transformer, place: TensorRank) -> None:
    """Makes FP8 layers save this rank's tokens of a gathered input for the backward pass.

    Not under full recomputation: its second forward pass gathers the input just before.
    """
    for layer in cast("list[TransformerLayer]", list(model.layers)):
        layer.self_attention.linear_qkv.token_shard = place.token_shard  # type: ignore[assignment]
        layer.mlp.linear_fc1.token_shard = place.token_shard  # type: ignore[assignment]
    model.output_layer.token_shard = place.token_shard  # type: ignore[assignment]


def _split_vocabulary(model: Transformer, place: TensorRank) -> None:
    """Splits embedding, output layer, logits and loss over the vocabulary."""
    is_tied = model.output_layer.weight is model.embedding.weight
    _keep_part(model.embedding, "weight", TensorShard(place.rank, place.size, 0))
    weight: Any = model.embedding.weight
    first_token = place.rank * len(weight)
    model.embedding = VocabularyEmbedding.from_weight(weight, first_token)
    model.embedding.register_forward_hook(lambda _, args, output: place.reduce_output(output))
    if place.sequence and model.config.learned_positions:
        model.position_embedding.register_forward_pre_hook(
            lambda _, args: (place.slice_tokens(args[0]),)
        )
    _split_column_parallel(model.output_layer, place)
    if is_tied:
        # Both have kept the same rows, so they stay one parameter.
        model.output_layer.weight = model.embedding.weight
    model.output_layer.register_forward_pre_hook(
        lambda _, args: (place.gather_input(args[0]), *args[1:])
    )
    model.vocabulary_part = VocabularyPart(
        first_token,
        partial(all_reduce_max, group=place.group),
        partial(all_reduce, group=place.group),
    )

    def gather_logits(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Forward hook of the model: returns logits of the full vocabulary, or the loss."""
        if output.dim() == 0:  # the loss
            return output
        return tensor_collectives.gather_last_dim(output, place.rank, place.group)

    model.register_forward_hook(gather_logits)


def _reduce_and_add_bias(
    place: TensorRank, linear_name: str, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    """Forward hook of attention and MLP: sums the output of their row-parallel layer."""
    # After the sum: before it, each rank would add the bias once.
    total = place.reduce_output(output)
    bias = getattr(module, linear_name).bias
    if bias is not None:
        total = total + bias.to(total.dtype)
    return total


def _forward_without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    """Computes a linear layer without its bias. `_reduce_and_add_bias` adds it."""
    return F.linear(x, linear.weight)


class VocabularyEmbedding(nn.Embedding):
    """Rows `first` to `first + num_embeddings` of an embedding.

    Tokens outside give 0, so the sum over the ranks is the output of the full embedding.
    """

    first = 0

    @classmethod
    def from_weight(cls, weight: nn.Parameter, first: int) -> VocabularyEmbedding:
        """Returns an embedding with the rows of `weight`."""
        rows, width = weight.shape
        with torch.device("meta"):  # an initialized weight would draw random numbers
            embedding = cls(rows, width)
        embedding.weight = weight
        embedding.first = first
        return embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up tokens, [...] -> [..., width]. Tokens of other ranks give 0."""
        rows = tokens - self.first
        is_outside = (rows < 0) | (rows >= self.num_embeddings)
        # Tokens of other ranks look up row 0. The next line sets them to 0.
        output = F.embedding(rows.masked_fill(is_outside, 0), self.weight)
        return output.masked_fill(is_outside.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, first={self.first}"


def split_norm(norm: RMSNorm, ranks: int, group: str) -> None:
    """Makes `norm` compute over the last dimension of all ranks, in place.

    Args:
        norm: Its parameters are this rank's part already.
        ranks: The number of ranks. Their parts are equal.
        group: Name of the process group.
    """
    norm.__class__ = SplitLayerNorm if isinstance(norm, LayerNorm) else SplitRMSNorm
    norm.group = group  # type: ignore[assignment]
    norm.ranks = ranks  # type: ignore[assignment]


class SplitRMSNorm(RMSNorm):
    """RMSNorm over a dimension that is split over the ranks of a process group."""

    group: str
    ranks: int

    def forward(self, x: Tensor) -> Tensor:
        # Statistics are computed in float32, as in RMSNorm.
        wide = x.float()
        return (wide * self._inverse_root(wide) * self.gamma).to(x.dtype)

    def _mean(self, wide: Tensor) -> Tensor:
        """Returns the mean over the last dimension of all ranks, [..., 1]."""
        # Each rank uses the mean for its own part, so its gradient is summed over ranks too.
        total = all_reduce_both(wide.sum(-1, keepdim=True), self.group)
        return total / (wide.shape[-1] * self.ranks)

    def _inverse_root(self, wide: Tensor) -> Tensor:
        """Returns 1 / sqrt(mean square + eps), [..., 1]."""
        return torch.rsqrt(self._mean(wide.square()) + self.eps)


class SplitLayerNorm(SplitRMSNorm, LayerNorm):
    """LayerNorm over a dimension that is split over the ranks of a process group."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        centered = wide - self._mean(wide)
        normed = centered * self._inverse_root(centered) * self.gamma + self.bias.float()
        return normed.to(x.dtype)
