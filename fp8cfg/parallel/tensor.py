"""Tensor parallelism: every matrix of the Transformer split over the tensor-parallel ranks (Megatron-LM, arXiv 1909.08053), which
compute on the same tokens; and sequence parallelism (arXiv 2205.05198), which splits the tokens between them.

    embedding                    rows: a rank has part of the vocabulary
    linear_qkv, linear_fc1       rows (column-parallel): whole groups of heads; gate and up projection each by itself
    attention, activation        of the rank's own heads and channels
    linear_proj, linear_fc2      columns (row-parallel): outputs are summed over the ranks, biases added once, after the sum
    output_layer                 rows: logits stay split, and so does the loss (tensor.py)
    norms, learned positions     whole on every rank

Between these a rank has all tokens, the same as every other rank, or under sequence parallelism a part of each sequence: sums are
then a reduce-scatter and inputs an all-gather along the sequence, and what stands between them, norms and the residual stream, is
computed and kept once. Parameters are plain tensors, this rank's part of each, of which `Transformer.shards` says the rest. Layers
know of it no more than the group over which amaxes of split tensors are taken.
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
from fp8cfg.parallel.mesh import device_mesh
from fp8cfg.parallel.tensor_collectives import summed, total
from fp8cfg.schema.training import Strategy


class SplitRMSNorm(RMSNorm):
    """RMSNorm over the last dimension, of which, as of the weight, each of `ranks` of the process group `group` has an equal
    part."""

    group: str
    ranks: int

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * self._inverse_root(wide) * self.gamma).to(x.dtype)

    def _mean(self, wide: Tensor) -> Tensor:
        return total(wide.sum(-1, keepdim=True), self.group) / (wide.shape[-1] * self.ranks)

    def _inverse_root(self, wide: Tensor) -> Tensor:
        return torch.rsqrt(self._mean(wide.square()) + self.eps)


class SplitLayerNorm(SplitRMSNorm, LayerNorm):
    """LayerNorm in the same way."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        centered = wide - self._mean(wide)
        return (centered * self._inverse_root(centered) * self.gamma + self.bias.float()).to(
            x.dtype
        )


def split(norm: RMSNorm, ranks: int, group: str) -> None:
    """Let `norm`, whose parameters are this rank's part already, compute as the whole one, in place."""
    norm.__class__ = SplitLayerNorm if isinstance(norm, LayerNorm) else SplitRMSNorm
    norm.group, norm.ranks = group, ranks  # type: ignore[assignment]


class VocabularyEmbedding(nn.Embedding):
    """Rows `first` to `first` + num_embeddings of an embedding; of other tokens the output is 0: the sum over the ranks is that of
    the whole embedding."""

    first = 0

    @classmethod
    def of(cls, weight: nn.Parameter, first: int) -> VocabularyEmbedding:
        """An embedding of these rows, which is not initialized anew."""
        rows, width = weight.shape
        with torch.device("meta"):
            made = cls(rows, width)
        made.weight, made.first = weight, first
        return made

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        return F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(
            elsewhere.unsqueeze(-1), 0.0
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, first={self.first}"


def vocabulary_part(first: int, group: str) -> VocabularyPart:
    """The part of the logits from the entry `first` on, of which the ranks of the process group of that name have the others."""
    return VocabularyPart(first, partial(all_reduce_max, group=group), partial(summed, group=group))


COLUMN, ROW = ((WEIGHT, 0), (GRAD_OUTPUT, 1)), ((INPUT, 1), (WEIGHT, 1))
"""The tensors of a layer that are split, and in which dimension."""


@dataclass(frozen=True)
class TensorRank:
    """One of the ranks that share each matrix: the axis tp of `mesh`. `sequence` says that they share sequences too."""

    mesh: DeviceMesh
    sequence: bool = False

    @cached_property
    def rank(self) -> int:
        """The number of this rank among those that share matrices."""
        return self.mesh.get_local_rank("tp")

    @cached_property
    def size(self) -> int:
        """How many ranks share each matrix."""
        return self.mesh["tp"].size()

    @cached_property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of those ranks."""
        return self.mesh.get_group("tp")

    @cached_property
    def group(self) -> str:
        """The name of that group."""
        return cast(str, self.process_group.group_name)

    def enter(self, x: Tensor) -> Tensor:
        """The input of column-parallel layers: all tokens."""
        return (
            tensor_collectives.gather(x, self.group)
            if self.sequence
            else tensor_collectives.enter(x, self.group)
        )

    def leave(self, x: Tensor) -> Tensor:
        """The output of row-parallel layers: its sum over the ranks, under sequence parallelism of this rank's tokens."""
        return (
            tensor_collectives.scatter(x, self.group)
            if self.sequence
            else tensor_collectives.leave(x, self.group)
        )

    def tokens(self, of_sequence: Tensor) -> Tensor:
        """Of something for each token [..., T] that for this rank's tokens."""
        return of_sequence.chunk(self.size, dim=-1)[self.rank] if self.sequence else of_sequence

    @property
    def token_shard(self) -> TokenShard | None:
        """This rank's tokens of the inputs that `enter` gathers; None if every rank has all tokens."""
        return TokenShard(self.rank, self.size, self.group) if self.sequence else None


def tensor_rank(strategy: Strategy, device: str, mesh: DeviceMesh | None = None) -> TensorRank:
    """This rank's place in the layout of `strategy`, whose ranks compute on `device`; `mesh` is its device mesh, if there is one.
    All ranks call it."""
    return TensorRank(mesh or device_mesh(strategy, device), strategy.sequence_parallel)


def split_model(model: Transformer, here: TensorRank) -> None:
    """Let `model`, whose parameters are whole, on the meta device or not, keep this rank's parts of them and compute as the whole
    model does, in place. Targets give the loss, the same on every rank; without targets logits are those of the whole vocabulary.

    Its linear layers may be replaced by quantized ones afterwards; `finish_layers` comes after that.
    """
    for layer in cast("list[TransformerLayer]", list(model.layers)):
        attention, mlp = layer.self_attention, layer.mlp
        layer.enter = here.enter
        _column(attention.linear_qkv, here)
        _row(attention.linear_proj, here)
        attention.num_query_groups //= here.size
        for norm in (
            (attention.q_layernorm, attention.k_layernorm) if attention.normed == "hidden" else ()
        ):
            for name, _ in list(norm.named_parameters()):
                _keep(norm, name, TensorShard(here.rank, here.size))
            split(norm, here.size, here.group)
        _column(mlp.linear_fc1, here, pieces=model.config.fc1_size // model.config.ffn_hidden_size)
        _row(mlp.linear_fc2, here)
        for module, last in ((attention, attention.linear_proj), (mlp, mlp.linear_fc2)):
            module.register_forward_hook(
                partial(_sum_output, here, "linear_proj" if module is attention else "linear_fc2")
            )
            last.adds_bias = False  # type: ignore[assignment]
    _vocabulary(model, here)
    if model.recompute != "full":
        _keep_tokens(model, here)
    model.shards = {
        name: p.shard
        for name, p in model.named_parameters(remove_duplicate=False)
        if hasattr(p, "shard")
    }
    model.tensor_parallel = here


def finish_layers(model: Transformer) -> None:
    """After layers were replaced: what stayed an nn.Linear and has a bias to be added after the sum leaves it out."""
    for layer in cast("list[TransformerLayer]", list(model.layers)):
        for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            if type(linear) is nn.Linear and linear.bias is not None:
                linear.forward = partial(_without_bias, linear)  # type: ignore[method-assign]


def partial_gradients(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are whole on every rank, and of whose gradients each rank has a share: those that its own heads, or its
    own tokens, went through; and of an adapter the matrix beside the one that is split."""
    here: TensorRank = model.tensor_parallel  # type: ignore[assignment]
    shards = cast(dict[str, TensorShard], model.shards)
    whole = [(name, p) for name, p in model.named_parameters() if name not in shards]
    return [
        p
        for name, p in whole
        if here.sequence
        or ".lora." in name
        or name.rpartition(".")[0].endswith(("q_layernorm", "k_layernorm"))
    ]


def _column(linear: nn.Linear, here: TensorRank, pieces: int = 1) -> None:
    shard = TensorShard(here.rank, here.size, 0, pieces)
    _keep(linear, "weight", shard)
    if linear.bias is not None:
        _keep(linear, "bias", shard)
    linear.out_features //= here.size
    linear.amax_group = AmaxGroup(COLUMN, here.group)  # type: ignore[assignment]


def _keep_tokens(model: Transformer, here: TensorRank) -> None:
    """Lets FP8 layers keep this rank's tokens of a gathered input for the backward pass.

    Not under full recomputation, whose second forward pass gathers the input just before.
    """
    for layer in cast("list[TransformerLayer]", list(model.layers)):
        layer.self_attention.linear_qkv.token_shard = here.token_shard  # type: ignore[assignment]
        layer.mlp.linear_fc1.token_shard = here.token_shard  # type: ignore[assignment]
    model.output_layer.token_shard = here.token_shard  # type: ignore[assignment]


def _row(linear: nn.Linear, here: TensorRank) -> None:
    _keep(linear, "weight", TensorShard(here.rank, here.size, 1))
    linear.in_features //= here.size
    linear.amax_group = AmaxGroup(ROW, here.group)  # type: ignore[assignment]


def _keep(module: nn.Module, name: str, shard: TensorShard) -> None:
    """Leave of a parameter this rank's part, with its place until all places are collected."""
    whole: nn.Parameter = getattr(module, name)
    part = nn.Parameter(shard.part(whole.detach()).clone(), requires_grad=whole.requires_grad)
    part.shard = shard  # type: ignore[attr-defined]
    setattr(module, name, part)


def _vocabulary(model: Transformer, here: TensorRank) -> None:
    tied = model.output_layer.weight is model.embedding.weight
    _keep(model.embedding, "weight", TensorShard(here.rank, here.size, 0))
    rows = len(model.embedding.weight)
    weight: Any = model.embedding.weight
    model.embedding = VocabularyEmbedding.of(weight, here.rank * rows)
    model.embedding.register_forward_hook(lambda _, args, out: here.leave(out))
    if here.sequence and model.config.learned_positions:
        model.position_embedding.register_forward_pre_hook(lambda _, args: (here.tokens(args[0]),))
    _column(model.output_layer, here)
    if tied:
        model.output_layer.weight = model.embedding.weight
    model.output_layer.register_forward_pre_hook(lambda _, args: (here.enter(args[0]), *args[1:]))
    model.vocabulary_part = vocabulary_part(here.rank * rows, here.group)
    model.register_forward_hook(
        lambda _, args, out: (
            out if out.dim() == 0 else tensor_collectives.join(out, here.rank, here.group)
        )
    )


def _sum_output(here: TensorRank, last: str, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    whole, bias = here.leave(out), getattr(module, last).bias
    return whole if bias is None else whole + bias.to(whole.dtype)


def _without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight)
