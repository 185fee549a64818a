"""The `model` node: the shape of a decoder-only Transformer, in Megatron's terms."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fp8cfg.config.node import Node


class RopeScaling(Node):
    """Llama 3.1's stretching of rotary frequencies. A factor of 1 is off."""

    home: ClassVar[str] = "model.rope_scaling"

    factor: float = Field(default=1.0, ge=1.0)
    """Stretching of the low frequencies. Default 1, off; Llama 3.1 has 8, Llama 3.2 has 32."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Wavelengths above original_max_position / this are stretched in full. Default 1 (Llama 3.1)."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """Wavelengths below original_max_position / this are left alone. Default 4 (Llama 3.1)."""
    original_max_position: int = Field(default=8192, ge=1)
    """Context length, in tokens, that the frequencies were made for. Default 8192 (Llama 3)."""


class Model(Node):
    """A decoder-only Transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    home: ClassVar[str] = "model"

    num_layers: int = Field(default=4, ge=1, le=10_000)
    """Transformer layers. Default 4 (llama_tiny)."""
    hidden_size: int = Field(default=256, ge=1)
    """Width of the residual stream. Default 256 (llama_tiny)."""
    ffn_hidden_size: int = Field(default=768, ge=1)
    """Width inside the MLP. Default 768 (llama_tiny)."""
    num_attention_heads: int = Field(default=4, ge=1)
    """Query heads. Default 4 (llama_tiny)."""
    num_query_groups: int = Field(default=2, ge=1)
    """Key and value heads; queries share them in groups. Default 2 (llama_tiny)."""
    kv_channels: int | None = Field(default=None, ge=2)
    """Width of a head; null is hidden_size / num_attention_heads. Default null (Megatron)."""
    vocab_size: int = Field(default=272, ge=1)
    """Rows of the embedding, padding included. Default 272: 256 bytes and an end mark, padded to a multiple of 16."""
    seq_length: int = Field(default=256, ge=2)
    """Tokens of one training sample. Default 256 (llama_tiny)."""
    rotary_base: float = Field(default=10000.0, gt=1)
    """Base of the rotary frequencies (theta). Default 10000 (Llama 2)."""
    rope_scaling: RopeScaling = Field(default_factory=RopeScaling)
    """Stretching of the rotary frequencies; off by default."""
    layernorm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm. Default 1e-5 (Llama)."""
    share_embeddings_and_output_weights: bool = False
    """Tie the output layer to the embedding. Default false (Llama 2, 3, 3.1)."""
    init_method_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights. Default 0.02 (Megatron)."""
    recompute_granularity: Literal["none", "full"] = "none"
    """Activation checkpointing: full recomputes each layer in backward. Default none (NeMo)."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads
