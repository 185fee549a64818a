"""Transformer configuration: layer count, widths, heads, norms and positions under Megatron's names, without torch.

The defaults are Llama's. What a field means, and who trains so, stands with the key of the same name in config/model.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

GATED = ("swiglu", "geglu")
"""Activations of an MLP whose first layer has a gate's rows before those of the up projection."""


@dataclass(frozen=True)
class RopeScaling:
    """A stretch of the rotary frequencies, `rope_type` llama3 or linear in Hugging Face's config.json.

    Raises ValueError where `high_freq_factor` is not above `low_freq_factor`: between the two lies the blend.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rope_type: str = "llama3"

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above"
                f" low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """Shapes of one decoder-only Transformer; by default RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    Raises ValueError where the numbers do not fit together.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key-value heads; equal to `num_attention_heads` for multi-head attention."""
    head_dim: int
    vocab_size: int
    """Rows of the embedding, padding included."""
    seq_length: int
    """Tokens in a training sequence. The model takes any length; plans and memory estimates read this one."""
    rotary_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    layernorm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    normalization: str = "RMSNorm"
    layernorm_zero_centered_gamma: bool = False
    layernorm_placement: str = "pre"
    qk_layernorm: str = "none"
    activation: str = "swiglu"
    add_qkv_bias: bool = False
    add_bias_linear: bool = False
    position_embedding_type: str = "rope"
    max_position_embeddings: int | None = None
    """Rows of learned positions; None is `seq_length`."""
    rotary_percent: float = 1.0
    rotary_base_local: float | None = None
    sliding_window: int | None = None
    window_attn_skip_freq: int | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    scale_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_query_groups",
            "vocab_size",
            "seq_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_attention_heads < 1 or self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of"
                f" num_query_groups={self.num_query_groups}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: rotary positions turn pairs of channels"
            )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def query_size(self) -> int:
        """Channels of all query heads together; the input of `linear_proj`."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Channels of all key heads together, and of all value heads."""
        return self.num_query_groups * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Channels of all query, key and value heads together; the output of `linear_qkv`."""
        return self.query_size + 2 * self.key_size

    @property
    def fc1_size(self) -> int:
        """Channels of the output of `linear_fc1`: twice the MLP's width where a gate multiplies it."""
        return self.ffn_hidden_size * (2 if self.activation in GATED else 1)

    @property
    def rotary_size(self) -> int:
        """Channels of a head that rotary positions turn, the first ones."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def learned_positions(self) -> int:
        """Rows of the learned position embedding; 0 under rotary positions."""
        return (
            (self.max_position_embeddings or self.seq_length)
            if self.position_embedding_type == "learned_absolute"
            else 0
        )

    def window(self, layer: int) -> int | None:
        """Tokens that attention of the layer (from 0) reaches back over, its own among them; None for all of them."""
        every = self.window_attn_skip_freq
        return None if every and (layer + 1) % every == 0 else self.sliding_window


def chunk_layers(layers: int, cuts: int) -> list[range]:
    """The layers of each of `cuts` chunks, in the order of the model.

    Where layers do not divide, embedding and output layer count as one layer each, as NeMo's llama31_405b has it; else the
    first chunks have one layer more.
    """
    sizes = [layers // cuts + (i < layers % cuts) for i in range(cuts)]
    if layers % cuts and (layers + 2) % cuts == 0:
        sizes = [(layers + 2) // cuts - (i in (0, cuts - 1)) for i in range(cuts)]
    starts = [sum(sizes[:i]) for i in range(cuts)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stage_chunks(layers: int, ranks: int, chunks: int) -> list[list[range]]:
    """For each of `ranks` pipeline ranks the layers of each of its `chunks` chunks."""
    cut = chunk_layers(layers, ranks * chunks)
    return [cut[rank::ranks] for rank in range(ranks)]


def stage_layers(layers: int, ranks: int, chunks: int) -> list[list[int]]:
    """The layers of each pipeline rank, of all its chunks together."""
    return [
        [layer for chunk in mine for layer in chunk] for mine in stage_chunks(layers, ranks, chunks)
    ]


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


class Projection(NamedTuple):
    """One projection: the linear layer `module` whose outputs it is, or some of them, its `name` at Hugging Face, and its sizes."""

    module: str
    name: str
    in_features: int
    out_features: int

    @property
    def names(self) -> tuple[str, str]:
        """What it is called in full: by our layer, and by its own name in the place of that."""
        parent, _, _ = self.module.rpartition(".")
        return self.module, f"{parent}.{self.name}".lstrip(".")


@functools.cache
def projections(config: TransformerConfig) -> tuple[Projection, ...]:
    """Every projection, in the order of the forward pass; those of one layer in the order of its rows."""
    parts: dict[str, list[tuple[str, int]]] = {
        "linear_qkv": [
            ("q_proj", config.query_size),
            ("k_proj", config.key_size),
            ("v_proj", config.key_size),
        ],
        "linear_fc1": (
            [("gate_proj", config.ffn_hidden_size), ("up_proj", config.ffn_hidden_size)]
            if config.activation in GATED
            else [("up_proj", config.ffn_hidden_size)]
        ),
    }
    whole = {"linear_proj": "o_proj", "linear_fc2": "down_proj", "output_layer": "lm_head"}
    found = []
    for layer in linear_layers(config):
        leaf = layer.name.rpartition(".")[2]
        of_layer = parts.get(leaf) or [(whole[leaf], layer.out_features)]
        found += [Projection(layer.name, name, layer.in_features, size) for name, size in of_layer]
    return tuple(found)


@functools.cache
def targeted(config: TransformerConfig, patterns: tuple[str, ...]) -> tuple[Projection, ...]:
    """The projections that one of `patterns` names, in full or from one of its dots on."""
    return tuple(p for p in projections(config) if any(matches(p, pattern) for pattern in patterns))


def matches(projection: Projection, pattern: str) -> bool:
    """Whether `pattern` names that projection, or the layer that it is part of."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in projection.names
    )


def adapter_parameters(found: Sequence[Projection], rank: int) -> int:
    """Elements of A and B of all of them."""
    return sum(rank * (p.in_features + p.out_features) for p in found)
