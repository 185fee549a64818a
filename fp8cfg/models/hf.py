"""Hugging Face Llama weights: conversion from and to their names and layout.

Hugging Face keeps q, k, v and gate, up apart; here they are fused:

    self_attention.linear_qkv   for each key-value head: its query heads' rows, its key's, its value's
    mlp.linear_fc1              all gate rows, then all up rows

That is Megatron's order. Both sides pair channel i with i + head_dim / 2 in the rotary embedding, so no row changes its
place within a head. The config's `vocab_size` must be the rows that the checkpoint has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.shapes import parameter_shapes

TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER = {
    "input_layernorm": ("input_layernorm",),
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}


def from_hf(state_dict: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """A state dict for `Transformer(config)` from one of transformers' `LlamaForCausalLM`.

    Dtypes are kept. Under `tie_embeddings`, `lm_head.weight` may be absent. Raises ValueError for missing and
    unexpected names, for shapes that are not the config's, and for a tied `lm_head` that differs from the embedding.
    """
    # Llama 2 checkpoints carry the rotary frequencies as buffers; here they follow from the config.
    given = {name: tensor for name, tensor in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    tied_head = given.pop("lm_head.weight", None) if config.tie_embeddings else None
    parts = _parts(config)
    _check(given, {theirs: shape for named in parts.values() for theirs, shape in named.items()})
    if tied_head is not None and not torch.equal(tied_head, given["model.embed_tokens.weight"]):
        raise ValueError("lm_head.weight differs from model.embed_tokens.weight, but tie_embeddings is true")

    ours = {name: _fuse(name, [given[theirs] for theirs in named], config) for name, named in parts.items()}
    if config.tie_embeddings:
        ours["output_layer.weight"] = ours["embedding.weight"]
    return ours


def to_hf(state_dict: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """The inverse of `from_hf`: a state dict for `LlamaForCausalLM`, without `lm_head.weight` where it is tied.

    Raises ValueError for missing and unexpected names and for shapes that are not the config's.
    """
    given = dict(state_dict)
    if config.tie_embeddings:
        given.pop("output_layer.weight", None)
    _check(given, parameter_shapes(config))
    theirs: dict[str, Tensor] = {}
    for name, named in _parts(config).items():
        theirs.update(zip(named, _split(name, given[name], config), strict=True))
    return theirs


def _parts(config: TransformerConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Our names, each with the names and shapes of what makes it up at Hugging Face."""
    return {name: _hf_parts(name, shape, config) for name, shape in parameter_shapes(config).items()}


def _hf_parts(name: str, shape: tuple[int, ...], config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    if name in TOP:
        return {TOP[name]: shape}
    _, index, module = name.removesuffix(".weight").split(".", 2)
    rows: Sequence[int] = shape[:1]
    if module == "self_attention.linear_qkv":
        keys = config.num_query_groups * config.head_dim
        rows = (config.query_size, keys, keys)
    elif module == "mlp.linear_fc1":
        rows = (config.ffn_hidden_size, config.ffn_hidden_size)
    names = [f"model.layers.{index}.{theirs}.weight" for theirs in LAYER[module]]
    return {theirs: (count, *shape[1:]) for theirs, count in zip(names, rows, strict=True)}


def _fuse(name: str, parts: list[Tensor], config: TransformerConfig) -> Tensor:
    if name.endswith("linear_qkv.weight"):
        return torch.cat([_by_group(part, config) for part in parts], dim=1).flatten(0, 2)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _split(name: str, weight: Tensor, config: TransformerConfig) -> list[Tensor]:
    if name.endswith("linear_qkv.weight"):
        parts = _by_group(weight, config).split_with_sizes((config.heads_per_group, 1, 1), dim=1)
        return [part.flatten(0, 2) for part in parts]
    if name.endswith("linear_fc1.weight"):
        return list(weight.chunk(2))
    return [weight]


def _by_group(weight: Tensor, config: TransformerConfig) -> Tensor:
    """[rows, hidden] as [groups, heads, head_dim, hidden]."""
    return weight.reshape(config.num_query_groups, -1, config.head_dim, config.hidden_size)


def _check(given: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    differences = {"missing": expected.keys() - given.keys(), "unexpected": given.keys() - expected.keys()}
    if any(differences.values()):
        said = [f"{len(names)} {what}: {_some(names)}" for what, names in differences.items() if names]
        raise ValueError(f"not the weights of this model: {'; '.join(said)}")
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(given[name].shape)}, the config says {list(shape)}")


def _some(names: Set[str], limit: int = 4) -> str:
    return ", ".join(sorted(names)[:limit]) + (", ..." if len(names) > limit else "")
