"""Context parallelism: each sequence is split over the context ranks.

A sequence of T tokens is cut into 2 * ranks chunks. Rank r has the chunks r and 2 * ranks - 1 - r
(zigzag). Under a causal mask an early chunk has few keys and a late one has many, so every rank
computes the same amount.

Everything except attention works token by token. Attention takes this rank's queries and gathers
the keys and values of full sequences, one all-gather per layer. Its backward pass reduce-scatters
their gradients. Each of the two sends (ranks - 1) / ranks of keys and values in the compute dtype.
Source: Llama 3, arXiv 2407.21783, section 3.3.2. In Megatron it is cp_comm_type="all_gather".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp8cfg.models.attention import prepare_lower_right_bias
from fp8cfg.models.config import TransformerConfig
from fp8cfg.parallel.tensor_collectives import gather_from_sequence_parallel


def split_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes a Transformer compute this rank's part of each sequence, in place.

    The model still takes full sequences. Its loss is the mean over this rank's tokens, and it
    returns logits of this rank's tokens only.

    Args:
        model: The Transformer. From here on it takes only lengths that are a multiple of
            2 * ranks.
        mesh: The device mesh, with an axis `cp`.
    """
    group = mesh.get_group("cp")
    context = ContextRank(dist.get_rank(group), dist.get_world_size(group), group.group_name)
    chunk_length = cast(TransformerConfig, model.config).seq_length // (2 * context.size)
    # For the chunks of all ranks: the coverage report of one rank covers all of them.
    for number in range(2 * context.size):
        prepare_lower_right_bias(chunk_length, (number + 1) * chunk_length)
    for layer in model.layers:  # type: ignore[union-attr]
        attention = layer.self_attention
        attention.core_attention = ContextParallelAttention(attention.core_attention, context)
    model.context = context  # type: ignore[assignment]
    model.register_forward_pre_hook(_split_arguments, with_kwargs=True)


def _split_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a Transformer: replaces its arguments by this rank's chunks of them.

    Raises:
        ValueError: The sequences cannot be split into equal chunks.
    """
    context: ContextRank = model.context  # type: ignore[assignment]
    arguments = {**dict(zip(("tokens", "targets"), args, strict=False)), **kwargs}
    tokens = arguments["tokens"]
    num_tokens = tokens.shape[1]
    num_chunks = 2 * context.size
    if num_tokens % num_chunks:
        # Chunks of different lengths would stall the gathers of keys and values.
        raise ValueError(
            f"tokens of shape {list(tokens.shape)}: {context.size} context ranks need a multiple of"
            f" {num_chunks} tokens; cut or pad the sequences"
        )
    targets = arguments.get("targets")
    if targets is not None:
        targets = context.part(targets)
    # Positions are explicit: this rank's two chunks are not consecutive.
    positions = torch.arange(num_tokens, device=tokens.device)
    documents = None
    return (context.part(tokens), targets, documents, context.part(positions)), {}


@dataclass(frozen=True)
class ContextRank:
    """One of the ranks that share each sequence.

    Attributes:
        rank: The number of this rank.
        size: The number of ranks.
        group: Name of their process group.
    """

    rank: int
    size: int
    group: Any

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's chunks, out of 2 * size."""
        return self.rank, 2 * self.size - 1 - self.rank

    def part(self, tensor: Tensor) -> Tensor:
        """Returns this rank's chunks of full sequences, [..., T] -> [..., T / size]."""
        # Two chunks: one early and one late, see the module's docstring.
        chunks = tensor.chunk(2 * self.size, dim=-1)
        return torch.cat([chunks[number] for number in self.chunks], dim=-1)

    def gather_sequences(self, part: Tensor) -> Tensor:
        """Gathers full sequences, [..., T / size, C] -> [..., T, C].

        Gradients are summed over the ranks.
        """
        gathered = gather_from_sequence_parallel(part.unsqueeze(0), self.group, 0)
        # [ranks, ..., tokens, C] -> [ranks, ..., 2, tokens / 2, C]
        chunks = torch.unflatten(gathered, -2, (2, -1))
        early = chunks.select(-3, 0)
        late = chunks.select(-3, 1)
        # Late chunks come in the reverse order of the ranks (zigzag).
        return torch.cat([*early.unbind(), *reversed(late.unbind())], dim=-2)


class ContextParallelAttention(nn.Module):
    """Attention over sequences that are split over context ranks.

    Args:
        core: An attention whose queries may be the last of its keys.
        context: This rank's place.
    """

    def __init__(self, core: nn.Module, context: ContextRank) -> None:
        super().__init__()
        self.core = core
        self.context = context

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes attention of this rank's queries.

        Args:
            q: [B, heads, T / ranks, head_dim].
            k: [B, groups, T / ranks, head_dim].
            v: As k.

        Returns:
            As q.
        """
        # One all-gather for both.
        keys, values = self.context.gather_sequences(torch.stack((k, v)))
        chunk_length = q.shape[-2] // 2
        outputs = []
        # One call per chunk, because the two chunks see different numbers of keys. Keys after the
        # chunk are cut off, so the causal mask is bottom-right aligned.
        for queries, number in zip(q.chunk(2, dim=-2), self.context.chunks, strict=True):
            visible = self._visible_keys(number, chunk_length)
            outputs.append(self.core(queries, keys[..., visible, :], values[..., visible, :]))
        return torch.cat(outputs, dim=-2)

    def lengths(self, length: int) -> list[tuple[int, int]]:
        """Returns the numbers of queries and keys in each call of `core`.

        Args:
            length: Tokens in a sequence.

        Returns:
            One pair per chunk, for the chunks of all ranks.
        """
        num_chunks = 2 * self.context.size
        chunk_length = length // num_chunks
        lengths = []
        for number in range(num_chunks):
            visible = self._visible_keys(number, chunk_length)
            lengths.append((chunk_length, visible.stop - visible.start))
        return lengths

    def _visible_keys(self, chunk: int, length: int) -> slice:
        """Returns the keys that the queries of a chunk of `length` tokens may see."""
        window = cast("int | None", self.core.window)
        start = 0
        if window is not None:
            # The first query of the chunk sees `window` keys, itself included.
            start = max(0, chunk * length + 1 - window)
        # Causal: keys after the chunk are masked for all of its queries.
        return slice(start, (chunk + 1) * length)

    def extra_repr(self) -> str:
        return f"rank {self.context.rank} of {self.context.size}"
