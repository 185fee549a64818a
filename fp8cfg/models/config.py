"""Transformer configuration: layer count, widths, heads and vocabulary under Megatron's names, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies, `rope_type: llama3` in Hugging Face's config.json.

    Raises ValueError where `high_freq_factor` is not above `low_freq_factor`: between the two lies the blend.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}")


@dataclass(frozen=True)
class TransformerConfig:
    """Shapes of one decoder-only Transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

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

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups", "vocab_size", "seq_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_attention_heads < 1 or self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of num_query_groups={self.num_query_groups}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of channels")

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def query_size(self) -> int:
        """Channels of all query heads together; the input of `linear_proj`."""
        return self.num_attention_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Channels of all query, key and value heads together; the output of `linear_qkv`."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim
