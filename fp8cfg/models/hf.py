"""Hugging Face weights: conversion from and to the names and layouts of a family.

Hugging Face keeps q, k, v and gate, up apart; here they are fused:

    self_attention.linear_qkv   for each key-value head: its query heads' rows, its key's, its value's
    mlp.linear_fc1              all gate rows, then all up rows

That is Megatron's order. Both sides pair channel i with i + rotary_size / 2 in the rotary embedding, so no row changes its
place within a head. GPT-2's q, k and v stand in one weight, which is transposed as all of its linear weights are. The config's
`vocab_size` must be the rows that the checkpoint has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8cfg.models.config import GATED, TransformerConfig
from fp8cfg.models.shapes import parameter_shapes

Shapes = dict[str, tuple[int, ...]]
_LAYER = "model.layers.{}."
LLAMA = {
    "embedding": ("model.embed_tokens",),
    "final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
    "layers.{}.input_layernorm": (f"{_LAYER}input_layernorm",),
    "layers.{}.self_attention.linear_qkv": tuple(f"{_LAYER}self_attn.{x}_proj" for x in "qkv"),
    "layers.{}.self_attention.linear_proj": (f"{_LAYER}self_attn.o_proj",),
    "layers.{}.pre_mlp_layernorm": (f"{_LAYER}post_attention_layernorm",),
    "layers.{}.mlp.linear_fc1": (f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj"),
    "layers.{}.mlp.linear_fc2": (f"{_LAYER}mlp.down_proj",),
}
"""Llama's modules, ours with theirs."""


@dataclass(frozen=True)
class Layout:
    """How a family lays out its weights: the `names` of modules, ours with theirs and `{}` for a layer's number; whether linear
    weights are transposed (`conv1d`); and whether norms are `centered`, differences from 1, None where as ours are.
    """

    names: Mapping[str, tuple[str, ...]]
    conv1d: bool = False
    centered: bool | None = None

    def parts(self, config: TransformerConfig) -> dict[str, Shapes]:
        """Our names, each with the names and shapes of what makes it up at Hugging Face."""
        return {
            name: self._of(name, shape, config) for name, shape in parameter_shapes(config).items()
        }

    def _of(self, name: str, shape: tuple[int, ...], config: TransformerConfig) -> Shapes:
        module, _, leaf = name.rpartition(".")
        at, number = module, ""
        if module.startswith("layers."):
            _, number, rest = module.split(".", 2)
            at = f"layers.{{}}.{rest}"
        names = self.names[at]
        rows: Sequence[int] = shape[:1]
        if len(names) == 3:
            rows = (config.query_size, config.key_size, config.key_size)
        elif len(names) == 2:
            rows = (config.ffn_hidden_size, config.ffn_hidden_size)
        shapes = [(count, *shape[1:]) for count in rows]
        if self.transposes(name):
            shapes = [shape[::-1] for shape in shapes]
        return dict(
            zip((f"{theirs.format(number)}.{leaf}" for theirs in names), shapes, strict=True)
        )

    def transposes(self, name: str) -> bool:
        """Whether the weight that we call `name` is transposed."""
        return self.conv1d and ".linear_" in name and name.endswith(".weight")

    def shift(self, name: str, config: TransformerConfig) -> float:
        """What a norm's weight is more in the checkpoint than here."""
        if self.centered is None or not name.endswith("layernorm.weight"):
            return 0.0
        return float(config.layernorm_zero_centered_gamma) - float(self.centered)

    def fuse(self, name: str, parts: list[Tensor], config: TransformerConfig) -> Tensor:
        """Our parameter of theirs."""
        if self.transposes(name):
            parts = [part.T for part in parts]
        if ".linear_qkv." in name:
            if len(parts) == 1:
                parts = list(
                    parts[0].split_with_sizes((config.query_size, config.key_size, config.key_size))
                )
            return torch.cat([_by_group(part, config) for part in parts], dim=1).flatten(0, 2)
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        shift = self.shift(name, config)
        return (whole.float() - shift).to(whole.dtype) if shift else whole

    def split(self, name: str, ours: Tensor, config: TransformerConfig, count: int) -> list[Tensor]:
        """Their `count` tensors of our parameter."""
        parts = [ours]
        if ".linear_qkv." in name:
            groups = _by_group(ours, config).split_with_sizes((config.heads_per_group, 1, 1), dim=1)
            parts = [part.flatten(0, 2) for part in groups]
            parts = parts if count == 3 else [torch.cat(parts)]
        elif ".linear_fc1." in name and config.activation in GATED:
            parts = list(ours.chunk(2))
        elif shift := self.shift(name, config):
            parts = [(ours.float() + shift).to(ours.dtype)]
        return [part.T.contiguous() for part in parts] if self.transposes(name) else parts


def from_hf(
    state_dict: Mapping[str, Tensor], config: TransformerConfig, layout: Layout = Layout(LLAMA)
) -> dict[str, Tensor]:
    """A state dict for `Transformer(config)` from one of transformers' model, by default of `LlamaForCausalLM`.

    Dtypes are kept. Under `tie_embeddings`, `lm_head.weight` may be absent. Raises ValueError for missing and
    unexpected names, for shapes that are not the config's, and for a tied `lm_head` that differs from the embedding.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    one = reader(shapes, state_dict.__getitem__, config, layout)
    ours = {name: one(name) for name in parameter_shapes(config)}
    if config.tie_embeddings:
        ours["output_layer.weight"] = ours["embedding.weight"]
    return ours


def reader(
    given: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    config: TransformerConfig,
    layout: Layout,
) -> Callable[[str], Tensor]:
    """What gives each parameter of `Transformer(config)` by name, made of what `read` gives for their names; `given` has the shapes
    that there are. Raises ValueError as `from_hf` does."""
    parts, shapes = layout.parts(config), dict(given)
    head, embedding = (
        f"{layout.names['output_layer'][0]}.weight",
        f"{layout.names['embedding'][0]}.weight",
    )
    tied_head = config.tie_embeddings and shapes.pop(head, None) is not None
    # Llama 2 checkpoints carry the rotary frequencies as buffers, GPT-2's the causal mask; here they follow from the config.
    buffers = ("rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(buffers)}
    _check(shapes, {theirs: shape for named in parts.values() for theirs, shape in named.items()})
    if tied_head and not torch.equal(read(head), read(embedding)):
        raise ValueError(f"{head} differs from {embedding}, but tie_embeddings is true")
    return lambda name: layout.fuse(name, [read(theirs) for theirs in parts[name]], config)


def to_hf(
    state_dict: Mapping[str, Tensor], config: TransformerConfig, layout: Layout = Layout(LLAMA)
) -> dict[str, Tensor]:
    """The inverse of `from_hf`: a state dict for transformers' model, without `lm_head.weight` where it is tied.

    Raises ValueError for missing and unexpected names and for shapes that are not the config's.
    """
    given = dict(state_dict)
    if config.tie_embeddings:
        given.pop("output_layer.weight", None)
    _check({name: tuple(tensor.shape) for name, tensor in given.items()}, parameter_shapes(config))
    theirs: dict[str, Tensor] = {}
    for name, named in layout.parts(config).items():
        theirs.update(zip(named, layout.split(name, given[name], config, len(named)), strict=True))
    return theirs


def _by_group(weight: Tensor, config: TransformerConfig) -> Tensor:
    """[rows, ...] as [groups, heads, head_dim, ...]."""
    return weight.reshape(config.num_query_groups, -1, config.head_dim, *weight.shape[1:])


def _check(given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    differences = {
        "missing": expected.keys() - given.keys(),
        "unexpected": given.keys() - expected.keys(),
    }
    if any(differences.values()):
        said = [
            f"{len(names)} {what}: {_some(names)}" for what, names in differences.items() if names
        ]
        raise ValueError(f"not the weights of this model: {'; '.join(said)}")
    for name, shape in expected.items():
        if given[name] != shape:
            raise ValueError(f"{name} has shape {list(given[name])}, the config says {list(shape)}")


def _some(names: Set[str], limit: int = 4) -> str:
    return ", ".join(sorted(names)[:limit]) + (", ..." if len(names) > limit else "")
