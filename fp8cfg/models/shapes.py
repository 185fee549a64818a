"""Parameter shapes and counts, and the linear layers of the Transformer, computed without torch.

The model is tested to have exactly these names and shapes, and the counts to equal the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from fp8cfg.models.config import TransformerConfig


class LinearShape(NamedTuple):
    """One linear layer: its module name, and the sizes of `weight[out_features, in_features]`."""

    name: str
    in_features: int
    out_features: int


def linear_layers(config: TransformerConfig) -> list[LinearShape]:
    """Linear layers in the order of the forward pass, the output layer last.

    A tied output layer is listed as well: it multiplies, although its weight is the embedding's.
    """
    layers = [
        layer for i in range(config.num_layers) for layer in _block_linears(config, f"layers.{i}")
    ]
    return [*layers, LinearShape("output_layer", config.hidden_size, config.vocab_size)]


def norm_names(config: TransformerConfig) -> list[str]:
    """Module names of the norms, the final one last."""
    return [
        *(f"layers.{i}.{name}" for i in range(config.num_layers) for name in _block_norms(config)),
        "final_layernorm",
    ]


@lru_cache(maxsize=4)  # a search for what fits asks for those of one model some hundred times
def parameter_shapes(config: TransformerConfig) -> Mapping[str, tuple[int, ...]]:
    """Shape of each parameter by name; a tied weight appears once, as `embedding.weight`."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocab_size, config.hidden_size)
    }
    if config.learned_positions:
        shapes["position_embedding.weight"] = (config.learned_positions, config.hidden_size)
    parts = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    norms = {
        f"layers.{i}.{name}": size
        for i in range(config.num_layers)
        for name, size in _block_norms(config).items()
    }
    for name, size in {**norms, "final_layernorm": config.hidden_size}.items():
        shapes |= {f"{name}.{part}": (size,) for part in parts}
    for layer in linear_layers(config):
        if not (layer.name == "output_layer" and config.tie_embeddings):
            shapes[f"{layer.name}.weight"] = (layer.out_features, layer.in_features)
        qkv = layer.name.endswith("linear_qkv") and config.add_qkv_bias
        if (qkv or config.add_bias_linear) and layer.name != "output_layer":
            shapes[f"{layer.name}.bias"] = (layer.out_features,)
    return MappingProxyType(shapes)


def parameter_counts(config: TransformerConfig) -> dict[str, int]:
    """Parameters by kind: embedding, attention, mlp, layernorm, output_layer (0 where tied), and their total."""
    counts = dict.fromkeys(("embedding", "attention", "mlp", "layernorm", "output_layer"), 0)
    for name, shape in parameter_shapes(config).items():
        counts[_kind(name)] += prod(shape)
    return {**counts, "total": sum(counts.values())}


def _block_linears(config: TransformerConfig, prefix: str) -> list[LinearShape]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    return [
        LinearShape(f"{prefix}.self_attention.linear_qkv", hidden, config.qkv_size),
        LinearShape(f"{prefix}.self_attention.linear_proj", config.query_size, hidden),
        LinearShape(f"{prefix}.mlp.linear_fc1", hidden, config.fc1_size),
        LinearShape(f"{prefix}.mlp.linear_fc2", ffn, hidden),
    ]


def _block_norms(config: TransformerConfig) -> dict[str, int]:
    """The norms of one layer, by name, with their channels."""
    before, after = config.layernorm_placement != "post", config.layernorm_placement != "pre"
    names = [
        name
        for there, name in (
            (before, "input_layernorm"),
            (after, "post_self_attn_layernorm"),
            (before, "pre_mlp_layernorm"),
            (after, "post_mlp_layernorm"),
        )
        if there
    ]
    whole = config.qk_layernorm == "hidden"
    sizes = (
        {"q": config.query_size, "k": config.key_size}
        if whole
        else dict.fromkeys("qk", config.head_dim)
    )
    normed = {
        f"self_attention.{part}_layernorm": size
        for part, size in sizes.items()
        if config.qk_layernorm != "none"
    }
    return {**dict.fromkeys(names, config.hidden_size), **normed}


def _kind(name: str) -> str:
    if "layernorm" in name:
        return "layernorm"
    if ".self_attention." in name:
        return "attention"
    if ".mlp." in name:
        return "mlp"
    return "embedding" if "embedding" in name else "output_layer"
