"""Context parallelism: each sequence split over the context ranks, whose attention gathers keys and values of all of it.

A sequence of T tokens is cut into 2 x ranks chunks, and rank r has the chunks r and 2 x ranks - 1 - r (zigzag): under a causal
mask an early chunk has few keys and a late one many, so that every rank computes as much as any other. All but attention is done
token by token. Attention takes this rank's queries and, by one all-gather a layer, the keys and values of the whole sequence
(Llama 3, arXiv 2407.21783, section 3.3.2; cp_comm_type="all_gather" of Megatron); its backward pass sums their gradients to the
ranks that they belong to, by one reduce-scatter. Either carries (ranks - 1) / ranks of keys and values in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp8cfg.models.attention import expect_queries
from fp8cfg.models.config import TransformerConfig
from fp8cfg.parallel.tensor_collectives import gather


@dataclass(frozen=True)
class ContextRank:
    """One of `size` ranks that share each sequence, in the process group called `group`."""

    rank: int
    size: int
    group: Any

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's chunks in the sequence, of 2 x size."""
        return self.rank, 2 * self.size - 1 - self.rank

    def part(self, t: Tensor) -> Tensor:
        """This rank's chunks of whole sequences, [..., T] -> [..., T / size]."""
        chunks = t.chunk(2 * self.size, dim=-1)
        return torch.cat([chunks[c] for c in self.chunks], dim=-1)

    def whole(self, parts: Tensor) -> Tensor:
        """The whole sequences of all ranks' parts, [..., T / size, C] -> [..., T, C]. Gradients are summed over the ranks."""
        every = torch.unflatten(
            gather(parts.unsqueeze(0), self.group, 0), -2, (2, -1)
        )  # [ranks, ..., 2, tokens, C]
        early, late = every.select(-3, 0), every.select(-3, 1)
        return torch.cat([*early.unbind(), *reversed(late.unbind())], dim=-2)


class ContextParallelAttention(nn.Module):
    """`core`, an attention whose queries may be the last of its keys, over sequences that are split: q [B, heads, T / ranks,
    head_dim] and k, v [B, G, T / ranks, head_dim] of this rank's chunks, out as q."""

    def __init__(self, core: nn.Module, here: ContextRank) -> None:
        super().__init__()
        self.core, self.here = core, here

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.here.whole(torch.stack((k, v)))
        attended = []
        for queries, chunk in zip(q.chunk(2, dim=-2), self.here.chunks, strict=True):
            seen = self._seen(chunk, q.shape[-2] // 2)
            attended.append(self.core(queries, keys[..., seen, :], values[..., seen, :]))
        return torch.cat(attended, dim=-2)

    def lengths(self, length: int) -> list[tuple[int, int]]:
        """Queries and keys of the calls of `core` that the ranks make of a sequence of `length` tokens, by chunk."""
        count = 2 * self.here.size
        chunk = length // count
        return [
            (chunk, seen.stop - seen.start)
            for seen in (self._seen(number, chunk) for number in range(count))
        ]

    def _seen(self, chunk: int, length: int) -> slice:
        """The keys that the queries of a chunk of `length` tokens may see."""
        window = cast("int | None", self.core.window)
        return slice(
            0 if window is None else max(0, chunk * length + 1 - window), (chunk + 1) * length
        )

    def extra_repr(self) -> str:
        return f"rank {self.here.rank} of {self.here.size}"


def split_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let `model`, a Transformer, in place, compute this rank's part of the sequences that it is given whole: its loss is the mean
    over that part, its logits are those of that part. Ranks with the same batch are the axis cp of `mesh`.
    """
    group = mesh.get_group("cp")
    here = ContextRank(dist.get_rank(group), dist.get_world_size(group), group.group_name)
    chunk = cast(TransformerConfig, model.config).seq_length // (2 * here.size)
    for number in range(
        2 * here.size
    ):  # also those of other ranks: what all of them run can be asked of one
        expect_queries(chunk, (number + 1) * chunk)
    for layer in model.layers:  # type: ignore[union-attr]
        attention = layer.self_attention
        attention.core_attention = ContextParallelAttention(attention.core_attention, here)
    model.context = here  # type: ignore[assignment]
    model.register_forward_pre_hook(_split_arguments, with_kwargs=True)


def _split_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of Transformer.forward with this rank's part of the tokens, of the targets where there are some, and their
    positions."""
    here: ContextRank = model.context  # type: ignore[assignment]
    given = dict(zip(("tokens", "targets"), args, strict=False)) | dict(kwargs)
    tokens, targets = given["tokens"], given.get("targets")
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return (
        here.part(tokens),
        None if targets is None else here.part(targets),
        None,
        here.part(positions),
    ), {}
