"""Transformer configuration under Megatron's names: layers, widths, heads, norms and positions.

This module loads no torch.

The defaults are Llama's. The keys of the same names in fp8cfg/schema/model.py document the fields.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType
from typing import NamedTuple

GATED = ("swiglu", "geglu")
"""Activations with a gate. linear_fc1 has the rows of the gate first, then the up projection."""


@dataclass(frozen=True)
class RopeScaling:
    """Stretch of the rotary frequencies. See `attention.scale_frequencies`.

    `rope_type` is llama3 or linear, as in Hugging Face's config.json. Raises ValueError unless
    `high_freq_factor` is above `low_freq_factor`.
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
    """Shapes of a decoder-only Transformer.

    By default with RMSNorm, rotary positions, grouped-query attention and SwiGLU, without biases.
    Raises ValueError if the numbers do not fit together.
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
    """Tokens in a training sequence. With rotary positions the model accepts any length."""
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
    """Rows of the learned position embedding. None means `seq_length`."""
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
        """Output channels of `linear_fc1`: twice the MLP's width if the activation has a gate."""
        if self.activation in GATED:
            return 2 * self.ffn_hidden_size
        return self.ffn_hidden_size

    @property
    def rotary_size(self) -> int:
        """Channels of a head with rotary positions, its first ones."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def learned_positions(self) -> int:
        """Rows of the learned position embedding, 0 with rotary positions."""
        if self.position_embedding_type != "learned_absolute":
            return 0
        return self.max_position_embeddings or self.seq_length

    def window(self, layer: int) -> int | None:
        """Returns how many tokens a token of the layer (from 0) sees, including itself.

        None means all tokens before it.
        """
        period = self.window_attn_skip_freq
        has_full_attention = period and (layer + 1) % period == 0
        if has_full_attention:
            return None
        return self.sliding_window


def chunk_layers(num_layers: int, num_chunks: int) -> list[range]:
    """Splits the layers of a model into chunks for pipeline parallelism.

    If the chunks can't be equal, embedding and output layer count as one layer each, provided that
    makes them equal, as in NeMo's llama31_405b. Otherwise the first chunks get one more layer.
    """
    size, remainder = divmod(num_layers, num_chunks)
    sizes = [size + 1] * remainder + [size] * (num_chunks - remainder)
    if remainder and (num_layers + 2) % num_chunks == 0:
        sizes = [(num_layers + 2) // num_chunks] * num_chunks
        sizes[0] -= 1
        if num_chunks > 1:
            sizes[-1] -= 1
    chunks = []
    start = 0
    for size in sizes:
        chunks.append(range(start, start + size))
        start += size
    return chunks


def stage_chunks(num_layers: int, num_ranks: int, num_chunks: int) -> list[list[range]]:
    """Returns the layers of each chunk, for each pipeline rank.

    Args:
        num_layers: Layers of the model.
        num_ranks: Pipeline ranks.
        num_chunks: Chunks per rank.
    """
    chunks = chunk_layers(num_layers, num_ranks * num_chunks)
    return [chunks[rank::num_ranks] for rank in range(num_ranks)]


def stage_layers(num_layers: int, num_ranks: int, num_chunks: int) -> list[list[int]]:
    """Returns the layers of each pipeline rank. See `stage_chunks`."""
    layers_by_rank = []
    for chunks in stage_chunks(num_layers, num_ranks, num_chunks):
        layers_by_rank.append([layer for chunk in chunks for layer in chunk])
    return layers_by_rank


class LinearShape(NamedTuple):
    """One linear layer: name and sizes of its weight, [out_features, in_features]."""

    name: str
    in_features: int
    out_features: int


def linear_layers(config: TransformerConfig) -> list[LinearShape]:
    """Returns the linear layers in the order of the forward pass, the output layer last.

    A tied output layer is included: it has a GEMM, although its weight belongs to the embedding.
    """
    layers = []
    for number in range(config.num_layers):
        layers += _layer_linears(config, f"layers.{number}")
    layers.append(LinearShape("output_layer", config.hidden_size, config.vocab_size))
    return layers


def norm_names(config: TransformerConfig) -> list[str]:
    """Returns the module names of the norms, the final norm last."""
    names = []
    for number in range(config.num_layers):
        names += [f"layers.{number}.{name}" for name in _layer_norm_sizes(config)]
    names.append("final_layernorm")
    return names


@functools.lru_cache(maxsize=4)  # a search for a layout that fits asks some hundred times
def parameter_shapes(config: TransformerConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each parameter by name. A tied weight is only in `embedding.weight`."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocab_size, config.hidden_size)
    }
    if config.learned_positions:
        shapes["position_embedding.weight"] = (config.learned_positions, config.hidden_size)

    norm_sizes = {}
    for number in range(config.num_layers):
        for name, size in _layer_norm_sizes(config).items():
            norm_sizes[f"layers.{number}.{name}"] = size
    norm_sizes["final_layernorm"] = config.hidden_size
    for name, size in norm_sizes.items():
        shapes[f"{name}.weight"] = (size,)
        if config.normalization == "LayerNorm":
            shapes[f"{name}.bias"] = (size,)

    for layer in linear_layers(config):
        is_output_layer = layer.name == "output_layer"
        if not (is_output_layer and config.tie_embeddings):
            shapes[f"{layer.name}.weight"] = (layer.out_features, layer.in_features)
        has_qkv_bias = layer.name.endswith("linear_qkv") and config.add_qkv_bias
        if (has_qkv_bias or config.add_bias_linear) and not is_output_layer:
            shapes[f"{layer.name}.bias"] = (layer.out_features,)
    return MappingProxyType(shapes)


def parameter_counts(config: TransformerConfig) -> dict[str, int]:
    """Returns the number of parameters by kind, and their total.

    Kinds are embedding, attention, mlp, layernorm and output_layer. A tied output layer has 0.
    """
    counts = dict.fromkeys(("embedding", "attention", "mlp", "layernorm", "output_layer"), 0)
    for name, shape in parameter_shapes(config).items():
        counts[_parameter_kind(name)] += prod(shape)
    counts["total"] = sum(counts.values())
    return counts


def _layer_linears(config: TransformerConfig, prefix: str) -> list[LinearShape]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    return [
        LinearShape(f"{prefix}.self_attention.linear_qkv", hidden, config.qkv_size),
        LinearShape(f"{prefix}.self_attention.linear_proj", config.query_size, hidden),
        LinearShape(f"{prefix}.mlp.linear_fc1", hidden, config.fc1_size),
        LinearShape(f"{prefix}.mlp.linear_fc2", ffn, hidden),
    ]


def _layer_norm_sizes(config: TransformerConfig) -> dict[str, int]:
    """Returns the channels of each norm of one layer, by the norm's name."""
    has_pre_norms = config.layernorm_placement != "post"
    has_post_norms = config.layernorm_placement != "pre"
    names = []
    if has_pre_norms:
        names.append("input_layernorm")
    if has_post_norms:
        names.append("post_self_attn_layernorm")
    if has_pre_norms:
        names.append("pre_mlp_layernorm")
    if has_post_norms:
        names.append("post_mlp_layernorm")
    sizes = dict.fromkeys(names, config.hidden_size)
    if config.qk_layernorm == "hidden":
        sizes["self_attention.q_layernorm"] = config.query_size
        sizes["self_attention.k_layernorm"] = config.key_size
    elif config.qk_layernorm == "head":
        sizes["self_attention.q_layernorm"] = config.head_dim
        sizes["self_attention.k_layernorm"] = config.head_dim
    return sizes


def _parameter_kind(name: str) -> str:
    if "layernorm" in name:
        return "layernorm"
    if ".self_attention." in name:
        return "attention"
    if ".mlp." in name:
        return "mlp"
    if "embedding" in name:
        return "embedding"
    return "output_layer"


class Projection(NamedTuple):
    """One projection: a linear layer, or some of its output channels.

    Attributes:
        module: Name of the linear layer.
        name: Name at Hugging Face, such as q_proj.
        in_features: Input channels.
        out_features: Output channels.
    """

    module: str
    name: str
    in_features: int
    out_features: int

    @property
    def names(self) -> tuple[str, str]:
        """Full names: the layer's, and one with `name`, such as layers.0.self_attention.q_proj."""
        parent, _, _ = self.module.rpartition(".")
        return self.module, f"{parent}.{self.name}".lstrip(".")


@functools.cache
def projections(config: TransformerConfig) -> tuple[Projection, ...]:
    """Returns all projections in the order of the forward pass, and of the rows within a layer."""
    fc1_parts = [("up_proj", config.ffn_hidden_size)]
    if config.activation in GATED:
        fc1_parts.insert(0, ("gate_proj", config.ffn_hidden_size))
    fused_layers = {
        "linear_qkv": [
            ("q_proj", config.query_size),
            ("k_proj", config.key_size),
            ("v_proj", config.key_size),
        ],
        "linear_fc1": fc1_parts,
    }
    plain_layers = {"linear_proj": "o_proj", "linear_fc2": "down_proj", "output_layer": "lm_head"}
    result = []
    for layer in linear_layers(config):
        leaf = layer.name.rpartition(".")[2]
        if leaf in fused_layers:
            parts = fused_layers[leaf]
        else:
            parts = [(plain_layers[leaf], layer.out_features)]
        for name, size in parts:
            result.append(Projection(layer.name, name, layer.in_features, size))
    return tuple(result)


@functools.cache
def targeted(config: TransformerConfig, patterns: tuple[str, ...]) -> tuple[Projection, ...]:
    """Returns the projections that match one of the patterns of lora.targets."""
    return tuple(
        projection
        for projection in projections(config)
        if any(matches(projection, pattern) for pattern in patterns)
    )


def matches(projection: Projection, pattern: str) -> bool:
    """Returns whether a pattern matches a projection or its layer.

    The pattern covers the full name, or its end from one of the dots on.
    """
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in projection.names
    )


def adapter_parameters(adapted: Sequence[Projection], rank: int) -> int:
    """Returns the number of elements of A and B of the adapters."""
    return sum(rank * (p.in_features + p.out_features) for p in adapted)
